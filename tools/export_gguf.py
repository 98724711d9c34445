#!/usr/bin/env python3
"""Write a K3 checkpoint as a `kimi-k3` GGUF, for engines that read that format.

    export_gguf.py MODEL OUT.gguf [--trunk bf16|q8_0|f32] [--no-vocab] [--force]

MODEL is a folder in the release's layout (config.json, safetensors, tiktoken.model). Experts stored
as MXFP4 are repacked without loss; the trunk is written as bf16 (default), q8_0 or f32. Models with a
k3_variant key or with unbounded decay cannot be told in this format and are refused.
Needs numpy and gguf (tests/requirements.txt).
"""
import argparse
import base64
import json
import os
import sys

import numpy as np

N_EXPERT_MATRICES = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
# Tensors that keep a row of their own, by name inside a layer: (GGUF name, kind). Kind m is a matrix
# that takes the trunk's type, f is kept in f32.
LAYER = {
    "input_layernorm.weight": ("attn_norm.weight", "f"),
    "post_attention_layernorm.weight": ("ffn_norm.weight", "f"),
    "self_attn.q_proj.weight": ("attn_q.weight", "m"),
    "self_attn.k_proj.weight": ("attn_k.weight", "m"),
    "self_attn.v_proj.weight": ("attn_v.weight", "m"),
    "self_attn.f_a_proj.weight": ("ssm_f_a.weight", "m"),
    "self_attn.f_b_proj.weight": ("ssm_f_b.weight", "m"),
    "self_attn.b_proj.weight": ("ssm_beta.weight", "m"),
    "self_attn.dt_bias": ("ssm_dt.bias", "f"),
    "self_attn.o_norm.weight": ("ssm_norm.weight", "f"),
    "self_attn.o_proj.weight": ("attn_output.weight", "m"),
    "self_attn.q_a_proj.weight": ("attn_q_a.weight", "m"),
    "self_attn.q_a_layernorm.weight": ("attn_q_a_norm.weight", "f"),
    "self_attn.q_b_proj.weight": ("attn_q_b.weight", "m"),
    "self_attn.kv_a_proj_with_mqa.weight": ("attn_kv_a_mqa.weight", "m"),
    "self_attn.kv_a_layernorm.weight": ("attn_kv_a_norm.weight", "f"),
    "mlp.gate_proj.weight": ("ffn_gate.weight", "m"),
    "mlp.up_proj.weight": ("ffn_up.weight", "m"),
    "mlp.down_proj.weight": ("ffn_down.weight", "m"),
    "block_sparse_moe.gate.weight": ("ffn_gate_inp.weight", "f"),
    "block_sparse_moe.gate.e_score_correction_bias": ("exp_probs_b.bias", "f"),
    "block_sparse_moe.routed_expert_down_proj.weight": ("ffn_routed_down.weight", "m"),
    "block_sparse_moe.routed_expert_up_proj.weight": ("ffn_routed_up.weight", "m"),
    "block_sparse_moe.routed_expert_norm.weight": ("ffn_routed_norm.weight", "f"),
    "block_sparse_moe.shared_experts.gate_proj.weight": ("ffn_gate_shexp.weight", "m"),
    "block_sparse_moe.shared_experts.up_proj.weight": ("ffn_up_shexp.weight", "m"),
    "block_sparse_moe.shared_experts.down_proj.weight": ("ffn_down_shexp.weight", "m"),
}
DTYPES = {"F32": np.float32, "BF16": np.uint16, "U8": np.uint8}


TO_BF16 = "k3 quantize MODEL NEW --trunk bf16 --head bf16 --embeddings bf16 makes a model that can be taken"


class Failure(Exception):
    pass


