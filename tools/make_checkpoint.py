#!/usr/bin/env python3
"""Write a random checkpoint of any K3-family config, of any size, in the release's layout.

    make_checkpoint.py CONFIG OUT [--seed N] [--shard-size BYTES] [--experts mxfp4|bf16]
                                  [--tokenizer DIR] [--force]

CONFIG is a config.json (or a folder with one): released layouts and k3_variant ones alike.
The same arguments give the same bytes. Memory stays near 300 MB whatever the size of the model:
values are slices of a random pool, written tensor by tensor. Weights are normal with the config's
initializer_range (0.02), norms 1, A_log = log U(1, 16), router biases 0. Needs numpy.

Example: /usr/bin/python3 tools/make_checkpoint.py tools/configs/mid-k3.json /tmp/mid-k3
"""
import argparse
import base64
import itertools
import json
import os
import re
import shutil
import struct
import sys
import zlib

import numpy as np

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests", "reference"))

import k3_reference as R  # noqa: E402

WIDTH = {"F32": 4, "BF16": 2, "U8": 1}
N_SPECIAL = 256
SPECIAL_NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
                 6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>",
                 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>", 254: "[UNK]", 255: "[PAD]"}
QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True,
        "scale_dtype": "torch.uint8"}}},
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
               "re:.*lm_head.*"]}


