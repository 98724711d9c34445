#!/usr/bin/env python3
"""How steady the routers of a model are, and what their experts know of domains.

    tools/router_report.py MODEL prose.txt code.txt [--k3 ./k3] [--tokens 512] [--json]

For every layer with experts, from traces (docs/trace.md):

noise    share of choices at unchanged places that differ when --noise of the other tokens, drawn at
         random, are replaced by random ones; mean over the texts
shift    share of choices on a text's second half that differ when its first half is replaced by that
         of the next text; mean over the texts
bits     mutual information of expert and text, in bits: how much one choice tells of the domain
chance   the same after the choices were shuffled among the texts: what the estimate gives where
         there is nothing to know

A choice is one of the k experts of a token; two sets differ by the share of their members that the
other lacks. Needs numpy.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np


def fail(message):
    sys.exit(f"router_report: {message}")


def run(arguments, text=b""):
    done = subprocess.run([str(a) for a in arguments], input=text, capture_output=True, check=False)
    if done.returncode != 0:
        fail(done.stderr.decode(errors="replace").strip() or f"{arguments[0]} failed")
    return done.stdout


def read_safetensors(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    kinds = {"F32": np.float32, "I32": np.int32}
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[8 + size + begin:8 + size + end]
        arrays[name] = np.frombuffer(raw, kinds[entry["dtype"]]).reshape(entry["shape"])
    return arrays


class Router:
    """Chosen experts of every layer, by running k3."""

    def __init__(self, k3, model, folder):
        self.k3, self.model, self.folder = k3, model, pathlib.Path(folder)

    def encode(self, path, n_tokens):
        try:
            text = pathlib.Path(path).read_bytes()
        except OSError as error:
            fail(f"{path}: {error.strerror}")
        ids = np.array(run([self.k3, "tokenize", self.model], text).split()[:n_tokens], dtype=np.int64)
        if len(ids) < n_tokens:
            fail(f"{path}: {len(ids)} tokens, expected at least {n_tokens}")
        return ids

    def choices(self, ids):
        """{layer: [tokens, k]}, members of a row sorted."""
        (self.folder / "ids.txt").write_text(",".join(str(i) for i in ids))
        out = self.folder / "trace.safetensors"
        run([self.k3, "trace", self.model, "--ids", f"@{self.folder / 'ids.txt'}", "--out", out])
        found = {}
        for name, value in read_safetensors(out).items():
            part = name.split(".")
            if len(part) == 3 and part[0] == "layer" and part[2] == "expert_idx":
                found[int(part[1])] = np.sort(value, axis=1)
        return found


def flips(a, b):
    """Share of the members of each set in `a` that `b` lacks: [tokens, k] each."""
    return 1 - np.mean([np.mean(np.isin(x, y)) for x, y in zip(a, b)])


def information(experts, domains):
    """Mutual information in bits of two lists of numbers."""
    table = np.zeros((experts.max() + 1, domains.max() + 1))
    np.add.at(table, (experts, domains), 1)
    p = table / table.sum()
    independent = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
    seen = p > 0
    return float(np.sum(p[seen] * np.log2(p[seen] / independent[seen])))


def report(router, texts, noise, rng):
    vocab = max(int(ids.max()) for ids in texts) + 1
    base = [router.choices(ids) for ids in texts]
    if not base[0]:
        fail("the model has no layer with experts")
    half = len(texts[0]) // 2
    noisy, shifted = [], []
    for i, ids in enumerate(texts):
        changed = rng.random(len(ids)) < noise
        copy = np.where(changed, rng.integers(0, vocab, len(ids)), ids)
        noisy.append((copy == ids, router.choices(copy)))
        other = texts[(i + 1) % len(texts)]
        shifted.append(router.choices(np.concatenate([other[:half], ids[half:]])))
    rows = []
    for layer in sorted(base[0]):
        chosen = [b[layer] for b in base]
        experts = np.concatenate([c.ravel() for c in chosen])
        domains = np.repeat(np.arange(len(texts)), [c.size for c in chosen])
        # The k choices of a token are no independent draws: they move together.
        order = rng.permutation(sum(len(c) for c in chosen))
        mixed = np.concatenate(chosen)[order].ravel()
        rows.append({
            "layer": layer,
            "experts": int(experts.max()) + 1,
            "noise": float(np.mean([flips(c[same], n[layer][same])
                                    for c, (same, n) in zip(chosen, noisy)])),
            "shift": float(np.mean([flips(c[half:], s[layer][half:])
                                    for c, s in zip(chosen, shifted)])),
            "bits": information(experts, domains),
            "chance": information(mixed, domains),
        })
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model folder")
    parser.add_argument("texts", nargs="+", help="one file a domain, at least two")
    parser.add_argument("--k3", default="k3", help="the program")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each text")
    parser.add_argument("--noise", type=float, default=0.05, help="share of tokens replaced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    if len(o.texts) < 2:
        parser.error("found one text, expected at least two")
    if not 0 <= o.noise <= 1:
        parser.error(f"--noise is {o.noise}, expected 0 to 1")
    if o.tokens < 4:
        parser.error(f"--tokens is {o.tokens}, expected at least 4")
    with tempfile.TemporaryDirectory() as folder:
        router = Router(o.k3, o.model, folder)
        texts = [router.encode(path, o.tokens) for path in o.texts]
        rows = report(router, texts, o.noise, np.random.default_rng(o.seed))
    if o.json:
        print(json.dumps({"model": o.model, "texts": o.texts, "tokens": o.tokens, "noise": o.noise,
                          "seed": o.seed, "layers": rows}, indent=1))
        return
    print("layer   noise   shift    bits  chance")
    for r in rows:
        print(f"{r['layer']:5} {r['noise']:7.3f} {r['shift']:7.3f} {r['bits']:7.4f} {r['chance']:7.4f}")


if __name__ == "__main__":
    main()