class Checkpoint:
    """Tensors of a folder by their text-model name, mapped and not copied."""

    def __init__(self, folder):
        self.tensors, self.read = {}, set()
        index = os.path.join(folder, "model.safetensors.index.json")
        places = {}
        if os.path.exists(index):
            with open(index, encoding="utf-8") as file:
                places = json.load(file)["weight_map"]
        for name in sorted(set(places.values())) or ["model.safetensors"]:
            self._open(os.path.join(folder, name))
        for name, shard in places.items():
            if name.removeprefix("language_model.") not in self.tensors:
                raise Failure(f"{os.path.join(folder, shard)}: {name} is not there, the index says it is")

    def _open(self, path):
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= os.path.getsize(path) - 8:
                raise Failure(f"{path}: no safetensors header: truncated?")
            try:
                header = json.loads(file.read(size))
            except ValueError as error:
                raise Failure(f"{path}: no safetensors header: {error}") from error
        if os.path.getsize(path) == 8 + size:
            data = np.empty(0, np.uint8)  # which cannot be mapped
        else:
            data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + size)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise Failure(f"{path}: {name} is {entry['dtype']}, expected F32, BF16 or U8 ({TO_BF16})")
            begin, end = entry["data_offsets"]
            if end > data.size:
                raise Failure(f"{path}: {name} ends at byte {end} of the data, but the file holds "
                              f"{data.size}: truncated?")
            value = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
            self.tensors[name.removeprefix("language_model.")] = value

    def __contains__(self, name):
        return name in self.tensors

    def raw(self, name):
        if name not in self.tensors:
            packed = name + "_packed" in self.tensors
            raise Failure(f"{name}: " + (f"is in MXFP4 ({TO_BF16})" if packed else "not in the checkpoint"))
        self.read.add(name)
        return self.tensors[name]

    def unread(self):
        """Tensors of the text model that nobody asked for."""
        return sorted(name for name in self.tensors.keys() - self.read
                      if name.startswith(("model.", "lm_head.")))

    def floats(self, name):
        value = self.raw(name)
        if value.dtype == np.uint16:
            return (value.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(value, dtype=np.float32)


def repack_mxfp4(codes, scales):
    """Release layout (neighbours share a byte) to blocks of one scale and 16 bytes, in which byte j
    holds elements j and j + 16."""
    rows, half = codes.shape
    pairs = codes.reshape(rows, half // 16, 16)
    elements = np.empty((rows, half // 16, 32), np.uint8)
    elements[..., 0::2], elements[..., 1::2] = pairs & 15, pairs >> 4
    out = np.empty((rows, half // 16, 17), np.uint8)
    out[..., 0] = scales
    out[..., 1:] = elements[..., :16] | (elements[..., 16:] << 4)
    return out.reshape(rows, -1)


class Export:
    def __init__(self, gguf, writer, checkpoint, config, trunk):
        self.gguf, self.w, self.ck, self.c, self.trunk = gguf, writer, checkpoint, config, trunk

    def matrix(self, name, value, trunk=None):
        """value: f32, the last dimension is the one that is summed over."""
        types = self.gguf.GGMLQuantizationType
        kind = {"bf16": types.BF16, "q8_0": types.Q8_0, "f32": types.F32}[trunk or self.trunk]
        if kind == types.F32 or (kind == types.Q8_0 and value.shape[-1] % 32 != 0):
            return self.vector(name, value)
        value = np.ascontiguousarray(value, dtype=np.float32)
        self.w.add_tensor(name, self.gguf.quants.quantize(value, kind), raw_dtype=kind)

    def vector(self, name, value):
        self.w.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))

    def top(self):
        self.matrix("token_embd.weight", self.ck.floats("model.embed_tokens.weight"))
        tied = "lm_head.weight" not in self.ck
        self.matrix("output.weight",
                    self.ck.floats("model.embed_tokens.weight" if tied else "lm_head.weight"))
        self.vector("output_norm.weight", self.ck.floats("model.norm.weight"))
        self.mix("model.output_attn_res", "output_res_score.weight")

    def mix(self, prefix, name):
        norm, proj = self.ck.floats(prefix + "_norm.weight"), self.ck.floats(prefix + "_proj.weight")
        self.vector(name, norm.reshape(-1) * proj.reshape(-1))

    def layer(self, i):
        source, to = f"model.layers.{i}.", f"blk.{i}."
        for name, (target, kind) in LAYER.items():
            if source + name in self.ck:
                value = self.ck.floats(source + name)
                (self.matrix if kind == "m" else self.vector)(to + target, value)
        for site, target in (("self_attention_res", "attn_res_score"), ("mlp_res", "ffn_res_score")):
            self.mix(source + site, to + target + ".weight")
        is_kda = i + 1 not in self.c["linear_attn_config"]["full_attn_layers"]
        gate = self.ck.floats(source + "self_attn.g_proj.weight")
        self.matrix(to + ("ssm_g.weight" if is_kda else "attn_gate.weight"), gate)
        if is_kda:
            heads = self.c["linear_attn_config"]["num_heads"]
            self.vector(to + "ssm_a", -np.exp(self.ck.floats(source + "self_attn.A_log")[:heads]))
            for s in "qkv":
                conv = self.ck.floats(f"{source}self_attn.{s}_conv1d.weight")
                self.vector(f"{to}ssm_conv1d_{s}.weight",
                            conv.reshape(1, conv.shape[0], 1, conv.shape[-1]))
        else:
            self.kv_b(source, to)
        if source + "block_sparse_moe.gate.weight" in self.ck:
            self.experts(source, to)

    def kv_b(self, source, to):
        nope, v = self.c["qk_nope_head_dim"], self.c["v_head_dim"]
        both = self.ck.floats(source + "self_attn.kv_b_proj.weight")
        both = both.reshape(-1, nope + v, both.shape[-1])
        # One matrix a head: readers do not take these in q8_0.
        trunk = "bf16" if self.trunk == "q8_0" else None
        self.matrix(to + "attn_k_b.weight", both[:, :nope].transpose(0, 2, 1), trunk)
        self.matrix(to + "attn_v_b.weight", both[:, nope:], trunk)

    def experts(self, source, to):
        types = self.gguf.GGMLQuantizationType
        n = self.c["num_experts"]
        for matrix, target in N_EXPERT_MATRICES.items():
            names = [f"{source}block_sparse_moe.experts.{e}.{matrix}.weight" for e in range(n)]
            if names[0] in self.ck:
                self.matrix(f"{to}{target}.weight", np.stack([self.ck.floats(x) for x in names]))
                continue
            packed = [repack_mxfp4(self.ck.raw(x + "_packed"), self.ck.raw(x + "_scale"))
                      for x in names]
            self.w.add_tensor(f"{to}{target}.weight", np.stack(packed), raw_dtype=types.MXFP4)


def read_config(folder):
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        outer = json.load(file)
    c = outer.get("text_config", outer)
    where = os.path.join(folder, "config.json")
    if "k3_variant" in outer or "k3_variant" in c:
        raise Failure(f"{where}: k3_variant has no counterpart in the kimi-k3 format")
    linear = c.get("linear_attn_config", {})
    checks = [("hidden_act", c.get("hidden_act"), "situ"),
              ("mla_use_nope", c.get("mla_use_nope"), True),
              ("moe_router_activation_func", c.get("moe_router_activation_func"), "sigmoid"),
              ("linear_attn_config.use_full_rank_gate", linear.get("use_full_rank_gate"), True)]
    for key, found, expected in checks:
        if found != expected:
            raise Failure(f"{where}: {key}: found {found!r}, expected {expected!r}")
    for key in ("attn_res_block_size", "activation_situ_beta", "kv_lora_rank"):
        if not c.get(key):
            raise Failure(f"{where}: {key}: found {c.get(key)!r}, expected a number")
    if linear.get("gate_lower_bound") is None:
        raise Failure(f"{where}: linear_attn_config.gate_lower_bound: found none, expected a number")
    return outer, c


def add_config(w, c):
    linear, arch = c["linear_attn_config"], "kimi-k3"
    rope = c["qk_rope_head_dim"]
    ints = {
        "vocab_size": c["vocab_size"], "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"], "block_count": c["num_hidden_layers"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.kv_lora_rank": c["kv_lora_rank"],
        "attention.key_length": c["kv_lora_rank"] + rope,
        "attention.value_length": c["kv_lora_rank"],
        "attention.key_length_mla": c["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": c["v_head_dim"], "rope.dimension_count": rope,
        "ssm.conv_kernel": linear["short_conv_kernel_size"], "kda.head_dim": linear["head_dim"],
        "expert_count": c["num_experts"], "expert_used_count": c["num_experts_per_token"],
        "expert_shared_count": c.get("num_shared_experts") or 0,
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "leading_dense_block_count": c.get("first_k_dense_replace") or 0,
        "expert_gating_func": 2, "attn_res.block_size": c["attn_res_block_size"],
    }
    if c.get("q_lora_rank"):
        ints["attention.q_lora_rank"] = c["q_lora_rank"]
    if c.get("routed_expert_hidden_size"):
        ints["expert_latent_length"] = c["routed_expert_hidden_size"]
    for key, value in ints.items():
        w.add_uint32(f"{arch}.{key}", value)
    floats = {
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": c.get("rope_theta") or 10000.0,
        "kda.gate_lower_bound": linear["gate_lower_bound"],
        "expert_weights_scale": c.get("routed_scaling_factor") or 1.0,
        "activation.situ_beta": c["activation_situ_beta"],
        "activation.situ_linear_beta": c.get("activation_situ_linear_beta") or 0.0,
    }
    for key, value in floats.items():
        w.add_float32(f"{arch}.{key}", value)
    w.add_bool(f"{arch}.expert_weights_norm", bool(c.get("moe_renormalize")))
    full = linear["full_attn_layers"]
    # No key-value heads marks a linear layer; latent attention counts as one large head.
    w.add_array(f"{arch}.attention.head_count_kv",
                [1 if i + 1 in full else 0 for i in range(c["num_hidden_layers"])])


def byte_letters():
    """The printable stand-in of every byte in GPT-2 vocabularies."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {}, 0
    for b in range(256):
        if b in keep:
            letters[b] = chr(b)
        else:
            letters[b] = chr(256 + extra)
            extra += 1
    return letters


def split_token(ranks, token, below):
    """The two parts that byte-pair merging with ranks below `below` leaves of a token."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(((ranks.get(parts[i] + parts[i + 1], below), i) for i in range(len(parts) - 1)))
        if best[0] >= below:
            break
        i = best[1]
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def add_vocab(w, folder, outer, c):
    ranks = {}
    with open(os.path.join(folder, "tiktoken.model"), "rb") as file:
        for line in file:
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token)] = int(rank)
    special = {}
    path = os.path.join(folder, "tokenizer_config.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            for key, entry in json.load(file).get("added_tokens_decoder", {}).items():
                special[int(key)] = entry["content"]
    letters = byte_letters()
    tokens = [f"[PAD{i}]" for i in range(c["vocab_size"])]
    types = [5] * c["vocab_size"]  # unused
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda x: x[1]):
        tokens[rank], types[rank] = "".join(letters[b] for b in token), 1
        parts = split_token(ranks, token, rank) if len(token) > 1 else []
        if len(parts) == 2:
            merges.append(" ".join("".join(letters[b] for b in p) for p in parts))
    for i, content in special.items():
        if i < len(tokens):
            tokens[i], types[i] = content, 3
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("kimi-k2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    for key, add in (("bos_token_id", w.add_bos_token_id), ("eos_token_id", w.add_eos_token_id),
                     ("pad_token_id", w.add_pad_token_id)):
        value = outer.get(key, c.get(key))
        if isinstance(value, int):
            add(value)
    w.add_add_bos_token(False)


def write(writer, out):
    """Under another name until it is whole."""
    part = f"{out}.tmp-{os.getpid()}"
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, out)
    finally:
        if os.path.exists(part):
            os.remove(part)


def run(args):
    try:
        import gguf
    except ImportError as error:
        raise Failure("the gguf package is not installed (tests/requirements.txt)") from error
    if os.path.exists(args.out) and not args.force:
        raise Failure(f"{args.out} exists; --force replaces it")
    outer, c = read_config(args.model)
    checkpoint = Checkpoint(args.model)
    writer = gguf.GGUFWriter(args.out, "kimi-k3")
    writer.add_name(os.path.basename(os.path.abspath(args.model)))
    add_config(writer, c)
    if args.no_vocab:
        writer.add_tokenizer_model("none")
    else:
        add_vocab(writer, args.model, outer, c)
    export = Export(gguf, writer, checkpoint, c, args.trunk)
    export.top()
    for i in range(c["num_hidden_layers"]):
        export.layer(i)
    if unread := checkpoint.unread():
        raise Failure(f"{args.model}: {len(unread)} tensors have no place in the format, the first: {unread[0]}"
                      + (f" ({TO_BF16})" if unread[0].endswith("_packed") else ""))
    write(writer, args.out)
    print(f"{args.out}: {os.path.getsize(args.out)} bytes, trunk {args.trunk}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--trunk", choices=("bf16", "q8_0", "f32"), default="bf16")
    parser.add_argument("--no-vocab", action="store_true", help="leave the tokenizer out")
    parser.add_argument("--force", action="store_true")
    try:
        run(parser.parse_args())
    except KeyError as error:
        print(f"export_gguf: {error} is missing in config.json or a header", file=sys.stderr)
        return 1
    except (Failure, OSError, ValueError, TypeError) as error:
        print(f"export_gguf: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
