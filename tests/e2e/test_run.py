"""k3 run: the text it gives, where it goes, and what it remembers."""

import json
import os
import struct
import subprocess

import pytest

from models import GOLDEN, base, base_rows, ids_text  # noqa: F401 (base is a fixture)

DEMO = json.loads((GOLDEN / "demo.json").read_text())


def run_json(k3, *args, **kwargs):
    return k3("run", *args, "--json", **kwargs).json()


@pytest.mark.parametrize("row", DEMO["greedy"], ids=range(len(DEMO["greedy"])))
def test_demo_model_greedy_text_is_the_reference(k3, demo_model, row):
    out = run_json(k3, demo_model, "-p", row["prompt"], "-n", 24, "--temp", 0)
    assert out["prompt_ids"] == row["prompt_ids"]
    # A step whose two best scores are closer than float32 can tell may go either way.
    sure = next((i for i, m in enumerate(row["margin"]) if m <= 0.01), len(row["margin"]))
    assert out["ids"][:sure] == row["greedy_ids"][:sure]
    if sure == len(row["margin"]):
        assert out["text"] == row["text"]


@pytest.mark.parametrize("row", base_rows(), ids=range(len(base_rows())))
def test_base_greedy_ids_and_logprobs(k3, base, row):
    out = run_json(k3, base, "-p", row["prompt"], "-n", len(row["greedy_ids"]), "--temp", 0,
                   "--logprobs", 1)
    assert out["prompt_ids"] == row["prompt_ids"]
    assert out["ids"] == row["greedy_ids"]
    assert out["text"] == row["text"]
    assert [t["id"] for t in out["logprobs"]] == row["greedy_ids"]
    for token, expected in zip(out["logprobs"], row["logprobs"]):
        assert abs(token["logprob"] - expected) < 1e-3
        assert token["top"][0]["id"] == token["id"]


def test_without_model_the_demo_model_runs(k3, demo_model):
    a = k3("run", "-p", "Once", "-n", 4, "--temp", 0)
    b = k3("run", demo_model, "-p", "Once", "-n", 4, "--temp", 0)
    assert a.stdout == b.stdout != ""


def test_k3_model_names_the_default(k3, base):
    out = run_json(k3, "-p", "hi", "-n", 4, "--temp", 0, env={"K3_MODEL": str(base)})
    assert out["ids"] == base_rows()[0]["greedy_ids"][:4]
    missing = k3("run", "-p", "hi", env={"K3_MODEL": "/no/such/folder"}, code=1)
    assert "/no/such/folder" in missing.stderr


def test_same_seed_same_text_whatever_the_threads(k3, demo_model):
    args = [demo_model, "-p", "The sea", "-n", 24, "--temp", 1.5, "--seed", 3]
    texts = {k3("run", *args, "--threads", t).stdout for t in (1, 2, 3, 7)}
    assert len(texts) == 1
    other = k3("run", demo_model, "-p", "The sea", "-n", 24, "--temp", 1.5, "--seed", 4).stdout
    assert other not in texts


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_prefill_chunks_do_not_matter(k3, base, chunk):
    prompt = "the text " * 20
    whole = run_json(k3, base, "-p", prompt, "-n", 16, "--temp", 0, "--logprobs", 0)
    cut = run_json(k3, base, "-p", prompt, "-n", 16, "--temp", 0, "--logprobs", 0,
                   "--prefill-chunk", chunk)
    assert cut["ids"] == whole["ids"]
    assert cut["logprobs"] == whole["logprobs"], "exact mode gives the same bits"


def test_tiny_temperatures_are_greedy(k3, demo_model):
    texts = {k3("run", demo_model, "-p", "Once upon", "-n", 12, "--temp", t).stdout
             for t in ("0", "0.0001", "1e-30")}
    assert len(texts) == 1 and texts != {""}


def test_sampling_defaults_come_from_generation_config(k3, demo_model, model_copy, edit_json):
    folder = model_copy()
    config = folder / "generation_config.json"
    greedy = k3("run", folder, "-p", "Once", "-n", 12, "--temp", 0).stdout
    assert k3("run", folder, "-p", "Once", "-n", 12, "--seed", 5).stdout != greedy
    edit_json(config, lambda c: c.update(do_sample=False))
    assert k3("run", folder, "-p", "Once", "-n", 12, "--seed", 5).stdout == greedy
    config.unlink()
    assert k3("run", folder, "-p", "Once", "-n", 12, "--seed", 5).stdout == greedy


def test_end_token_of_generation_config_wins(k3, base, model_copy, edit_json):
    folder = model_copy(base)
    first = base_rows()[0]["greedy_ids"]
    edit_json(folder / "generation_config.json", lambda c: c.update(eos_token_id=[first[5]]))
    out = run_json(k3, folder, "-p", "hi", "-n", 16, "--temp", 0)
    assert out["finish_reason"] == "stop"
    assert out["ids"] == first[:5]