class Pool:
    """Random values prepared once. A tensor takes slices of it from places its name decides."""

    def __init__(self, seed, std, packed, size):
        self.seed = seed
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(size, dtype=np.float32) * np.float32(std)
        self.bf16 = R.bf16_from_float(x)
        if packed:
            n = min(size, 1 << 22)                       # codes and scales of the same values
            self.codes, scales = R.mxfp4_pack(x[:n].reshape(n // 4096, 4096))
            self.codes = self.codes.reshape(-1, 16)      # one row per group of 32
            self.scales = scales.reshape(-1)

    def rng(self, name):
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def slices(self, name, count, pool):
        """Pieces of `pool`, `count` rows together."""
        rng, n = self.rng(name), len(pool)
        while count > 0:
            at = int(rng.integers(0, n - 1))
            take = min(count, n - at)
            yield pool[at:at + take]
            count -= take


def plan(c, prefix, experts, flat):
    """[(name, dtype, shape)] of every tensor, layer by layer, embedding and head last as in the release."""
    out = []
    tied = c.tied
    for name, (shape, dtype) in R.expected_tensors(c).items():
        if name == "lm_head.weight" and tied:
            continue
        if ".experts." in name and experts == "mxfp4":
            rows, cols = shape
            if cols % 32:
                sys.exit(f"{name}: rows of {cols} values cannot be packed in groups of 32; use --experts bf16")
            out.append((prefix + name + "_packed", "U8", (rows, cols // 2)))
            out.append((prefix + name + "_scale", "U8", (rows, cols // 32)))
            continue
        if name.endswith("A_log"):                       # the padding of the two released layouts
            n = shape[0]
            shape = (1, 1, n, 1) if flat else (-(-n // 128) * 128,)
        out.append((prefix + name, dtype, tuple(shape)))
    return out


def nbytes(item):
    n = WIDTH[item[1]]
    for d in item[2]:
        n *= d
    return n


def shards_of(tensors, limit):
    """Consecutive groups of at most `limit` bytes; codes and scales of a matrix stay together."""
    groups, size = [[]], 0
    for item in tensors:
        n = nbytes(item)
        if groups[-1] and size + n > limit and not item[0].endswith("_scale"):
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += n
    return groups


def values(pool, c, name, dtype, shape):
    """The bytes of one tensor, in pieces."""
    count = int(np.prod(shape, dtype=np.int64))
    if name.endswith("weight_packed"):
        return pool.slices(name[:-len("_packed")], count // 16, pool.codes)
    if name.endswith("weight_scale"):
        return pool.slices(name[:-len("_scale")], count, pool.scales)
    rng = pool.rng(name)
    if name.endswith(("norm.weight", "layernorm.weight", "_gamma")):
        v = np.ones(count, np.float32)
    elif name.endswith("_alpha"):
        v = np.full(count, c.alpha_init, np.float32)
    elif name.endswith("A_log"):
        v = np.zeros(count, np.float32)
        v[:c.kda_heads] = np.log(rng.uniform(1.0, 16.0, c.kda_heads))
    elif name.endswith("dt_bias"):                       # softplus of it is log-uniform in [0.001, 0.1]
        dt = np.exp(rng.uniform(np.log(0.001), np.log(0.1), count))
        v = dt + np.log(-np.expm1(-dt))
    elif name.endswith("conv1d.weight"):
        v = rng.uniform(-0.5, 0.5, count)
    elif name.endswith(("e_score_correction_bias", "_gate.bias")):
        v = np.zeros(count, np.float32)
    elif dtype == "BF16":
        return pool.slices(name, count, pool.bf16)
    else:
        sys.exit(f"{name}: no rule for a {dtype} tensor")
    v = np.asarray(v, np.float32)
    return [R.bf16_from_float(v) if dtype == "BF16" else v]


def write_shard(path, tensors, pool, c):
    order = sorted(tensors, key=lambda t: (-WIDTH[t[1]], t[0]))
    head, at = {"__metadata__": {"format": "pt"}}, 0
    for item in order:
        head[item[0]] = {"dtype": item[1], "shape": list(item[2]), "data_offsets": [at, at + nbytes(item)]}
        at += nbytes(item)
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, dtype, shape in order:
            for piece in values(pool, c, name, dtype, shape):
                f.write(np.ascontiguousarray(piece).data)
        assert f.tell() == 8 + len(text) + at
    return at


def byte_tokens(count):
    """256 single bytes, then pairs and triples of them, likely letters first."""
    likely = b" etaoinshrdlcumwfgypbvk"
    order = likely + bytes(b for b in range(256) if b not in likely)
    singles = (bytes([b]) for b in range(256))
    pairs = (bytes(p) for p in itertools.product(order, repeat=2))
    triples = (bytes(p) for p in itertools.product(order, repeat=3))
    return itertools.islice(itertools.chain(singles, pairs, triples), count)


def write_tokenizer(out, vocab):
    base = vocab - N_SPECIAL
    if base < 256:
        print(f"vocab_size {vocab} is under 512: no tokenizer written", file=sys.stderr)
        return
    with open(os.path.join(out, "tiktoken.model"), "wb") as f:
        for i, t in enumerate(byte_tokens(base)):
            f.write(base64.b64encode(t) + b" %d\n" % i)
    added = {str(base + k): {"content": v, "lstrip": False, "normalized": False, "rstrip": False,
                             "single_word": False, "special": True} for k, v in SPECIAL_NAMES.items()}
    write_json(out, "tokenizer_config.json", {
        "added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
        "unk_token": "[UNK]", "tokenizer_class": "TikTokenTokenizer"})


def write_json(out, name, obj, indent=1):
    with open(os.path.join(out, name), "w") as f:
        json.dump(obj, f, indent=indent)
        f.write("\n")


def read_config(path, experts):
    """The config with ids filled in and its quantization_config matching `experts`."""
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    with open(path) as f:
        cfg = json.load(f)
    text = cfg.get("text_config") or cfg
    for key, value in (("bos_token_id", text["vocab_size"] - 256), ("eos_token_id", text["vocab_size"] - 254),
                       ("pad_token_id", text["vocab_size"] - 1)):
        if cfg.get(key) is None and text.get(key) is None and value >= 0:
            cfg[key] = value
    packed = text.get("quantization_config") or cfg.get("quantization_config")
    if experts is None:
        experts = "mxfp4" if packed else "bf16"
    if not text.get("num_experts"):
        experts = "bf16"
    if experts == "bf16":
        text.pop("quantization_config", None), cfg.pop("quantization_config", None)
    elif not packed:
        text["quantization_config"] = QUANTIZATION
    return cfg, text, experts


def prepare(out, force):
    os.makedirs(out, exist_ok=True)
    stale = [f for f in os.listdir(out) if re.search(r"\.safetensors$|\.safetensors\.index\.json$", f)]
    if stale and not force:
        sys.exit(f"{out} holds a checkpoint already ({stale[0]}); --force replaces it")
    for f in stale:
        os.remove(os.path.join(out, f))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("config")
    ap.add_argument("out")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--shard-size", type=int, default=1 << 30, metavar="BYTES")
    ap.add_argument("--experts", choices=("mxfp4", "bf16"), help="default: mxfp4 iff the config is quantized")
    ap.add_argument("--tokenizer", metavar="DIR", help="copy tiktoken.model and tokenizer_config.json from here")
    ap.add_argument("--force", action="store_true", help="replace the checkpoint in OUT")
    a = ap.parse_args()
    if a.shard_size <= 0:
        ap.error("--shard-size must be positive")
    cfg, text, experts = read_config(a.config, a.experts)
    c = R.Config(cfg)
    c.tied = bool(cfg.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    prepare(a.out, a.force)
    prefix = "language_model." if c.nested else ""
    tensors = plan(c, prefix, experts, not c.nested)
    count = sum(int(np.prod(s, dtype=np.int64)) for s, _ in R.expected_tensors(c).values())
    size = min(max(1 << count.bit_length(), 1 << 16), 1 << 23)     # a tiny model needs no large pool
    pool = Pool(a.seed, text.get("initializer_range") or 0.02, experts == "mxfp4", size)

    groups, total, where = shards_of(tensors, a.shard_size), 0, {}
    for i, group in enumerate(groups):
        name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        total += write_shard(os.path.join(a.out, name), group, pool, c)
        where.update((t[0], name) for t in group)
    write_json(a.out, "config.json", cfg)
    eos = cfg.get("eos_token_id", text.get("eos_token_id"))
    write_json(a.out, "generation_config.json", {"do_sample": True, "temperature": 1.0, "top_p": 0.95,
                                                 "eos_token_id": eos})
    if a.tokenizer:
        for name in ("tiktoken.model", "tokenizer_config.json"):
            shutil.copyfile(os.path.join(a.tokenizer, name), os.path.join(a.out, name))
    else:
        write_tokenizer(a.out, c.vocab)
    write_json(a.out, "model.safetensors.index.json",
               {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, 0)
    print(f"{a.out}: {count / 1e9:.3f}e9 parameters, {total} tensor bytes, {len(tensors)} tensors in "
          f"{len(groups)} shards, experts {experts}")


if __name__ == "__main__":
    main()
