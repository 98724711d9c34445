#!/usr/bin/env python3
"""Write the outside of a checkpoint: config.json, the index, and on request shards without data.

    make_index.py CONFIG OUT [--shards N] [--wrap] [--vision] [--headers]

CONFIG is the config of a released layout (kimi_k3 or kimi_linear, no k3_variant). The index names
every tensor of the model, packed experts where the config is quantized, spread over N shards as the
release does: layers in order, embedding and head late, the vision part in the last two. --wrap puts
a flat config into text_config, as kimi_k3 has it; --vision adds the 168 tensors of the vision part;
--headers writes each shard as a sparse file with its true header and length. Needs no numpy.

Example, the full K3, 497,220 tensors in 96 shards:
    tools/make_index.py tests/configs/k3-text-config.json /tmp/k3 --shards 96 --wrap --vision --headers
"""
import argparse
import json
import os
import struct
import sys

WIDTH = {"F32": 4, "BF16": 2, "U8": 1}


def kda(c, h):
    lin = c["linear_attn_config"]
    n, k = lin["num_heads"], lin["head_dim"]
    p = n * k
    for s in "qkv":
        yield f"{s}_proj.weight", (p, h), "BF16"
        yield f"{s}_conv1d.weight", (p, 1, lin.get("short_conv_kernel_size", 4)), "F32"
    yield "f_a_proj.weight", (k, h), "BF16"
    yield "f_b_proj.weight", (p, k), "BF16"
    yield "b_proj.weight", (n, h), "BF16"
    padded = lin.get("gate_lower_bound") is not None      # the two released ways of storing it
    yield "A_log", (-(-n // 128) * 128,) if padded else (1, 1, n, 1), "F32"
    yield "dt_bias", (p,), "F32"
    yield "o_norm.weight", (k,), "F32"
    if lin.get("use_full_rank_gate"):
        yield "g_proj.weight", (p, h), "BF16"
    else:
        yield "g_a_proj.weight", (k, h), "BF16"
        yield "g_b_proj.weight", (p, k), "BF16"
    yield "o_proj.weight", (h, p), "BF16"


def mla(c, h):
    n, r = c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    if c.get("q_lora_rank"):
        yield "q_a_proj.weight", (c["q_lora_rank"], h), "BF16"
        yield "q_a_layernorm.weight", (c["q_lora_rank"],), "BF16"
        yield "q_b_proj.weight", (n * (nope + rope), c["q_lora_rank"]), "BF16"
    else:
        yield "q_proj.weight", (n * (nope + rope), h), "BF16"
    yield "kv_a_proj_with_mqa.weight", (r + rope, h), "BF16"
    yield "kv_a_layernorm.weight", (r,), "BF16"
    yield "kv_b_proj.weight", (n * (nope + v), r), "BF16"
    if c.get("mla_use_output_gate"):
        yield "g_proj.weight", (n * v, h), "BF16"
    yield "o_proj.weight", (h, n * v), "BF16"


def mlp(h, width):
    yield "gate_proj.weight", (width, h), "BF16"
    yield "up_proj.weight", (width, h), "BF16"
    yield "down_proj.weight", (h, width), "BF16"


def moe(c, h, packed):
    n, inter = c["num_experts"], c["moe_intermediate_size"]
    latent = c.get("routed_expert_hidden_size")
    z = latent or h
    yield "gate.weight", (n, h), "BF16"
    yield "gate.e_score_correction_bias", (n,), "F32"
    if latent:
        yield "routed_expert_down_proj.weight", (z, h), "BF16"
        yield "routed_expert_up_proj.weight", (h, z), "BF16"
        if c.get("latent_moe_use_norm"):
            yield "routed_expert_norm.weight", (z,), "BF16"
    if c.get("num_shared_experts"):
        for name, shape, dtype in mlp(h, inter * c["num_shared_experts"]):
            yield "shared_experts." + name, shape, dtype
    for e in range(n):
        for w, (rows, cols) in (("w1", (inter, z)), ("w2", (z, inter)), ("w3", (inter, z))):
            base = f"experts.{e}.{w}.weight"
            if packed:
                yield base + "_packed", (rows, cols // 2), "U8"
                yield base + "_scale", (rows, cols // 32), "U8"
            else:
                yield base, (rows, cols), "BF16"


def text_tensors(c):
    """(name, shape, dtype) of every text tensor, layers first, the rest last as in the release."""
    h, attn_res = c["hidden_size"], bool(c.get("attn_res_block_size"))
    packed = bool(c.get("quantization_config"))
    kda_layers = set(c["linear_attn_config"]["kda_layers"])
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{p}{name}.weight", (h,), "BF16"
        for site in ("self_attention_res", "mlp_res") if attn_res else ():
            yield f"{p}{site}_norm.weight", (h,), "BF16"
            yield f"{p}{site}_proj.weight", (1, h), "BF16"
        for name, shape, dtype in (kda if i + 1 in kda_layers else mla)(c, h):
            yield p + "self_attn." + name, shape, dtype
        experts = (c.get("num_experts") and i >= c.get("first_k_dense_replace", 0)
                   and i % c.get("moe_layer_freq", 1) == 0)
        part, inner = (("block_sparse_moe.", moe(c, h, packed)) if experts
                       else ("mlp.", mlp(h, c["intermediate_size"])))
        for name, shape, dtype in inner:
            yield p + part + name, shape, dtype
    yield "model.embed_tokens.weight", (c["vocab_size"], h), "BF16"
    yield "model.norm.weight", (h,), "BF16"
    if attn_res:
        yield "model.output_attn_res_norm.weight", (h,), "BF16"
        yield "model.output_attn_res_proj.weight", (1, h), "BF16"
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (c["vocab_size"], h), "BF16"


def vision_tensors(h):
    """The 165 tensors of the tower and the 3 of the projector; the engine looks at their prefix only."""
    t, v = 1024, "vision_tower."
    yield v + "patch_embed.proj.weight", (t, 3, 14, 14), "BF16"
    yield v + "patch_embed.pos_emb.weight", (64, 64, t), "BF16"
    for i in range(27):
        b = f"{v}encoder.blocks.{i}."
        for name, shape in (("norm0", (t,)), ("norm1", (t,)), ("wqkv", (3 * 1536, t)), ("wo", (t, 1536)),
                            ("mlp.fc0", (4096, t)), ("mlp.fc1", (t, 4096))):
            yield f"{b}{name}.weight", shape, "BF16"
    yield v + "encoder.final_layernorm.weight", (t,), "BF16"
    yield "mm_projector.proj.0.weight", (4096, 4096), "BF16"
    yield "mm_projector.proj.2.weight", (h, 4096), "BF16"
    yield "mm_projector.norm.weight", (h,), "BF16"


def nbytes(t):
    n = WIDTH[t[2]]
    for d in t[1]:
        n *= d
    return n


def expert_of(name):
    """The part of a name that keeps one expert's tensors in one shard."""
    at = name.find(".experts.")
    return name[:name.index(".", at + 9)] if at >= 0 else name


def spread(tensors, shards):
    """Exactly `shards` consecutive groups of about the same size; an expert is never cut."""
    total, groups, filled, last = sum(map(nbytes, tensors)), [[]], 0, None
    for t in tensors:
        key = expert_of(t[0])
        if key != last and groups[-1] and len(groups) < shards and filled >= total * len(groups) / shards:
            groups.append([])
        groups[-1].append(t)
        filled += nbytes(t)
        last = key
    while len(groups) < shards:                           # few tensors: the fullest group is halved
        i = max(range(len(groups)), key=lambda k: len(groups[k]))
        half = len(groups[i]) // 2
        if half == 0:
            sys.exit(f"{len(tensors)} tensors do not fill {shards} shards")
        groups[i:i + 1] = [groups[i][:half], groups[i][half:]]
    return groups


def write_header(path, group):
    head, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, dtype in sorted(group, key=lambda t: (-WIDTH[t[2]], t[0])):
        end = at + nbytes((name, shape, dtype))
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("config")
    ap.add_argument("out")
    ap.add_argument("--shards", type=int, default=1)
    ap.add_argument("--wrap", action="store_true")
    ap.add_argument("--vision", action="store_true")
    ap.add_argument("--headers", action="store_true")
    a = ap.parse_args()
    with open(a.config, encoding="utf-8") as f:
        config = json.load(f)
    if a.wrap and "text_config" not in config:
        config = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
                  "tie_word_embeddings": bool(config.get("tie_word_embeddings")), "text_config": config}
    text = config.get("text_config", config)
    if "k3_variant" in text:
        ap.error("only released layouts, not k3_variant")
    if a.shards < 1 or (a.vision and a.shards < 3):
        ap.error("--shards must be positive, and 3 or more with --vision")
    prefix = "language_model." if "text_config" in config else ""
    tensors = [(prefix + n, s, d) for n, s, d in text_tensors(text)]
    vision = list(vision_tensors(text["hidden_size"])) if a.vision else []
    groups = spread(tensors, a.shards - (2 if vision else 0)) + (spread(vision, 2) if vision else [])
    os.makedirs(a.out, exist_ok=True)
    where = {}
    for i, group in enumerate(groups):
        name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        where.update((t[0], name) for t in group)
        if a.headers:
            write_header(os.path.join(a.out, name), group)
    total = sum(map(nbytes, tensors)) + sum(map(nbytes, vision))
    with open(os.path.join(a.out, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, indent=1)
    with open(os.path.join(a.out, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, f, indent=0)
    print(f"{a.out}: {len(where)} tensors, {total} bytes, {len(groups)} shards"
          f"{' with headers' if a.headers else ', none written'}")


if __name__ == "__main__":
    main()