def test_stop_strings(k3, base):
    row = base_rows()[0]
    out = run_json(k3, base, "-p", "hi", "-n", 16, "--temp", 0, "--stop", "zzz", "--stop", "wri*")
    assert out["text"] == row["text"][:row["text"].index("wri*")]
    assert out["finish_reason"] == "stop" and out["stop"] == "wri*"
    plain = k3("run", base, "-p", "hi", "-n", 16, "--temp", 0, "--stop", "wri*")
    assert plain.stdout == out["text"]
    # Brackets are ordinary characters, and what only begins like a stop string is given out.
    end = row["text"][-2:] + "]"
    whole = run_json(k3, base, "-p", "hi", "-n", 16, "--temp", 0, "--stop", "[a,b]", "--stop", end)
    assert whole["text"] == row["text"] and whole["finish_reason"] == "length"


def test_penalties_and_bias_change_the_choice(k3, base):
    ids = base_rows()[0]["greedy_ids"]
    biased = run_json(k3, base, "-p", "hi", "-n", 1, "--temp", 0, "--logit-bias", f"{ids[0]}=-100")
    assert biased["ids"][0] != ids[0]
    forced = run_json(k3, base, "-p", "hi", "-n", 4, "--temp", 0, "--logit-bias", "65=100")
    assert forced["ids"] == [65] * 4
    held = run_json(k3, base, "-p", "hi", "-n", 4, "--temp", 0, "--logit-bias", "65=50",
                    "--presence-penalty", 100)
    assert held["ids"].count(65) == 1


def test_bos_rules(k3, base, demo_model):
    assert run_json(k3, base, "-p", "hi", "-n", 0)["prompt_ids"] == [104, 105]
    bos = run_json(k3, base, "-p", "hi", "-n", 0, "--bos")["prompt_ids"]
    assert bos[1:] == [104, 105] and len(bos) == 3
    assert run_json(k3, demo_model, "-p", "hi", "-n", 0)["prompt_ids"][0] == 3840
    assert 3840 not in run_json(k3, demo_model, "-p", "hi", "-n", 0, "--no-bos")["prompt_ids"]
    assert run_json(k3, demo_model, "--ids", "5,6", "-n", 0)["prompt_ids"] == [5, 6]
    assert run_json(k3, demo_model, "-p", "", "-n", 0)["prompt_ids"] == [3840]
    assert k3("run", demo_model, "-p", "", "--no-bos", "-n", 4).stdout == ""


def test_ids_from_a_file(k3, base, tmp_path):
    (tmp_path / "ids").write_text("104, 105\n")
    out = run_json(k3, base, "--ids", f"@{tmp_path / 'ids'}", "-n", 4, "--temp", 0)
    assert out["ids"] == base_rows()[0]["greedy_ids"][:4]
    (tmp_path / "bad").write_text("104, x")
    assert str(tmp_path / "bad") in k3("run", base, "--ids", f"@{tmp_path / 'bad'}", code=1).stderr


def test_the_context_is_a_limit(k3, base):
    full = run_json(k3, base, "-p", "hi", "-n", 100, "--ctx", 10, "--temp", 0)
    assert full["finish_reason"] == "length" and len(full["ids"]) == 8
    long = k3("run", base, "-p", "x" * 30, "--ctx", 10, code=1)
    assert "10" in long.stderr and "30" in long.stderr and long.stdout == ""


def test_ids_outside_the_vocabulary(k3, base):
    out = k3("run", base, "--ids", "1,99999", code=1)
    assert "99999" in out.stderr and out.stdout == ""


def test_bytes_that_are_no_utf8_are_accepted_exactly(k3, base):
    out = run_json(k3, base, "-n", 0, stdin=b"a\xff\xe6\xad")
    assert out["prompt_ids"] == [0x61, 0xff, 0xe6, 0xad]


# --- a sequence on disk


def test_save_and_load_continue_as_if_never_stopped(k3, base, tmp_path):
    state = tmp_path / "s.k3s"
    args = ["--temp", 1, "--seed", 11]
    whole = run_json(k3, base, "-p", "the quick", "-n", 40, *args)
    first = run_json(k3, base, "-p", "the quick", "-n", 15, *args, "--save-state", state)
    rest = run_json(k3, base, "-n", 25, "--temp", 1, "--load-state", state)
    assert first["ids"] + rest["ids"] == whole["ids"]


