#!/usr/bin/env python3
"""Error of the chunked KDA when operands of single products are rounded to e4m3.

usage: fp8_error.py [TOKENS] [HEADS]

Runs the chunk form of src/k3/kernels/cuda (chunks of 32, every operand of a product rounded to bf16,
sums in float64) against the float64 token recurrence, then again with one product's operands in e4m3
in the place of bf16, under one power of two for each operand; "two terms"
writes x as e4m3(x) + e4m3(rest). Prints relative L2 errors of outputs and final state.
"""

import sys

import numpy as np

D, C = 128, 32


def bf16(x):
    bits = np.float32(x).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def e4m3(x):
    """Nearest e4m3 (largest 448, smallest subnormal 2^-9) under one power of two for the array."""
    top = np.abs(x).max()
    if top == 0:
        return x
    scale = 2.0 ** np.floor(np.log2(448 / top))
    y = x * scale
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(y), 1e-300))), -6)
    step = 2.0 ** (exponent - 3)
    return np.clip(np.round(y / step) * step, -448, 448) / scale


def two_terms(x):
    high = e4m3(x)
    return high + e4m3(x - high)


def recurrence(q, k, v, g, beta):
    S, out = np.zeros((D, D)), np.zeros_like(v)
    for t in range(len(q)):
        S = np.exp(g[t])[:, None] * S
        S = S + np.outer(k[t], beta[t] * (v[t] - k[t] @ S))
        out[t] = q[t] @ S
    return out, S


def chunked(q, k, v, g, beta, fp8, rounding):
    """fp8: names of the products whose two operands are rounded by `rounding`."""
    def both(name, x, y):
        r = rounding if name in fp8 else bf16
        return r(x), r(y)

    S, out = np.zeros((D, D)), np.zeros_like(v)
    for t in range(0, len(q), C):
        at = slice(t, t + C)
        G = np.cumsum(g[at], axis=0)
        ref = G[C // 2 - 1]
        kc, qc, ki = k[at] * np.exp(G - ref), q[at] * np.exp(G - ref), k[at] * np.exp(ref - G)
        a, b = both("pairs", kc, ki)
        L = np.tril(a @ b.T, -1) * beta[at][:, None]
        a, b = both("pairs", qc, ki)
        A = np.tril(a @ b.T)
        M = np.linalg.inv(np.eye(C) + L) * beta[at][None, :]
        a, b = both("Kd S", k[at] * np.exp(G), S)
        Y = v[at] - a @ b
        a, b = both("M Y", M, Y)
        U = a @ b
        a, b = both("Qd S", q[at] * np.exp(G), S)
        O = a @ b
        a, b = both("A U", A, U)
        out[at] = O + a @ b
        a, b = both("Kr U", k[at] * np.exp(G[-1] - G), U)
        S = np.exp(G[-1])[:, None] * S + a.T @ b
    return out, S


def inputs(rng, tokens, regime):
    normal = lambda *shape: bf16(rng.standard_normal(shape))
    q, k, v, f = (normal(tokens, D) for _ in range(4))
    q /= np.sqrt((q * q).sum(1, keepdims=True) + 1e-6) * np.sqrt(D)
    k /= np.sqrt((k * k).sum(1, keepdims=True) + 1e-6)
    bias = {"mid": 0.6, "long": -8.5, "pinned": 40.0}[regime]
    g = -5 / (1 + np.exp(-(f * (0.3 if regime == "long" else 1) + bias)))
    return q, k, v, g, 1 / (1 + np.exp(-normal(tokens)))


def error(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def main():
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    heads = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    names = ("pairs", "Kd S", "M Y", "Qd S", "A U", "Kr U")
    variants = [("none (all bf16)", (), bf16)]
    variants += [(name, (name,), e4m3) for name in names]
    variants += [("all", names, e4m3), ("all, two terms", names, two_terms)]
    print("e4m3 in | " + " | ".join(f"{r}: o, state" for r in ("mid", "long", "pinned")))
    rows = [[] for _ in variants]
    for regime in ("mid", "long", "pinned"):
        errors = np.zeros((len(variants), 2))
        rng = np.random.default_rng(1)
        for _ in range(heads):
            x = inputs(rng, tokens, regime)
            o, S = recurrence(*x)
            for i, (_, fp8, rounding) in enumerate(variants):
                got = chunked(*x, fp8, rounding)
                errors[i] += error(got[0], o) ** 2, error(got[1], S) ** 2
        for i, row in enumerate(np.sqrt(errors / heads)):
            rows[i].append(f"{row[0]:.1e}, {row[1]:.1e}")
    for (name, _, _), row in zip(variants, rows):
        print(f"{name} | " + " | ".join(row))


if __name__ == "__main__":
    main()
