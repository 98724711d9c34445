"""The command line: help, refusals, exit statuses, closed pipes, odd folders."""

import json
import os
import resource
import subprocess

import pytest

from models import CASES, base  # noqa: F401 (a fixture)

COMMANDS = ["run", "tokenize", "eval", "trace", "bench", "inspect", "plan", "check", "info"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_exit_statuses(k3, command):
    text = k3(command, "--help").stdout
    assert "Examples:" in text and "Exit status:" in text and f"k3 {command}" in text


def test_version_and_help(k3):
    assert k3("--version").stdout.startswith("k3 ")
    text = k3("--help").stdout
    assert all(command in text for command in COMMANDS)
    assert "no command given" in k3(code=2).stderr
    assert '"--josn"' in k3("--josn", "info", code=2).stderr
    assert "[MODEL] ppl" in k3("eval", "--help").stdout


def test_an_empty_model_is_not_the_demo_model(k3):
    assert "expected a folder" in k3("run", "", "-p", "hi", code=2).stderr


def test_an_unknown_instruction_set_is_never_replaced(k3):
    for command in (["info"], ["run", "-p", "hi"]):
        assert "K3_ISA=abacus" in k3(*command, env={"K3_ISA": "abacus"}, code=1).stderr


def test_mistyped_words_get_a_suggestion(k3):
    assert '"tokenize"' in k3("tokenise", code=2).stderr
    assert '"run"' in k3("rnu", "-p", "x", code=2).stderr
    assert "--temp" in k3("run", "--tmp", "1", code=2).stderr
    assert "mean" not in k3("zzzzzzzz", code=2).stderr


BAD_NUMBERS = [
    ("-n", "-5"), ("-n", "abc"), ("-n", "3x"), ("-n", ""), ("-n", "99999999999999999999"),
    ("-n", "0x10"), ("-n", "1.5"), ("--temp", "nan"), ("--temp", "inf"), ("--temp", "-1"),
    ("--temp", "1e999"), ("--ctx", "0"), ("--ctx", "99999999999"), ("--ctx", "-1"),
    ("--threads", "100000"), ("--threads", "-1"), ("--seed", "-1"), ("--seed", "1.0"),
    ("--seed", "18446744073709551616"), ("--top-p", "1.5"), ("--top-p", "nan"), ("--min-p", "-0.1"),
    ("--top-k", "-1"), ("--repeat-penalty", "0"), ("--frequency-penalty", "1e9"),
    ("--presence-penalty", "x"), ("--logit-bias", "x=1"), ("--logit-bias", "1=nan"),
    ("--logit-bias", "1"), ("--prefill-chunk", "0"), ("--math", "loose"), ("--ids", "1,-2"),
    ("--ids", "1;2"), ("--ids", "@"), ("--save-state", ""), ("--load-state", ""), ("--ids", "99999999999"), ("--ids", "1,,2"), ("--ids", ",1"), ("--stop", ""),
]


@pytest.mark.parametrize("option,value", BAD_NUMBERS, ids=lambda x: str(x))
def test_cl10_bad_values_are_usage_errors(k3, base, option, value):
    # --ids replaces -p, which excludes it.
    prompt = [] if option == "--ids" else ["-p", "hi"]
    out = k3("run", base, *prompt, option, value, code=2, timeout=10)
    names = {"-n": "--max-tokens"}
    assert names.get(option, option) in out.stderr and out.stdout == ""


def test_an_empty_prompt_is_bos_alone(k3, base, demo_model):
    empty = k3("run", demo_model, "--ids", "", "-n", 4, "--temp", 0, "--json").json()
    assert len(empty["prompt_ids"]) == 1 and len(empty["ids"]) > 0
    text = k3("run", demo_model, "-p", "", "-n", 4, "--temp", 0, "--json").json()
    assert empty["ids"] == text["ids"]
    assert k3("run", demo_model, "--ids", "", "--no-bos", "-n", 4).stdout == ""


def test_cl10_documented_meanings(k3, base, demo_model):
    k3("run", base, "-p", "hi", "-n", 2, "--threads", 0)
    out = k3("run", demo_model, "-p", "hi", "-n", 2, "--ctx", 4097, code=2)
    assert "4097" in out.stderr and "4096" in out.stderr


def test_threads_the_system_refuses_are_named(k3_bin, base):
    # Their stacks alone need more address space than this.
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))  # noqa: E731
    done = subprocess.run([k3_bin, "run", base, "-p", "hi", "-n", "2", "--threads", "1024"],
                          capture_output=True, text=True, timeout=60, preexec_fn=limit, check=False)
    assert (done.returncode, done.stdout) == (3, ""), done
    assert "--threads" in done.stderr and "1024" in done.stderr and done.stderr.count("\n") == 1


