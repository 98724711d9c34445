"""k3 quantize: every format written, read back, run and measured."""

import json
import math
import os
import signal
import subprocess
import time

import pytest

import tokenizer_oracle
from models import GOLDEN, ROOT, TINY_MODELS, ids_text

FORMATS = ["bf16", "fp8-e4m3", "int8", "mxfp4"]
PROMPT = ids_text(range(40, 72))


@pytest.fixture(scope="module")
def made(tmp_path_factory, k3_bin):
    """made(model, format): a conversion of trunk, head and embeddings; its folder and report."""
    done = {}

    def make(model, fmt):
        if (model, fmt) not in done:
            out = tmp_path_factory.mktemp("quantized") / f"{model.name}-{fmt}"
            run = subprocess.run([k3_bin, "quantize", model, out, "--trunk", fmt, "--head", fmt,
                                  "--embeddings", fmt, "--json"], capture_output=True, check=False)
            assert run.returncode == 0, run.stderr.decode()
            done[model, fmt] = out, json.loads(run.stdout)
        return done[model, fmt]

    return make


def data_bytes(folder):
    """Bytes of tensor data in all shards, by their headers' length."""
    total = 0
    for shard in folder.glob("*.safetensors"):
        with shard.open("rb") as file:
            total += shard.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total


