"""k3 data prepare on compressed files and with a tokenizer of its own; runs in bf16 with a teacher."""

import bz2
import gzip
import json
import lzma
import struct
import subprocess
import sys

import pytest

from conftest import DEMO_MODEL, ROOT
from tokenizer_oracle import encoding, load_ranks

CORPUS = ROOT / "tests" / "cases" / "training" / "corpus.txt"


def documents():
    """Half a dozen pages of English, some of it about code."""
    return b"\0".join((ROOT / name).read_bytes() for name in ("README.md", "CONTRIBUTING.md",
                                                              "docs/training.md"))


def test_compressed_inputs_give_the_same_tokens(k3, tmp_path):
    text = documents()
    tokens = {}
    for name, packed in [("plain", text), ("gz", gzip.compress(text)), ("bz2", bz2.compress(text)),
                         ("xz", lzma.compress(text))]:
        (tmp_path / name).write_bytes(packed)  # the name says nothing
        k3("data", "prepare", tmp_path / name, "--out", tmp_path / f"{name}.d", "--tokenizer",
           DEMO_MODEL)
        tokens[name] = (tmp_path / f"{name}.d" / "train.tokens").read_bytes()
        if name == "plain":
            continue
        (tmp_path / "cut").write_bytes(packed[:-9])
        done = k3("data", "prepare", tmp_path / "cut", "--out", tmp_path / "cut.d", "--tokenizer",
                  DEMO_MODEL, code=1)
        assert f"{tmp_path / 'cut'}: " in done.stderr and "\n" not in done.stderr.strip()
        assert not (tmp_path / "cut.d").exists()
    assert len(set(tokens.values())) == 1
    k3("data", "prepare", "-", "--out", tmp_path / "in.d", "--tokenizer", DEMO_MODEL,
       stdin=gzip.compress(text))
    assert (tmp_path / "in.d" / "train.tokens").read_bytes() == tokens["plain"]


def test_a_learned_tokenizer_is_what_tiktoken_makes_of_it(k3, tmp_path):
    (tmp_path / "t.txt").write_bytes(documents())
    done = k3("data", "prepare", tmp_path / "t.txt", "--out", tmp_path / "d", "--valid", "0",
              "--train-tokenizer", 600)
    assert "vocabulary: 856" in done.stdout
    assert "documents begin with token 600 and end with 601" in done.stdout
    data = (tmp_path / "d/train.tokens").read_bytes()
    n_tokens, n_documents = struct.unpack_from("<2Q", data, 8)
    starts = struct.unpack_from(f"<{n_documents + 1}Q", data, 40)
    tokens = struct.unpack_from(f"<{n_tokens}i", data, 40 + 8 * (n_documents + 1))
    for begin, end in zip(starts, starts[1:]):  # what k3 run puts in front has to be learned
        assert tokens[begin] == 600 and tokens[end - 1] == 601
    ranks = load_ranks(tmp_path / "d" / "tiktoken.model")
    assert sorted(ranks.values()) == list(range(600))
    text = CORPUS.read_text() + " Größe 漢字 123456\n\n  x"
    ids = [int(i) for i in k3("tokenize", tmp_path / "d", stdin=text).stdout.split()]
    assert ids == encoding(ranks).encode_ordinary(text)
    assert len(ids) < len(text.encode()) / 2
    names = json.loads((tmp_path / "d" / "tokenizer_config.json").read_text())
    assert names["added_tokens_decoder"]["601"]["content"] == "[EOS]"
    again = k3("data", "prepare", "-", "--out", tmp_path / "e", "--valid", "0",
               "--train-tokenizer", 600, stdin=documents())
    assert again.stdout == done.stdout
    for name in ("tiktoken.model", "train.tokens"):
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "e" / name).read_bytes()


def test_tokenizer_refusals(k3, tmp_path):
    (tmp_path / "t.txt").write_text("too little")
    run = lambda *args, code: k3("data", "prepare", tmp_path / "t.txt", "--out", tmp_path / "d",
                                 *args, code=code)
    assert "ranks only, expected 5000" in run("--train-tokenizer", 5000, "--valid", "0",
                                              code=1).stderr
    assert "255" in run("--train-tokenizer", 255, code=2).stderr
    assert "exclude each other" in run("--train-tokenizer", 300, "--tokenizer", DEMO_MODEL,
                                       code=1).stderr
    assert not (tmp_path / "d").exists()


@pytest.fixture
def small_run(k3, tmp_path):
    (tmp_path / "t.txt").write_bytes(b"\0".join([documents()] * 4))
    k3("data", "prepare", tmp_path / "t.txt", "--out", tmp_path / "data", "--valid", "0",
       "--train-tokenizer", 600)
    config = json.loads((ROOT / "tests/golden/variants/released/config.json").read_text())
    config.get("text_config", config).update(vocab_size=856, moe_intermediate_size=32,
                                             routed_expert_hidden_size=32)
    (tmp_path / "config.json").write_text(json.dumps(config))

    def train(out, extra="", code=0):
        (tmp_path / f"{out}.toml").write_text(
            f'[model]\nconfig = "config.json"\n[data]\ndir = "data"\n[train]\nout = "{out}"\n'
            f"steps = 12\nbatch = 2\nsequence = 32\n{extra}\n")
        return k3("train", tmp_path / f"{out}.toml", code=code)

    return train