def test_options_that_exclude_each_other(k3, base):
    k3("run", base, "-p", "a", "--ids", "1", code=2)
    k3("run", base, "-p", "a", "--bos", "--no-bos", code=2)
    k3("run", base, "-p", "a", "--logprobs", 3, code=2)
    k3("run", base, "-p", "a", "--temp", 1, "--temp", 2, code=2)
    k3("eval", base, "chess", "--text", "x", code=2)


def test_usage_errors_say_what_was_found_and_expected(k3, base):
    for args, words in ((["run", base, "-p"], "--prompt: found nothing, expected TEXT"),
                        (["run", base, "--seed", 1, "--seed", 2], "--seed: found 2 times, expected once"),
                        (["run", base, "--math", "loose"], 'found "loose", expected exact or fast'),
                        (["trace", base, "--ids", 1, "--out", ""], '--out: found "", expected a file'),
                        (["eval", base, "ppl", "--text", ""], '--text: found "", expected a file'),
                        (["quantize", base, "x", "--trunk", "fp4"], 'found "fp4", expected ')):
        out = k3(*args, code=2)
        assert words in out.stderr and out.stdout == ""


# --- CL-09: folders


def test_cl09_folder_problems_name_the_path_and_the_reason(k3, base, model_copy):
    folder = model_copy(base)
    config = folder / "config.json"
    text = config.read_text()

    def refused(reason):
        out = k3("run", folder, "-p", "hi", code=1, timeout=10)
        assert str(config) in out.stderr and out.stdout == ""
        assert out.stderr.count("\n") == 1
        assert reason in out.stderr.lower(), out.stderr

    config.unlink()
    refused("no such file")
    config.mkdir()
    refused("folder")
    config.rmdir()
    config.write_text("")
    refused("unexpected end")
    duplicate = text.replace('"hidden_size"', '"hidden_size": 1, "hidden_size"', 1)
    config.write_text(duplicate)
    refused("duplicate")
    config.write_text(text)
    k3("run", folder, "-p", "hi", "-n", 2)


def test_messages_are_one_line_whatever_the_names(k3):
    for name in ("no\nsuch", "no\x1b[31msuch", "no\r\x7fsuch"):
        out = k3("run", f"/tmp/{name}", "-p", "hi", code=1)
        assert out.stderr.count("\n") == 1 and out.stderr.strip().isprintable(), out.stderr


def test_cl09_a_folder_without_permission(k3, base, model_copy):
    if os.geteuid() == 0:
        pytest.skip("SKIP root may read everything")
    folder = model_copy(base)
    folder.chmod(0)
    try:
        assert "ermission" in k3("run", folder, "-p", "hi", code=1).stderr
    finally:
        folder.chmod(0o755)


def test_cl09_good_folders_under_odd_names_work(k3, base, model_copy, tmp_path):
    expected = k3("run", base, "-p", "hi", "-n", 8, "--temp", 0).stdout
    odd = model_copy(base, "a model – größer 模型")
    link = tmp_path / "link"
    link.symlink_to(odd)
    odd_names = [odd, f"{odd}/", link, os.path.relpath(odd, tmp_path)]
    for name in odd_names:
        assert k3("run", name, "-p", "hi", "-n", 8, "--temp", 0, cwd=tmp_path).stdout == expected
    for path in [*odd.iterdir(), odd]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert k3("run", odd, "-p", "hi", "-n", 8, "--temp", 0).stdout == expected
    odd.chmod(0o755)


def test_a_missing_tokenizer_config_is_no_silent_default(k3, demo_model, model_copy):
    folder = model_copy(demo_model)
    assert k3("run", folder, "-p", "hi", "-n", 1).stderr == ""
    (folder / "tokenizer_config.json").unlink()
    out = k3("run", folder, "-p", "hi", "-n", 1, "--json")
    assert "tokenizer_config.json is missing" in out.stderr and "BOS" in out.stderr
    assert len(out.json()["prompt_ids"]) == len(k3("tokenize", folder, "-p", "hi").stdout.split())


# --- standard output that goes away