def test_a_seed_given_with_a_loaded_state_starts_its_stream(k3, base, tmp_path):
    state = tmp_path / "s.k3s"
    k3("run", base, "-p", "the quick", "-n", 0, "--seed", 11, "--save-state", state)
    args = ["-n", 24, "--temp", 1]
    for seed in (5, 11):
        fresh = run_json(k3, base, "-p", "the quick", *args, "--seed", seed)["ids"]
        assert run_json(k3, base, *args, "--seed", seed, "--load-state", state)["ids"] == fresh
    assert run_json(k3, base, *args, "--load-state", state)["ids"] == fresh  # of seed 11


def test_a_loaded_state_reads_only_the_new_part(k3, base, tmp_path):
    state = tmp_path / "s.k3s"
    ids = list(b"the quick small model reads a long line of text")
    head, tail = ids[:40], ids[40:]
    k3("run", base, "--ids", ids_text(head), "-n", 0, "--prefill-chunk", 8, "--save-state", state)
    fresh = run_json(k3, base, "--ids", ids_text(ids), "-n", 8, "--temp", 0, "--logprobs", 0)
    more = run_json(k3, base, "--ids", ids_text(tail), "-n", 8, "--temp", 0, "--logprobs", 0,
                    "--load-state", state)
    assert more["ids"] == fresh["ids"] and more["logprobs"] == fresh["logprobs"]
    assert more["timings"]["prefill_tokens"] == len(tail) + 8  # the last piece was left pending


def test_bad_state_files_are_refused(k3, base, demo_model, tmp_path):
    state = tmp_path / "s.k3s"
    k3("run", base, "-p", "hi", "-n", 2, "--temp", 0, "--save-state", state)
    other = k3("run", demo_model, "-p", "x", "--load-state", state, code=1)
    assert "another model" in other.stderr and str(state) in other.stderr
    good = state.read_bytes()
    for name, data in [("cut", good[:-9]), ("flip", good[:60] + bytes([good[60] ^ 1]) + good[61:]),
                       ("empty", b""), ("text", b"hello")]:
        (tmp_path / name).write_bytes(data)
        out = k3("run", base, "-p", "x", "--load-state", tmp_path / name, code=1)
        assert name in out.stderr and out.stderr.count("\n") == 1 and out.stdout == ""
    missing = k3("run", base, "-p", "x", "--load-state", tmp_path / "none", code=1)
    assert "none" in missing.stderr


def test_a_sequence_without_tokens_is_saved_too(k3, base, tmp_path):
    state = tmp_path / "s.k3s"
    assert k3("run", base, "-p", "", "--no-bos", "--save-state", state).stdout == ""
    args = ["-n", 4, "--temp", 0]
    assert run_json(k3, base, "-p", "hi", *args, "--load-state", state)["ids"] == \
        base_rows()[0]["greedy_ids"][:4]


def test_an_unwritable_state_is_an_error(k3, base):
    out = k3("run", base, "-p", "hi", "-n", 2, "--save-state", "/no/such/dir/s", code=1)
    assert "/no/such/dir/s" in out.stderr


# --- CL-01, CL-02, CL-03


def test_cl01_end_of_standard_input_ends_the_program(k3, base):
    for data in (b"", b"hi\n"):
        out = k3("run", base, stdin=data, timeout=10)
        assert out.stdout.count("\n") < 100
    assert k3("run", base, stdin=b"hi\n", timeout=10).stdout != ""


def test_cl02_standard_output_is_the_text_and_nothing_else(k3, base):
    out = k3("run", base, "-p", "hi", "-n", 8, "--temp", 0)
    expected = run_json(k3, base, "-p", "hi", "-n", 8, "--temp", 0)["text"]
    assert out.raw_stdout == expected.encode()
    assert "\x1b" not in out.stdout + out.stderr


def test_cl03_with_a_prompt_standard_input_is_left_alone(k3_bin, base):
    reader, writer = os.pipe()  # nobody ever writes to it or closes it
    try:
        done = subprocess.run([k3_bin, "run", base, "-p", "hi", "-n", "4", "--temp", "0"],
                              stdin=reader, capture_output=True, timeout=10, check=False)
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == 0 and done.stdout


@pytest.mark.parametrize("part", ["gate.e_score_correction_bias", "dt_bias", "A_log"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gates_that_are_not_finite_are_refused(k3, base, model_copy, part, value):
    """A NaN bias only changes which experts are chosen: the scores stay finite, the text wrong."""
    folder = model_copy(base)
    for shard in sorted(folder.glob("*.safetensors")):
        data = bytearray(shard.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name.endswith(part) and entry["dtype"] == "F32":
                begin = start + entry["data_offsets"][0]
                data[begin:begin + 4] = struct.pack("<f", value)
                shard.write_bytes(data)
                refused = k3("run", folder, "-p", "hi", "-n", 2, code=1).stderr
                assert part in refused and shard.name in refused and "finite" in refused
                return
    pytest.fail(f"no F32 tensor {part}")
