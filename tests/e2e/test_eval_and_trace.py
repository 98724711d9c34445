"""k3 eval and k3 trace against the numbers of the float64 reference."""

import json
import math
import sys

import numpy as np
import pytest

from models import GOLDEN, ROOT, TINY_MODELS, base, ids_text  # noqa: F401 (base is a fixture)

sys.path.insert(0, str(ROOT / "tests" / "reference"))
from k3_reference import st_read  # noqa: E402

GOLDEN_FILES = {"tiny-k3": "model_k3.safetensors", "tiny-linear": "model_linear.safetensors"}


def rel_l2(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_trace_has_every_golden_tensor(k3, tmp_path, name):
    golden = st_read(GOLDEN / GOLDEN_FILES[name])
    ids = golden["tokens"].tolist()
    out = tmp_path / "trace.safetensors"
    k3("trace", GOLDEN / name, "--ids", ids_text(ids), "--out", out)
    trace = st_read(out)
    wanted = [k for k in golden if not k.startswith("at_") and k != "greedy"]
    assert set(wanted) <= set(trace)
    for key in wanted:
        assert trace[key].shape == golden[key].shape, key
        if key.endswith(("expert_idx", "tokens")):
            assert np.array_equal(trace[key], golden[key]), key
        else:
            assert rel_l2(trace[key], golden[key]) < 6e-6, key  # golden.json: layers and caches
    assert rel_l2(trace["logits"], golden["logits"]) < 4e-6


VARIANTS = sorted(p.name for p in (GOLDEN / "variants").iterdir() if p.is_dir())


@pytest.mark.parametrize("name", VARIANTS)
def test_trace_of_every_variant(k3, tmp_path, name):
    golden = st_read(GOLDEN / "variants" / f"{name}.safetensors")
    out = tmp_path / "trace.safetensors"
    k3("trace", GOLDEN / "variants" / name, "--ids", ids_text(golden["tokens"].tolist()), "--out",
       out)
    trace = st_read(out)
    for key in set(golden) - {"greedy"}:
        assert trace[key].shape == golden[key].shape, key
        assert rel_l2(trace[key], golden[key]) < 2e-5, key  # golden.json: variants


def test_trace_refusals(k3, base, tmp_path):
    out = tmp_path / "t.safetensors"
    assert "empty" in k3("trace", base, "--ids", "", "--out", out, code=1).stderr
    k3("trace", base, "--ids", "99999", "--out", out, code=1)
    k3("trace", base, "--ids", "1", code=2)
    assert not out.exists()
    bad = k3("trace", base, "--ids", "1", "--out", "/no/such/dir/t", code=1)
    assert "/no/such/dir/t" in bad.stderr


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "docs"
    path.write_bytes(b"the quick small model\0reads a long line of text\0\0and then")
    return path


def test_eval_equals_scores_read_off_the_trace(k3, base, text, tmp_path):
    report = k3("eval", base, "ppl", "--text", text, "--tokens", 12, "--json").json()
    bos = json.loads((base / "config.json").read_text())
    bos = bos.get("bos_token_id", bos.get("text_config", {}).get("bos_token_id"))
    docs = [d for d in text.read_bytes().split(b"\0") if d]
    assert len(report["documents"]) == len(docs)
    nats = []
    for i, doc in enumerate(docs):
        ids = [bos, *map(int, k3("tokenize", base, stdin=doc).stdout.split())][:13]
        out = tmp_path / f"{i}.safetensors"
        k3("trace", base, "--ids", ids_text(ids), "--out", out)
        logits = st_read(out)["logits"].astype(np.float64)
        logp = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        logp -= logits.max(1, keepdims=True)
        nats.append(-np.mean([logp[t, ids[t + 1]] for t in range(len(ids) - 1)]))
        assert report["documents"][i]["tokens"] == len(ids) - 1
        assert abs(report["documents"][i]["nats"] - nats[-1]) < 1e-9
    assert abs(report["mean_nats"] - np.mean(nats)) < 1e-9
    assert abs(report["stderr_nats"] - np.std(nats, ddof=1) / math.sqrt(len(nats))) < 1e-9
    total = sum(d["nats"] * d["tokens"] for d in report["documents"])
    scored = sum(d["bytes"] for d in report["documents"])
    assert abs(report["bits_per_byte"] - total / math.log(2) / scored) < 1e-9


def test_eval_does_not_depend_on_threads(k3, base, text):
    runs = [k3("eval", base, "ppl", "--text", text, "--threads", n, "--json").json()
            for n in (1, 2, 5)]
    assert runs[0]["documents"] == runs[1]["documents"] == runs[2]["documents"]


def test_eval_text_and_refusals(k3, base, text, tmp_path):
    out = k3("eval", base, "ppl", "--text", text, "--docs", 2).stdout
    assert "nats/token" in out and "+-" in out and "bits/byte" in out
    short = k3("eval", base, "ppl", "--text", text, "--docs", 9)
    assert "9" in short.stderr and "3" in short.stderr
    (tmp_path / "empty").write_bytes(b"\0\0")
    assert "empty" in k3("eval", base, "ppl", "--text", tmp_path / "empty", code=1).stderr
    assert "none" in k3("eval", base, "ppl", "--text", tmp_path / "none", code=1).stderr
    k3("eval", base, "ppl", code=2)
    k3("eval", base, "ppl", "--text", text, "--tokens", 0, code=2)
    k3("eval", base, "ppl", "--text", text, "--tokens", 2000000000, code=1)
