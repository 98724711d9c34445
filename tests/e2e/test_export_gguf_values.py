"""tools/export_gguf.py: every tensor and every key, against a second table of what belongs where."""
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "golden" / "tiny-k3"
gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
sys.path.insert(0, str(ROOT / "tools"))
import export_gguf  # noqa: E402

COMMON = """attn_norm input_layernorm
ffn_norm post_attention_layernorm
attn_output self_attn.o_proj"""
KDA = """attn_q self_attn.q_proj
attn_k self_attn.k_proj
attn_v self_attn.v_proj
ssm_f_a self_attn.f_a_proj
ssm_f_b self_attn.f_b_proj
ssm_beta self_attn.b_proj
ssm_norm self_attn.o_norm
ssm_g self_attn.g_proj"""
MLA = """attn_q_a self_attn.q_a_proj
attn_q_a_norm self_attn.q_a_layernorm
attn_q_b self_attn.q_b_proj
attn_kv_a_mqa self_attn.kv_a_proj_with_mqa
attn_kv_a_norm self_attn.kv_a_layernorm
attn_gate self_attn.g_proj"""
DENSE = """ffn_gate mlp.gate_proj
ffn_up mlp.up_proj
ffn_down mlp.down_proj"""
MOE = """ffn_gate_inp block_sparse_moe.gate
ffn_routed_down block_sparse_moe.routed_expert_down_proj
ffn_routed_up block_sparse_moe.routed_expert_up_proj
ffn_routed_norm block_sparse_moe.routed_expert_norm
ffn_gate_shexp block_sparse_moe.shared_experts.gate_proj
ffn_up_shexp block_sparse_moe.shared_experts.up_proj
ffn_down_shexp block_sparse_moe.shared_experts.down_proj"""
EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
N_KDA_HEADS, NOPE, V = 3, 16, 24
MLA_LAYERS, N_LAYERS = (3, 6, 7), 8
MXFP4 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def export(model, out, *args):
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "export_gguf.py"), str(model), str(out),
                           *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return gguf.GGUFReader(str(out))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return export(TINY, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "--trunk", "f32")


def expected():
    """Name and value of everything a reader may find."""
    ck = export_gguf.Checkpoint(str(TINY))
    top = {"token_embd.weight": ck.floats("model.embed_tokens.weight"),
           "output.weight": ck.floats("lm_head.weight"),
           "output_norm.weight": ck.floats("model.norm.weight"),
           "output_res_score.weight": (ck.floats("model.output_attn_res_norm.weight").reshape(-1)
                                       * ck.floats("model.output_attn_res_proj.weight").reshape(-1))}
    yield from top.items()
    for i in range(N_LAYERS):
        source, to = f"model.layers.{i}.", f"blk.{i}."
        kda, moe = i not in MLA_LAYERS, i > 0
        table = [COMMON, KDA if kda else MLA, MOE if moe else DENSE]
        for line in "\n".join(table).splitlines():
            target, name = line.split()
            yield f"{to}{target}.weight", ck.floats(f"{source}{name}.weight")
        for site, target in (("self_attention_res", "attn_res_score"), ("mlp_res", "ffn_res_score")):
            yield f"{to}{target}.weight", (ck.floats(f"{source}{site}_norm.weight").reshape(-1)
                                           * ck.floats(f"{source}{site}_proj.weight").reshape(-1))
        yield from (kda_parts if kda else mla_parts)(ck, source, to)
        if moe:
            yield f"{to}exp_probs_b.bias", ck.floats(f"{source}block_sparse_moe.gate.e_score_correction_bias")
            for target, w in EXPERTS.items():
                yield f"{to}{target}.weight", experts(ck, source, w)


def kda_parts(ck, source, to):
    yield f"{to}ssm_dt.bias", ck.floats(f"{source}self_attn.dt_bias")
    yield f"{to}ssm_a", -np.exp(ck.floats(f"{source}self_attn.A_log").reshape(-1)[:N_KDA_HEADS])
    for s in "qkv":
        conv = ck.floats(f"{source}self_attn.{s}_conv1d.weight")
        yield f"{to}ssm_conv1d_{s}.weight", conv[None, :, None, ...].reshape(1, -1, 1, 4)


