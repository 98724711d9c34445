"""Rows of tests/cases through the program itself: checkpoint (CK), numerics (NM), tokenizer (TK)."""

import json
import subprocess
import sys
import time

import pytest

from models import CASES, base, ids_text  # noqa: F401 (base is a fixture)


def load(path):
    return json.loads((CASES / path).read_text(encoding="utf-8"))


# --- checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every folder of the generator, and what must happen to it."""
    out = tmp_path_factory.mktemp("folders")
    subprocess.run([sys.executable, CASES / "checkpoint" / "make_bad_checkpoints.py", out],
                   check=True, capture_output=True)
    return out


def case_names():
    script = CASES / "checkpoint" / "make_bad_checkpoints.py"
    listed = subprocess.run([sys.executable, script, "--list"], check=True, capture_output=True,
                            text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(("ck", "base "))]


def greedy(k3, folder, **kwargs):
    return k3("run", folder, "-p", "hi", "-n", 16, "--temp", 0, timeout=20, **kwargs)


@pytest.mark.parametrize("name", case_names())
def test_checkpoint_case(k3, folders, name):
    row = next(r for r in json.loads((folders / "expected.json").read_text()) if r["case"] == name)
    start = time.monotonic()
    out = greedy(k3, folders / name, code=None)
    seconds = time.monotonic() - start
    loads = out.exit_code == 0
    if row["outcome"] != "either":
        assert loads == (row["outcome"] == "load"), out
    if loads:
        if row["same_as"]:
            assert out.stdout == greedy(k3, folders / row["same_as"]).stdout
        assert out.stdout != ""
    else:
        assert out.exit_code == 1 and out.stdout == "", out
        assert out.stderr.count("\n") == 1 and seconds < 5, out
    if row["outcome"] != "load":
        assert all(word in out.stderr for word in row["mentions"]), out


def test_every_checkpoint_case_is_run(folders):
    assert sorted(case_names()) == sorted(r["case"] for r in
                                          json.loads((folders / "expected.json").read_text()))


# --- numerics


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_nm03_prompts_around_the_chunk_sizes(k3, base, length):
    ids = list(("the quick small model reads a long line of text " * 2).encode())[:length]
    args = ["run", base, "--ids", ids_text(ids), "-n", 8, "--temp", 0, "--logprobs", 0, "--json"]
    whole = k3(*args).json()
    for chunk in [1, 2, 7, 15, 16, 17, 63, 64, 65]:
        cut = k3(*args, "--prefill-chunk", chunk).json()
        assert (cut["ids"], cut["logprobs"]) == (whole["ids"], whole["logprobs"]), chunk
    # In f32 the chunk form agrees with the recurrence; in bf16 a random model has near ties.
    f32 = k3(*args, "--math", "fast", env={"K3_ISA": "scalar"}).json()
    assert f32["ids"] == whole["ids"]
    fast = k3(*args, "--math", "fast").json()
    cut = k3(*args, "--math", "fast", "--prefill-chunk", 64).json()
    assert (cut["ids"], cut["logprobs"]) == (fast["ids"], fast["logprobs"])


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64])
def test_nm11_experts_without_tokens(k3, folders, length):
    ids = list(("the quick small model reads a long line of text " * 2).encode())[:length]
    args = ["run", folders / "ck22_all_tokens_to_two_experts", "--ids", ids_text(ids), "-n", 8,
            "--temp", 0, "--logprobs", 0, "--json"]
    runs = [k3(*args, "--prefill-chunk", chunk).json() for chunk in (512, 1, 5, 32)]
    runs += [k3(*args, "--threads", threads).json() for threads in (1, 2, 3)]
    assert all((r["ids"], r["logprobs"]) == (runs[0]["ids"], runs[0]["logprobs"]) for r in runs)


def test_nm12_scores_that_are_nan_end_the_run_with_an_error(k3, folders, tmp_path):
    state = tmp_path / "state"
    out = greedy(k3, folders / "ck20_nan_in_output_layer", code=1)
    assert "lm_head" in out.stderr and "finite" in out.stderr.lower()
    k3("run", folders / "ck20_nan_in_output_layer", "-p", "hi", "-n", 4, "--save-state", state,
       code=1)
    assert not state.exists(), "a state behind an error must not be written"


# --- tokenizer

TINY_TOKENIZER = CASES / "tokenizer" / "tiny"


def round_trip(k3, tmp_path, data):
    """Ids of the bytes, after checking that they decode to the same bytes."""
    ids = k3("tokenize", TINY_TOKENIZER, stdin=data, timeout=20).stdout.split()
    (tmp_path / "ids").write_text(" ".join(ids))
    decoded = k3("tokenize", TINY_TOKENIZER, "--decode", f"@{tmp_path / 'ids'}", timeout=20)
    assert decoded.raw_stdout == data
    return list(map(int, ids))


def test_tk01_spellings_of_control_tokens_are_text(k3):
    tokens = load("tokenizer/tiny/tokenizer_config.json")["added_tokens_decoder"]
    for token in tokens.values():
        ids = k3("tokenize", TINY_TOKENIZER, "-p", token["content"]).stdout.split()
        assert ids and max(map(int, ids)) < min(map(int, tokens)), token


def mixed_letters(count):
    x, out = 1, bytearray()
    for _ in range(count):
        x = (1103515245 * x + 12345) % 2**31
        out.append(97 + (x >> 16) % 26)
    return bytes(out)


@pytest.mark.parametrize("row", load("tokenizer/long_runs.json")["rows"], ids=lambda r: r["name"])
def test_tk02_tk03_long_runs(k3, tmp_path, row):
    data = (row["unit"] * row["count"]).encode() if "unit" in row else mixed_letters(row["count"])
    start = time.monotonic()
    round_trip(k3, tmp_path, data)
    assert time.monotonic() - start < 4, "both ways; 2 s each"


def test_tk04_golden_rows(k3, tmp_path):
    for row in load("tokenizer/golden.json")["cases"]:
        assert round_trip(k3, tmp_path, row["text"].encode()) == row["ids"], row


def test_tk07_blank_lines(k3, tmp_path):
    start = time.monotonic()
    round_trip(k3, tmp_path, (CASES / "tokenizer" / "blank_lines.txt").read_bytes())
    assert time.monotonic() - start < 4, "both ways; 2 s each"


def test_tk09_without_tokenizer_files_one_line_names_them(k3, base, model_copy):
    folder = model_copy(base)
    (folder / "tokenizer_config.json").unlink()
    k3("run", folder, "-p", "hi", "-n", 1)
    (folder / "tiktoken.model").unlink()
    out = k3("run", folder, "-p", "hi", "-n", 1, code=1)
    assert out.stderr.count("\n") == 1
    assert "tiktoken.model" in out.stderr and "tokenizer_config.json" in out.stderr