def test_bf16_rounded_experts_and_a_teacher(k3, small_run, tmp_path):
    done = small_run("teacher", 'compute = "bf16"\nmxfp4_from = 0.5')
    assert " MFU " in done.stderr
    header, *rows = (tmp_path / "teacher/log.csv").read_text().splitlines()
    at = header.split(",").index("mfu")
    assert all(0 < float(row.split(",")[at]) < 1.5 for row in rows)
    done = small_run("student", '[distill]\nteacher = "teacher/model"\ntemperature = 2.0')
    assert "teacher " in done.stderr.splitlines()[1], done.stderr
    lines = [json.loads(line) for line in (tmp_path / "student/log.jsonl").read_text().splitlines()]
    assert all(line["teacher_kl"] >= 0 for line in lines)
    refused = small_run("other", f'[distill]\nteacher = "{DEMO_MODEL}"', code=1)
    assert "has 4096 ids, expected 856" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_the_first_model_of_the_docs(k3, tmp_path):
    block = (ROOT / "docs/training.md").read_text().split("## A first model")[1]
    lines = [line[4:] for line in block.splitlines() if line.startswith("    ")]
    toml = "\n".join(lines[:lines.index("muon_lr = 1e-2") + 1])
    # Many different ones: which half a document falls into depends on its bytes alone.
    (tmp_path / "books.txt").write_bytes(
        b"\0".join(b"%d. " % i + d for i in range(20) for d in documents().split(b"\0")))
    k3("data", "prepare", tmp_path / "books.txt", "--out", tmp_path / "data", "--valid", "0.5",
       "--tokenizer", DEMO_MODEL)
    toml = toml.replace("docs/ablations", str(ROOT / "docs/ablations")).replace(
        "steps = 600", "steps = 2").replace("batch = 8", "batch = 1")
    (tmp_path / "small.toml").write_text(toml)
    done = k3("train", tmp_path / "small.toml")
    assert "finished at step 2 of 2" in done.stdout and "sample: The" in done.stderr
    ran = k3("run", tmp_path / "runs/small/model", "-p", "The man", "-n", 3, "--json")
    assert json.loads(ran.stdout)["prompt_ids"][0] == 3840, "BOS, which the documents begin with"


def test_an_ablation_without_its_data_starts_nothing(k3, small_run, tmp_path):
    small_run("run")
    (tmp_path / "plan.toml").write_text(
        'base = "run.toml"\nout = "runs"\nseeds = [1]\n[arms.a.data]\ndir = "nowhere"\n')
    done = k3("ablate", tmp_path / "plan.toml", code=1)
    assert "arm a: " in done.stderr and "nowhere/train.tokens" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_report_about_routers(k3_bin, demo_model, tmp_path):
    if not (demo_model / "tiktoken.model").exists():
        pytest.skip("the demo model is not here")
    (tmp_path / "code.txt").write_text("int main(int argc, char** argv) { return argc + 1; }\n" * 20)

    def report(*args):
        out = subprocess.run([sys.executable, ROOT / "tools/router_report.py", demo_model, *args,
                              "--k3", k3_bin, "--tokens", "60", "--json"], capture_output=True,
                             check=False, text=True)
        assert out.returncode == 0, out.stderr
        return json.loads(out.stdout)["layers"]

    for layer in report(CORPUS, CORPUS, "--noise", "0"):
        assert layer["noise"] == layer["shift"] == 0 and layer["bits"] < 1e-12
    for layer in report(CORPUS, tmp_path / "code.txt"):
        assert 0 < layer["noise"] < 0.5 and 0 < layer["shift"] < 0.5
        assert layer["bits"] > layer["chance"] > 0


def test_loss_by_position(k3, demo_model):
    done = k3("eval", demo_model, "ppl", "--text", CORPUS, "--tokens", 200, "--by-position",
              "--json")
    result = json.loads(done.stdout)
    places = result["by_position"]
    assert [p["begin"] for p in places[:3]] == [0, 32, 64]
    assert sum(p["tokens"] for p in places) == sum(d["tokens"] for d in result["documents"])
    mean = sum(p["tokens"] * p["nats"] for p in places) / sum(p["tokens"] for p in places)
    assert mean == pytest.approx(result["mean_nats"], abs=1e-9)  # one document
    assert "from     to" in k3("eval", demo_model, "ppl", "--text", CORPUS, "--tokens", 50,
                               "--by-position").stdout
