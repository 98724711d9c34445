"""The stock grouped-query layout against implementations that know nothing of this project."""

import shutil

import numpy as np
import pytest

import llama_by_hand as llama
from models import GOLDEN, ids_text

TOKENIZER = GOLDEN / "variants" / "gqa_rope"
SHAPES = {
    "grouped": dict(hidden=48, layers=3, heads=6, kv_heads=3, head_dim=16, inner=80, vocab=512,
                    theta=500000.0),
    "one key head": dict(hidden=32, layers=2, heads=4, kv_heads=1, head_dim=8, inner=40, vocab=512,
                         theta=10000.0),
    "every head": dict(hidden=40, layers=2, heads=5, kv_heads=5, head_dim=6, inner=33, vocab=512,
                       theta=100.0),
}


@pytest.fixture
def logits_of(k3, tmp_path):
    def run(folder, ids):
        out = tmp_path / "trace.safetensors"
        k3("trace", folder, "--ids", ids_text(ids), "--out", out)
        return llama.read_safetensors(out)["logits"]

    return run


def rel_l2(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def some_ids(vocab, n=40):
    return np.random.default_rng(7).integers(0, vocab, n).tolist()


def made(tmp_path, name):
    folder = tmp_path / name.replace(" ", "-")
    llama.random_folder(folder, 3, **SHAPES[name])
    for file in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, folder)
    return folder


def test_golden_model_gives_the_logits_of_numpy(logits_of):
    folder = GOLDEN / "variants" / "gqa_rope"
    config, weights = llama.load_folder(folder)
    ids = some_ids(config["vocab_size"])
    assert rel_l2(logits_of(folder, ids), llama.logits(config, weights, ids)) < 1e-4


@pytest.mark.parametrize("name", SHAPES)
def test_made_models_give_the_logits_of_numpy(logits_of, tmp_path, name):
    folder = made(tmp_path, name)
    config, weights = llama.load_folder(folder)
    ids = some_ids(config["vocab_size"])
    want = llama.logits(config, weights, ids)
    assert rel_l2(logits_of(folder, ids), want) < 1e-4
    # The comparison sees what it is for: theta, and which key head serves which query head.
    assert rel_l2(llama.logits({**config, "rope_theta": 2 * config["rope_theta"]}, weights, ids),
                  want) > 1e-3


def test_transformers_loads_the_same_folder(logits_of, tmp_path):
    torch = pytest.importorskip("torch", reason="SKIP torch is not installed")
    transformers = pytest.importorskip("transformers", reason="SKIP transformers is not installed")
    folder = made(tmp_path, "grouped")
    config, _ = llama.load_folder(folder)
    ids = some_ids(config["vocab_size"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
    assert rel_l2(logits_of(folder, ids), want) < 1e-4
