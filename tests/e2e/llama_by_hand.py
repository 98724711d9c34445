"""A stock Llama decoder written out in numpy, and its own reader and writer of safetensors.

It shares nothing with tests/reference or with the engine: layout, names and arithmetic are those any
Llama tool knows. Positions start at 0; halves of a head are rotated against each other (the "neox"
way); key head h // (N // G) serves query head h; norms are RMS; the feed-forward part is SwiGLU.
"""

import json
import pathlib
import struct

import numpy as np


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    out = {}
    for name, entry in json.loads(raw[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = raw[8 + length + begin:8 + length + end]
        if entry["dtype"] == "BF16":
            value = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            value = np.frombuffer(data, {"F32": "<f4", "I32": "<i4"}[entry["dtype"]])
        out[name] = value.reshape(entry["shape"])
    return out


def write_safetensors(path, tensors):
    """F32 only."""
    head, at, blobs = {}, 0, []
    for name in sorted(tensors):
        blob = np.ascontiguousarray(tensors[name], "<f4").tobytes()
        head[name] = {"dtype": "F32", "shape": list(tensors[name].shape),
                      "data_offsets": [at, at + len(blob)]}
        at += len(blob)
        blobs.append(blob)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def load_folder(folder):
    folder = pathlib.Path(folder)
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(read_safetensors(file))
    return json.loads((folder / "config.json").read_text()), weights


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def rotate(x, theta):
    """x [heads, T, D]"""
    half = x.shape[-1] // 2
    frequency = theta ** (-np.arange(half) / half)
    angle = np.arange(x.shape[1])[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle),
                           b * np.cos(angle) + a * np.sin(angle)], -1)


def attention(c, w, p, x):
    T, N, G, D = len(x), c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    heads = lambda name, n: (x @ w[f"{p}{name}_proj.weight"].T).reshape(T, n, D).swapaxes(0, 1)
    q, k, v = heads("q", N), heads("k", G), heads("v", G)
    q, k = rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"])
    k, v = np.repeat(k, N // G, 0), np.repeat(v, N // G, 0)
    score = q @ k.swapaxes(1, 2) / np.sqrt(D)
    score = np.where(np.tril(np.ones((T, T), bool)), score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return (weight @ v).swapaxes(0, 1).reshape(T, N * D) @ w[f"{p}o_proj.weight"].T


def logits(c, weights, ids):
    w = {k: v.astype(np.float64) for k, v in weights.items()}
    eps = c["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][np.asarray(ids)]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        x = x + attention(c, w, p + "self_attn.", rms_norm(x, w[p + "input_layernorm.weight"], eps))
        n = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = (n @ w[f"{p}mlp.{s}_proj.weight"].T for s in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    return rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def random_folder(folder, seed, *, hidden, layers, heads, kv_heads, head_dim, inner, vocab, theta):
    """A checkpoint in the stock layout, with our k3_variant beside the keys other tools read."""
    rng = np.random.default_rng(seed)
    w = {}

    def put(name, *shape):
        w[name] = (rng.standard_normal(shape) * 0.2).astype(np.float32)

    def norm(name):
        w[name] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)

    put("model.embed_tokens.weight", vocab, hidden)
    for i in range(layers):
        p = f"model.layers.{i}."
        norm(p + "input_layernorm.weight")
        norm(p + "post_attention_layernorm.weight")
        put(p + "self_attn.q_proj.weight", heads * head_dim, hidden)
        put(p + "self_attn.k_proj.weight", kv_heads * head_dim, hidden)
        put(p + "self_attn.v_proj.weight", kv_heads * head_dim, hidden)
        put(p + "self_attn.o_proj.weight", hidden, heads * head_dim)
        put(p + "mlp.gate_proj.weight", inner, hidden)
        put(p + "mlp.up_proj.weight", inner, hidden)
        put(p + "mlp.down_proj.weight", hidden, inner)
    norm("model.norm.weight")
    put("lm_head.weight", vocab, hidden)
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", w)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab,
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": inner,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": theta, "attention_bias": False,
        "mlp_bias": False, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1,
        "k3_variant": {"residual": {"mode": "plain"}, "attention": {
            "pattern": ["gqa"], "gqa": {"num_kv_heads": kv_heads, "head_dim": head_dim,
                                        "rope": "neox", "rope_theta": theta}}}}
    (folder / "config.json").write_text(json.dumps(config))
