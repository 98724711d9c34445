"""tools/export_gguf.py: what an engine of that format reads is what the checkpoint holds."""
import json
import pathlib
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
sys.path.insert(0, str(ROOT / "tools"))
import export_gguf  # noqa: E402


TINY = ROOT / "tests" / "golden" / "tiny-k3"


def export(model, out, *args, before=None):
    return subprocess.run([sys.executable, str(ROOT / "tools" / "export_gguf.py"), str(model), str(out),
                           *args], capture_output=True, text=True, check=False, preexec_fn=before)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    done = export(TINY, out, "--trunk", "f32")
    assert done.returncode == 0, done.stderr
    return gguf.GGUFReader(str(out))


def test_values_survive(exported):
    ck = export_gguf.Checkpoint(str(TINY))
    tensors = {t.name: t for t in exported.tensors}
    pairs = {"token_embd.weight": "model.embed_tokens.weight",
             "output_norm.weight": "model.norm.weight",
             "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight"}
    for target, source in pairs.items():
        np.testing.assert_array_equal(tensors[target].data.reshape(-1), ck.floats(source).reshape(-1))
    norm = ck.floats("model.output_attn_res_norm.weight").reshape(-1)
    proj = ck.floats("model.output_attn_res_proj.weight").reshape(-1)
    np.testing.assert_array_equal(tensors["output_res_score.weight"].data, norm * proj)


def test_experts_decode_to_the_same_numbers(exported):
    ck = export_gguf.Checkpoint(str(TINY))
    values = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    found = 0
    for t in exported.tensors:
        if not t.name.endswith("ffn_down_exps.weight"):
            continue
        layer = t.name.split(".")[1]
        got = gguf.quants.dequantize(t.data, t.tensor_type)
        for e in range(got.shape[0]):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{e}.w2.weight"
            codes, scales = ck.raw(name + "_packed"), ck.raw(name + "_scale")
            want = np.stack([values[codes & 15], values[codes >> 4]], axis=-1)
            want = want.reshape(codes.shape[0], -1, 32) * np.exp2(scales.astype(np.float32) - 127)[..., None]
            np.testing.assert_array_equal(got[e], want.reshape(codes.shape[0], -1))
        found += 1
    assert found > 0


def test_refusals_name_the_key(tmp_path):
    config = json.loads((TINY / "config.json").read_text())
    config["k3_variant"] = {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = export(tmp_path, tmp_path / "out.gguf")
    assert done.returncode == 1 and "k3_variant" in done.stderr
    assert not (tmp_path / "out.gguf").exists()


def test_keeps_an_existing_file(tmp_path):
    out = tmp_path / "out.gguf"
    out.write_text("mine")
    done = export(TINY, out)
    assert done.returncode == 1 and "--force" in done.stderr
    assert out.read_text() == "mine"


@pytest.mark.parametrize("options", [("--trunk", "mxfp4"), ("--trunk", "int8"),
                                     ("--trunk", "mxfp4", "--only", "*.q_proj.weight"),
                                     ("--embeddings", "mxfp4"), ("--head", "fp8-e4m3")])
def test_quantised_matrices_are_refused_and_not_forgotten(k3, tmp_path, options):
    k3("quantize", TINY, tmp_path / "model", *options)
    done = export(tmp_path / "model", tmp_path / "out.gguf")
    assert done.returncode == 1 and "--trunk bf16" in done.stderr, done
    assert not (tmp_path / "out.gguf").exists()
    k3("quantize", tmp_path / "model", tmp_path / "dense", "--trunk", "bf16", "--head", "bf16",
       "--embeddings", "bf16")
    done = export(tmp_path / "dense", tmp_path / "out.gguf")
    assert done.returncode == 0, done.stderr


def cut_shard(model, bytes_left):
    shard = sorted(model.glob("*.safetensors"))[-1]
    if bytes_left is None:
        shard.unlink()
    else:
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size - 5 if bytes_left < 0 else bytes_left)
    return shard.name


@pytest.mark.parametrize("bytes_left", [None, 0, 4, 100, -1])
def test_a_bad_shard_is_named(tmp_path, bytes_left):
    shutil.copytree(TINY, tmp_path / "model")
    name = cut_shard(tmp_path / "model", bytes_left)
    done = export(tmp_path / "model", tmp_path / "out.gguf")
    assert done.returncode == 1 and name in done.stderr and "Traceback" not in done.stderr, done
    assert not (tmp_path / "out.gguf").exists()


def test_a_full_disk_leaves_what_was_there(tmp_path):
    out = tmp_path / "out.gguf"
    out.write_text("mine")
    done = export(TINY, out, "--force",
                  before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"] and out.read_text() == "mine"
    assert export(TINY, out, "--force").returncode == 0
    assert gguf.GGUFReader(str(out)).tensors and len(list(tmp_path.iterdir())) == 1