def mla_parts(ck, source, to):
    both = ck.floats(f"{source}self_attn.kv_b_proj.weight").reshape(-1, NOPE + V, 32)
    yield f"{to}attn_k_b.weight", np.stack([head[:NOPE].T for head in both])
    yield f"{to}attn_v_b.weight", np.stack([head[NOPE:] for head in both])


def experts(ck, source, w):
    out = []
    for e in range(16):
        name = f"{source}block_sparse_moe.experts.{e}.{w}.weight"
        codes, scales = ck.raw(name + "_packed"), ck.raw(name + "_scale")
        values = np.stack([MXFP4[codes & 15], MXFP4[codes >> 4]], axis=-1).reshape(codes.shape[0], -1, 32)
        out.append((values * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(codes.shape[0], -1))
    return np.stack(out)


def test_every_tensor_is_where_it_belongs(written):
    found = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in written.tensors}
    want = dict(expected())
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].shape == value.shape or name.endswith("dt.bias"), name
        np.testing.assert_array_equal(found[name].reshape(-1), value.reshape(-1), err_msg=name)


def test_q8_trunk_leaves_one_matrix_a_head_in_bf16(tmp_path):
    kinds = {t.name.split(".", 2)[-1]: t.tensor_type.name
             for t in export(TINY, tmp_path / "q8.gguf", "--trunk", "q8_0").tensors}
    assert kinds["attn_k_b.weight"] == kinds["attn_v_b.weight"] == "BF16"
    assert kinds["attn_q.weight"] == "Q8_0" and kinds["attn_norm.weight"] == "F32"
    assert kinds["attn_q_b.weight"] == "F32", "rows of 24 do not fit"


def test_keys_are_those_of_the_config(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text["linear_attn_config"]["gate_lower_bound"] = -3.5
    text.update(routed_scaling_factor=2.5, rms_norm_eps=2e-5, activation_situ_beta=3.0,
                activation_situ_linear_beta=7.0, moe_renormalize=False)
    path.write_text(json.dumps(config))
    fields = export(tmp_path / "model", tmp_path / "out.gguf").fields
    want = {"attention.head_count_kv": [int(i in MLA_LAYERS) for i in range(N_LAYERS)],
            "kda.gate_lower_bound": -3.5, "expert_weights_scale": 2.5, "expert_weights_norm": False,
            "attention.layer_norm_rms_epsilon": pytest.approx(2e-5), "activation.situ_beta": 3.0,
            "activation.situ_linear_beta": 7.0, "vocab_size": 576, "embedding_length": 64,
            "block_count": N_LAYERS, "feed_forward_length": 96, "attention.head_count": 4,
            "attention.kv_lora_rank": 32, "attention.q_lora_rank": 24, "attention.key_length": 40,
            "attention.value_length": 32, "attention.key_length_mla": 24,
            "attention.value_length_mla": V, "rope.dimension_count": 8, "ssm.conv_kernel": 4,
            "kda.head_dim": 32, "expert_count": 16, "expert_used_count": 4, "expert_shared_count": 2,
            "expert_feed_forward_length": 64, "expert_latent_length": 32,
            "leading_dense_block_count": 1, "expert_gating_func": 2, "attn_res.block_size": 3}
    for key, value in want.items():
        assert fields[f"kimi-k3.{key}"].contents() == value, key


def test_vocabulary_merges_into_the_same_tokens(k3, written):
    """Tokens by the merges of the file, applied as readers do: lowest first."""
    tokens = written.fields["tokenizer.ggml.tokens"].contents()
    merges = {tuple(m.split(" ")): i for i, m in
              enumerate(written.fields["tokenizer.ggml.merges"].contents())}
    letters = export_gguf.byte_letters()
    for word in (" the", "there", " and", " in", " tokens", " over", " experts", "er", " th"):
        parts = [letters[b] for b in word.encode()]
        while True:
            ranked = [(merges[p], i) for i, p in enumerate(zip(parts, parts[1:])) if p in merges]
            if not ranked:
                break
            i = min(ranked)[1]
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        ids = k3("tokenize", TINY, "-p", word).stdout.split()
        assert [tokens.index(p) for p in parts] == [int(i) for i in ids], word
    added = json.loads((TINY / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    kinds = written.fields["tokenizer.ggml.token_type"].contents()
    for i, entry in added.items():
        if int(i) < len(tokens):
            assert (tokens[int(i)], kinds[int(i)]) == (entry["content"], 3)