def test_a_closed_pipe_ends_quietly_with_status_1(k3_bin, base):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([k3_bin, "run", base, "-p", "hi", "-n", "50"], stdout=writer,
                              stderr=subprocess.PIPE, timeout=20, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("args", [["run", "-p", "hi", "-n", "4"], ["tokenize", "-p", "hi"],
                                  ["info"], ["--help"], ["run", "-p", "hi", "-n", "4", "--json"]],
                         ids=lambda a: " ".join(a))
def test_a_full_disk_is_reported(k3_bin, args):
    if not os.path.exists("/dev/full"):
        pytest.skip("SKIP no /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run([k3_bin, *args], stdout=full, stderr=subprocess.PIPE, timeout=20,
                              check=False)
    assert done.returncode == 1
    assert b"No space left" in done.stderr


def test_closed_and_full_standard_files_end_with_a_status(k3_bin, base, tmp_path):
    def status(redirections, *args):
        line = f'exec "$0" "$@" {redirections}'
        return subprocess.run(["bash", "-c", line, k3_bin, *map(str, args)], timeout=20,
                              capture_output=True, check=False).returncode

    run = ("run", base, "-p", "hi", "-n", 2)
    assert status(">&- 2>&- <&-", *run) == 1
    assert status("2>&-", "run", "/no/such/model", "-p", "hi") == 1
    assert status("2>&-", *run) == 0
    if os.path.exists("/dev/full"):
        assert status("2>/dev/full", "run", "/no/such/model", "-p", "hi") == 1
        assert status("2>/dev/full", "run", "--nonsense") == 2
    # The state must not get the number of a closed file, and messages inside.
    state = tmp_path / "state"
    assert status("2>&-", *run, "--save-state", state) == 0
    assert state.read_bytes().startswith(b"K3STATE")


@pytest.mark.parametrize("args", [["trace", "--ids", "1,2", "--out"],
                                  ["run", "-p", "hi", "-n", "2", "--save-state"]], ids=lambda a: a[0])
def test_output_files_replace_only_regular_files(k3, k3_bin, base, tmp_path, args):
    command, *rest = args
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    refused = k3(command, base, *rest, pipe, code=1)
    assert "not a regular file" in refused.stderr and refused.stdout == ""
    assert pipe.is_fifo()
    refused = k3(command, base, *rest, tmp_path, code=1)  # before any text is generated
    assert "is a folder" in refused.stderr and refused.stdout == ""
    target.write_bytes(b"old")
    link.symlink_to(target)
    k3(command, base, *rest, link)
    assert link.is_symlink() and len(target.read_bytes()) > 100
    left = sorted(path.name for path in tmp_path.iterdir())
    full = subprocess.run(["bash", "-c", 'ulimit -f 1; exec "$0" "$@"', k3_bin, command, base, *rest,
                           tmp_path / "full"], timeout=20, capture_output=True, check=False)
    assert full.returncode == 1 and b"File too large" in full.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_too_many_threads_for_the_system_is_no_crash(k3_bin, base):
    done = subprocess.run(["bash", "-c", 'ulimit -v 300000; exec "$0" "$@"', k3_bin, "run", base,
                           "-p", "hi", "-n", "2", "--threads", "512"], timeout=20,
                          capture_output=True, check=False)
    assert done.returncode == 3, done
    assert b"--threads: cannot start" in done.stderr or b"not enough memory" in done.stderr, done


# --- tokenize


def test_tokenize_prints_ids_and_back(k3, base):
    text = "the quick – größer 模型\n  x"
    ids = k3("tokenize", base, "-p", text).stdout
    assert ids.endswith("\n") and ids.count("\n") == 1
    assert k3("tokenize", base, stdin=text).stdout == ids
    again = k3("tokenize", base, "--decode", ids.strip().replace(" ", ","))
    assert again.raw_stdout == text.encode()
    as_json = k3("tokenize", base, "-p", text, "--json").json()
    assert as_json["ids"] == list(map(int, ids.split())) and as_json["n_tokens"] == len(ids.split())
    assert k3("tokenize", base, "-p", "").stdout == "\n"


def test_tk06_half_characters_come_back_exactly(k3, base):
    rows = json.loads((CASES / "tokenizer" / "raw_bytes.json").read_text())["rows"]
    for data in [bytes.fromhex(row["hex"]) for row in rows] + [b"\xe6\xad"]:
        ids = k3("tokenize", base, stdin=data).stdout.split()
        assert k3("tokenize", base, "--decode", ",".join(ids)).raw_stdout == data
        k3("tokenize", base, "--json", stdin=data).json()


def test_tokenize_refuses_ids_outside_the_vocabulary(k3, base):
    assert "99999" in k3("tokenize", base, "--decode", "99999", code=1).stderr


# --- info


def test_info(k3, demo_model):
    info = k3("info", "--json").json()
    assert info["version"] and info["usable_cpus"] >= 1 and info["usable_memory_bytes"] > 0
    assert os.path.samefile(info["demo_model"], demo_model)
    assert info["instruction_set_in_use"] in k3("info").stdout
    assert info["instruction_set_choices"][0] == "scalar"
    assert info["instruction_set_in_use"] == info["instruction_set_choices"][-1]
    for isa in info["instruction_set_choices"]:
        assert k3("info", "--json", env={"K3_ISA": isa}).json()["instruction_set_in_use"] == isa


def test_k3_isa_forces_and_refuses(k3, base):
    texts = set()
    for isa in ("scalar", None):
        env = {"K3_ISA": isa} if isa else {}
        texts.add(k3("run", base, "-p", "hi", "-n", 8, "--temp", 0, env=env).stdout)
    assert len(texts) == 1, "exact mode gives the same text on every instruction set"
    assert "mmx" in k3("run", base, "-p", "hi", env={"K3_ISA": "mmx"}, code=1).stderr