def leftovers(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_sizes_are_as_planned(k3, made, name, fmt):
    out, report = made(GOLDEN / name, fmt)
    dry = k3("quantize", GOLDEN / name, "--trunk", fmt, "--head", fmt, "--embeddings", fmt,
             "--dry-run", "--json").json()
    assert dry["bytes_after"] == report["bytes_after"] == data_bytes(out)
    assert dry["out"] is None and report["out"] == str(out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report["bytes_after"]
    inspected = k3("inspect", out, "--json").json()
    assert inspected["problems"] == [] and inspected["warnings"] == []
    assert inspected["bytes"] == report["bytes_after"]
    before = k3("inspect", GOLDEN / name, "--json").json()
    assert inspected["parameters"] == before["parameters"]
    facts = {f["topic"]: f["text"] for f in inspected["findings"]}
    for topic, text in ((f["topic"], f["text"]) for f in before["findings"]):
        if topic not in ("index", "expert reads"):  # shapes prove what they proved before
            assert facts[topic] == text, topic
    plan = k3("plan", out, "--context", 256, "--json").json()
    assert sum(p["bytes"] for p in plan["parts"] if p["name"].startswith("weights: ")) == \
        report["bytes_after"]
    bits = {"bf16": 16, "fp8-e4m3": 8, "int8": 8.5, "mxfp4": 4.25}[fmt]
    for matrix in report["matrices"]:
        if matrix["from"] == matrix["to"]:
            continue
        rows, cols = matrix["shape"]
        scales = 4 * math.ceil(rows / 128) * math.ceil(cols / 128) if fmt == "fp8-e4m3" else 0
        assert matrix["bytes_after"] == rows * cols * bits / 8 + scales
        assert 0 < matrix["relative_l2"] < {"bf16": 0, "fp8-e4m3": 0.04, "int8": 0.012,
                                            "mxfp4": 0.2}[fmt]


@pytest.mark.parametrize("fmt", FORMATS[1:])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_result_runs_and_keeps_its_promises(k3, made, name, fmt):
    out, _ = made(GOLDEN / name, fmt)
    texts = [k3("run", out, "--ids", PROMPT, "-n", 12, "--temp", 0, "--threads", threads,
                "--prefill-chunk", chunk, "--json", "--logprobs", 3).json()["logprobs"]
             for threads, chunk in ((1, 512), (2, 7))]
    assert texts[0] == texts[1]  # exact mode: not a bit depends on threads or cuts
    for isa in ("scalar", "avx2"):
        run = k3("run", out, "--ids", PROMPT, "-n", 12, "--temp", 0, "--json", "--logprobs", 3,
                 env={"K3_ISA": isa}, code=None)
        if run.exit_code == 0:
            assert run.json()["logprobs"] == texts[0], isa
    checked = k3("check", out, "--tokens", 96, "--threads", 2, "--json").json()
    assert checked["ok"]
    k3("run", out, "--ids", PROMPT, "-n", 4, "--temp", 0, "--math", "fast")


def test_perplexity_stays_near(k3, made, demo_model):
    def nats(model):
        return k3("eval", model, "ppl", "--text", ROOT / "README.md", "--tokens", 256,
                  "--json").json()["mean_nats"]

    base = nats(demo_model)
    # One document of 256 tokens of a text unlike what the model was trained on.
    for fmt, bound in (("fp8-e4m3", 0.05), ("int8", 0.02), ("mxfp4", 0.5)):
        out, _ = made(demo_model, fmt)
        assert abs(nats(out) - base) < bound, fmt


def test_keeping_mxfp4_keeps_every_byte(k3, tmp_path):
    out = tmp_path / "same"
    report = k3("quantize", GOLDEN / "tiny-k3", out, "--experts", "mxfp4", "--json").json()
    assert report["changed"] == 0
    for path in (GOLDEN / "tiny-k3").iterdir():
        if path.name != "model.safetensors.index.json":
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"] == \
        json.loads((GOLDEN / "tiny-k3/model.safetensors.index.json").read_text())["weight_map"]


def test_unpacked_experts_give_the_same_bits(k3, tmp_path):
    out = tmp_path / "bf16"
    report = k3("quantize", GOLDEN / "tiny-k3", out, "--experts", "bf16", "--json").json()
    assert report["changed"] > 0
    assert all(m["max_abs"] == 0 for m in report["matrices"])
    runs = [k3("run", model, "--ids", PROMPT, "-n", 12, "--temp", 0, "--json", "--logprobs", 3)
            .json()["logprobs"] for model in (GOLDEN / "tiny-k3", out)]
    assert runs[0] == runs[1]


def test_table_and_warnings(k3, tmp_path):
    done = k3("quantize", GOLDEN / "tiny-k3", tmp_path / "out", "--trunk", "int8")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["role", "format", "count"]
    attention = [line for line in lines if line.startswith("attention")]
    assert any("bf16 -> int8" in line for line in attention)
    assert "3 matrices stay as they are" in done.stderr and "rows of 24" in done.stderr


def test_config_is_in_the_words_of_the_field(made):
    out, _ = made(GOLDEN / "tiny-k3", "int8")
    section = json.loads((out / "config.json").read_text())["text_config"]["quantization_config"]
    assert section["quant_method"] == "compressed-tensors"
    by_format = {g["format"]: g for g in section["config_groups"].values()}
    assert set(by_format) == {"mxfp4-pack-quantized", "int-quantized"}
    assert by_format["int-quantized"]["weights"]["group_size"] == 32
    out, _ = made(GOLDEN / "tiny-linear", "fp8-e4m3")
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "fp8" and section["weight_block_size"] == [128, 128]


def test_tokenizer_files_are_copied_and_others_named(k3, model_copy, tmp_path):
    folder = model_copy(GOLDEN / "tiny-k3")
    (folder / "figures").mkdir()
    (folder / "notes.txt").write_text("hello")
    (folder / "big.bin").write_bytes(b"")
    os.truncate(folder / "big.bin", 65 << 20)
    done = k3("quantize", folder, tmp_path / "out", "--trunk", "int8")
    assert (tmp_path / "out" / "notes.txt").read_text() == "hello"
    assert (tmp_path / "out" / "tiktoken.model").is_file()
    assert "figures is not copied" in done.stderr and "big.bin is not copied" in done.stderr
    assert not (tmp_path / "out" / "big.bin").exists()


# ---- refusals


@pytest.mark.parametrize("arguments, words", [
    ([], "nothing to change"),
    (["--trunk", "keep"], "nothing to change"),
    (["--trunk", "int4"], "int4"),
    (["--experts", "int8"], "int8"),
    (["--trunk", "int8", "--text", "x"], "--report"),
    (["--report", "--trunk", "int8"], "take a model alone"),
    (["--dry-run", "--trunk", "int8"], "take a model alone"),
])
def test_wrong_usage(k3, tmp_path, arguments, words):
    run = k3("quantize", GOLDEN / "tiny-k3", tmp_path / "out", *arguments, code=2)
    assert words in run.stderr
    assert leftovers(tmp_path) == []


def test_wrong_report_usage(k3):
    assert "--text" in k3("quantize", "--report", "--trunk", "int8", code=2).stderr
    assert "nothing to measure" in k3("quantize", "--report", "--text", "x", code=2).stderr
    for stack in ("trunk", "trunk=", "trunk=f32", "norm=int8", "trunk=int8,", "experts=int8"):
        run = k3("quantize", "--report", "--text", "x", "--stack", stack, code=2)
        assert "expected PART=FORMAT" in run.stderr, stack
    twice = k3("quantize", "--report", "--text", "x", "--stack", "trunk=int8,trunk=mxfp4", code=2)
    assert "each part once" in twice.stderr
    both = k3("quantize", "--report", "--text", "x", "--stack", "trunk=int8", "--head", "int8", code=2)
    assert "head=int8" in both.stderr
    both = k3("quantize", "--report", "--dry-run", "--text", "x", "--trunk", "int8", code=2)
    assert "--dry-run" in both.stderr


def test_an_empty_name_is_not_the_demo_model(k3, tmp_path):
    assert 'found ""' in k3("quantize", "", tmp_path / "out", "--trunk", "int8", code=2).stderr
    assert leftovers(tmp_path) == []


def test_a_report_is_refused_before_it_measures(k3, made, tmp_path):
    fp8, _ = made(GOLDEN / "tiny-k3", "fp8-e4m3")
    text = tmp_path / "text"
    text.write_bytes(b"")  # measuring it would fail first
    ask = ("--report", "--text", text, "--stack", "embeddings=bf16,trunk=int8")
    assert "rounded already" in k3("quantize", fp8, *ask, code=1).stderr
    ask = ("--report", "--text", text, "--trunk", "int8", "--work", tmp_path / "none")
    assert "none" in k3("quantize", GOLDEN / "tiny-k3", *ask, code=1).stderr


def test_one_document_has_no_error_estimate(k3, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"Once upon a time there was a king.")
    out = k3("quantize", GOLDEN / "tiny-k3", "--report", "--text", text, "--trunk", "int8").stdout
    assert "unknown" in out and "nan" not in out


def test_refusals_leave_nothing(k3, made, tmp_path):
    fp8, _ = made(GOLDEN / "tiny-k3", "fp8-e4m3")
    out = tmp_path / "out"
    run = k3("quantize", fp8, out, "--trunk", "int8", code=1)
    assert "rounded already" in run.stderr and "--force" in run.stderr
    run = k3("quantize", GOLDEN / "tiny-k3", out, "--trunk", "int8", "--keep", "nothing*", code=1)
    assert "fits the name of no matrix" in run.stderr
    assert leftovers(tmp_path) == []
    k3("quantize", fp8, out, "--trunk", "int8", "--force")
    run = k3("quantize", GOLDEN / "tiny-k3", out, "--trunk", "int8", code=1)
    assert "exists already" in run.stderr
    run = k3("quantize", GOLDEN / "tiny-k3", "--trunk", "int8", code=1,
             env={"K3_MODEL": str(GOLDEN / "tiny-k3")})  # the only word is OUT
    assert "exists already" in run.stderr


def test_a_disk_too_small_is_known_before(k3):
    """/proc says that nothing is free, and that comes before it refuses the folder."""
    if os.statvfs("/proc").f_bavail != 0:
        pytest.skip("SKIP /proc claims free space here")
    said = k3("quantize", GOLDEN / "tiny-k3", "/proc/k3-out", "--trunk", "int8", code=1).stderr
    assert "disk space, 0 are free" in said


def test_a_full_disk_leaves_nothing(k3_bin, tmp_path):
    # A limit on the size of a file stands for a disk that fills up while writing.
    command = ["bash", "-c", 'ulimit -f 300; exec "$@"', "-", k3_bin, "quantize",
               GOLDEN / "tiny-k3", tmp_path / "out", "--trunk", "int8"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert b"File too large" in done.stderr
    assert leftovers(tmp_path) == []


def wait_for(condition, process, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert process.poll() is None and time.time() < end
        time.sleep(0.001)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT])
def test_killed_midway_leaves_no_out(k3_bin, demo_model, tmp_path, sig):
    command = [k3_bin, "quantize", demo_model, tmp_path / "out", "--trunk", "mxfp4", "--head",
               "mxfp4", "--embeddings", "mxfp4", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(lambda: any(p.is_dir() and list(p.iterdir()) for p in tmp_path.iterdir()), process)
    process.send_signal(sig)
    process.communicate(timeout=60)
    assert process.returncode == (-sig if sig == signal.SIGKILL else 130)
    assert not (tmp_path / "out").exists()
    if sig == signal.SIGINT:
        assert leftovers(tmp_path) == []


# ---- the report


def check_report(report, rows):
    assert [(r["steps"], r["stacked"]) for r in report["rows"]] == rows
    base = report["rows"][0]
    for row in report["rows"]:
        differences = [b - a for a, b in zip(base["document_nats"], row["document_nats"])]
        mean = sum(differences) / len(differences)
        assert abs(row["change_nats"] - mean) < 1e-12
        if len(differences) > 1:
            spread = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
            assert abs(row["change_stderr"] - math.sqrt(spread / len(differences))) < 1e-12
        assert abs(row["perplexity"] - math.exp(row["mean_nats"])) < 1e-9


def test_report(k3, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"A cat sat on the mat and saw a rat.\0Once upon a time there was a king.\0" * 2)
    work = tmp_path / "work"
    work.mkdir()
    report = k3("quantize", GOLDEN / "tiny-k3", "--report", "--text", text, "--tokens", 16, "--work",
                work, "--stack", "trunk=int8,head=int8,embeddings=int8", "--stack",
                "experts=bf16,trunk=int8", "--json").json()
    check_report(report, [([], False), (["trunk=int8"], False), (["head=int8"], False),
                          (["embeddings=int8"], False), (["experts=bf16"], False),
                          (["trunk=int8", "head=int8"], True),
                          (["trunk=int8", "head=int8", "embeddings=int8"], True),
                          (["experts=bf16", "trunk=int8"], True)])
    assert report["documents"] == 4
    unpacked = report["rows"][4]
    assert unpacked["change_nats"] == 0 and unpacked["change_stderr"] == 0
    assert leftovers(work) == []
    table = k3("quantize", GOLDEN / "tiny-k3", "--report", "--text", text, "--tokens", 16, "--work",
               work, "--trunk", "int8", "--head", "fp8-e4m3").stdout.splitlines()
    assert [line.split("  ")[0] for line in table[1:]] == [
        "as it is", "trunk=int8", "head=fp8-e4m3", "trunk=int8 + head=fp8-e4m3"]


def test_published_report_is_this_program(k3):
    """One row of the committed report, measured again."""
    books = tokenizer_oracle.data_file("books-valid.txt")
    if books is None:
        pytest.skip("SKIP books-valid.txt is neither in $K3_DATA nor in ../shared/data")
    published = json.loads((ROOT / "docs" / "quantize-k3-books-27m.json").read_text())
    want = {tuple(r["steps"]): r for r in published["rows"]}
    got = k3("quantize", "--report", "--text", books, "--docs", 2, "--tokens", 512, "--stack",
             "trunk=int8", "--json", timeout=600).json()
    for row in got["rows"]:
        documents = want[tuple(row["steps"])]["document_nats"][:2]
        assert all(abs(a - b) < 1e-5 for a, b in zip(row["document_nats"], documents))
