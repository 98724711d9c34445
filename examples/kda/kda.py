#!/usr/bin/env python3
"""k3/kda.h from Python: ctypes structures, then every call against its formulas in float64.

usage: kda.py LIBK3_KDA.SO      needs numpy; exit status 0 right, 1 wrong, 77 no GPU
Device memory comes from the driver; a program that has PyTorch passes tensor.data_ptr() instead.
"""
import ctypes as c
import sys

import numpy as np

OK, INVALID, SMALL_WORKSPACE, NO_CUDA, LAUNCH = range(5)
AUTO, FUSED, SPLIT, RECURRENT = range(4)
pointer, i64, i32, f32 = c.c_void_p, c.c_int64, c.c_int32, c.c_float


class Tensor(c.Structure):
    _fields_ = [("data", pointer), ("row_stride", i64)]


class Batch(c.Structure):
    _fields_ = [("n_tokens", i64), ("n_sequences", i32), ("cu_seqlens", pointer),
                ("n_heads", i32), ("head_dim", i32)]


class Inputs(c.Structure):
    _fields_ = [(name, Tensor) for name in ("q", "k", "v", "f", "beta")] + [
        ("a_log", pointer), ("dt_bias", pointer), ("lower_bound", f32), ("scale", f32)]


class Conv(c.Structure):
    _fields_ = [(name, pointer * 3) for name in ("weights", "tails", "token_tails")]


class Norm(c.Structure):
    _fields_ = [("gate", Tensor), ("weight", pointer), ("eps", f32)]


class Gradients(c.Structure):
    _fields_ = [(name, pointer) for name in ("dq", "dk", "dv", "df", "dbeta", "da_log", "ddt_bias",
                                             "d_initial_state")]


def load(path):
    """The library with the types of its functions."""
    lib = c.CDLL(path)
    batch, inputs = c.POINTER(Batch), c.POINTER(Inputs)
    signatures = {
        "status_text": (c.c_char_p, [c.c_int]),
        "forward_workspace": (i64, [batch, f32, c.c_int]),
        "forward": (c.c_int, [batch, inputs, pointer, i64, pointer, pointer, c.c_int, pointer,
                              c.c_size_t, pointer]),
        "decode": (c.c_int, [batch, inputs, pointer, i64, pointer, pointer, pointer]),
        "decode_fused": (c.c_int, [batch, inputs, c.POINTER(Conv), c.POINTER(Norm), pointer, i64,
                                   pointer, pointer, pointer]),
        "backward_workspace": (i64, [batch, f32]),
        "backward": (c.c_int, [batch, inputs, pointer, Tensor, pointer, c.POINTER(Gradients),
                               pointer, c.c_size_t, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, "k3_kda_" + name)
        function.restype, function.argtypes = result, arguments
        setattr(lib, name, function)
    return lib


class Device:
    """Memory of the first GPU. `why` is None when there is one, else the reason."""

    def __init__(self):
        try:
            self.cuda = c.CDLL("libcuda.so.1")
        except OSError:
            self.why = "no CUDA driver"
            return
        gpu, context = c.c_int(), pointer()
        calls = [lambda: self.cuda.cuInit(0), lambda: self.cuda.cuDeviceGet(c.byref(gpu), 0),
                 lambda: self.cuda.cuDevicePrimaryCtxRetain(c.byref(context), gpu),
                 lambda: self.cuda.cuCtxSetCurrent(context)]
        self.why = None if all(call() == 0 for call in calls) else "no GPU"

    def check(self, error):
        if error:
            sys.exit(f"CUDA driver error {error}")

    def new(self, x):
        """A copy of a numpy array; its address."""
        x, at = np.ascontiguousarray(x), c.c_uint64()
        self.check(self.cuda.cuMemAlloc_v2(c.byref(at), c.c_size_t(max(x.nbytes, 1))))
        if x.nbytes:
            self.check(self.cuda.cuMemcpyHtoD_v2(at, pointer(x.ctypes.data), c.c_size_t(x.nbytes)))
        return at.value

    def get(self, at, shape, kind):
        x = np.empty(shape, np.uint16 if kind == "bf16" else np.float32)
        self.check(self.cuda.cuCtxSynchronize())
        self.check(self.cuda.cuMemcpyDtoH_v2(pointer(x.ctypes.data), c.c_uint64(at),
                                             c.c_size_t(x.nbytes)))
        return from_bf16(x) if kind == "bf16" else x.astype(np.float64)


def to_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def reference(x, cu, bound, scale):
    """o, states after the last tokens and states after each token; x: dict of float64 arrays."""
    o, final = np.zeros_like(x["v"]), x["state"].copy()
    each = np.zeros(x["v"].shape + (x["v"].shape[-1],))
    z = x["f"] + x["dt_bias"]
    rate = np.exp(x["a_log"])[:, None]
    g = bound * sigmoid(rate * z) if bound < 0 else -rate * np.logaddexp(0, z)

    def unit(rows):
        return rows / np.sqrt((rows * rows).sum(-1, keepdims=True) + 1e-6)

    q, k, beta = scale * unit(x["q"]), unit(x["k"]), sigmoid(x["beta"])
    for s in range(len(cu) - 1):
        S = final[s]  # [heads, key, value]
        for t in range(cu[s], cu[s + 1]):
            S *= np.exp(g[t])[:, :, None]
            u = beta[t][:, None] * (x["v"][t] - np.einsum("hij,hi->hj", S, k[t]))
            S += k[t][:, :, None] * u[:, None, :]
            o[t], each[t] = np.einsum("hij,hi->hj", S, q[t]), S
    return o, final, each


class Job:
    """Random inputs of one batch, on the host in `x` (as the device rounds them) and there."""

    def __init__(self, device, cu, heads, dim, bound, seed):
        rng, tokens, n = np.random.default_rng(seed), cu[-1], len(cu) - 1
        self.device, self.cu, self.bound, self.scale = device, cu, bound, float(np.float32(dim**-.5))
        self.x, self.at = {}, {}
        for name in ("q", "k", "v", "f"):
            self.add(name, rng.normal(size=(tokens, heads, dim)), "bf16")
        self.add("beta", rng.normal(size=(tokens, heads)), "bf16")
        self.add("a_log", rng.normal(size=heads) * 0.3, "f32")
        self.add("dt_bias", rng.normal(size=(heads, dim)), "f32")
        self.add("state", rng.normal(size=(n, heads, dim, dim)) * 0.2, "f32")
        self.width = heads * dim
        self.batch = Batch(tokens, n, device.new(np.array(cu, np.int32)), heads, dim)
        rows = [Tensor(self.at[name], self.width) for name in ("q", "k", "v", "f")]
        self.inputs = Inputs(*rows, Tensor(self.at["beta"], heads), self.at["a_log"],
                             self.at["dt_bias"], bound, self.scale)
        self.o = device.new(np.zeros(tokens * self.width, np.uint16))

    def add(self, name, x, kind):
        bits = to_bf16(x) if kind == "bf16" else x.astype(np.float32)
        self.x[name] = from_bf16(bits) if kind == "bf16" else bits.astype(np.float64)
        self.at[name] = self.device.new(bits)

    def space(self, name):  # zeros, four bytes for each element of an input
        return self.device.new(np.zeros(self.x[name].size, np.float32))

    def reference(self):
        return reference(self.x, self.cu, self.bound, self.scale)


class Checks:
    def __init__(self, lib, device):
        self.lib, self.device, self.failed = lib, device, 0

    def must(self, status):
        if status == NO_CUDA:
            print("SKIP", self.lib.status_text(status).decode())
            sys.exit(77)
        if status != OK:
            sys.exit(self.lib.status_text(status).decode())

    def row(self, name, error, limit):
        ok = error <= limit  # false for NaN
        print(f"{name:34} {error:.2e} of {limit:.1e}{'' if ok else '  FAIL'}")
        self.failed += not ok

    def compare(self, name, at, expected, kind, limit):
        got = self.device.get(at, expected.shape, kind)
        self.row(name, np.linalg.norm(got - expected) / np.linalg.norm(expected), limit)

    def forward(self, dim, bound):
        job = Job(self.device, [0, 33, 33, 100], 2, dim, bound, 1)
        size = self.lib.forward_workspace(job.batch, bound, AUTO)
        final, workspace = job.space("state"), self.device.new(np.zeros(size, np.uint8))
        self.must(self.lib.forward(job.batch, job.inputs, job.o, job.width, job.at["state"], final,
                                   AUTO, workspace, size, None))
        o, state, _ = job.reference()
        self.compare(f"forward D={dim} bound={bound}: o", job.o, o, "bf16", 6e-3)
        self.compare("  state", final, state, "f32", 6e-3)

    def decode(self, dim):
        job = Job(self.device, [0, 3, 3, 7], 3, dim, -5.0, 2)
        o, state, each = job.reference()
        token_states = self.device.new(np.zeros(each.shape, np.float32))
        self.must(self.lib.decode(job.batch, job.inputs, job.o, job.width, job.at["state"],
                                  token_states, None))
        self.compare(f"decode D={dim}: o", job.o, o, "bf16", 2.5e-3)
        self.compare("  state", job.at["state"], state, "f32", 2e-6)
        self.compare("  state after each token", token_states, each, "f32", 2e-6)

    def decode_fused(self, dim):
        job, rng = Job(self.device, [0, 3, 3, 7], 3, dim, -5.0, 3), np.random.default_rng(4)
        conv, n, shape = Conv(), len(job.cu) - 1, job.x["q"].shape
        for i, name in enumerate("qkv"):
            job.add("w", rng.normal(size=(job.width, 4)) * 0.5, "f32")
            job.add("tail", rng.normal(size=(n, 3, job.width)), "bf16")
            conv.weights[i], conv.tails[i] = job.at["w"], job.at["tail"]
            rows = job.x[name].reshape(-1, job.width).copy()
            for s in range(n):
                part = slice(job.cu[s], job.cu[s + 1])
                past = np.concatenate([job.x["tail"][s], rows[part]])
                rows[part] = silu(sum(job.x["w"][:, j] * past[j:j + len(past) - 3]
                                      for j in range(4)))
            job.x[name] = rows.reshape(shape)
        job.add("gate", rng.normal(size=shape), "bf16")
        job.add("norm", rng.normal(size=dim), "f32")
        norm = Norm(Tensor(job.at["gate"], job.width), job.at["norm"], 1e-5)
        o, state, _ = job.reference()
        o *= job.x["norm"] / np.sqrt((o * o).mean(-1, keepdims=True) + norm.eps) * sigmoid(
            job.x["gate"])
        self.must(self.lib.decode_fused(job.batch, job.inputs, conv, norm, job.o, job.width,
                                        job.at["state"], None, None))
        self.compare(f"fused decode D={dim}: o", job.o, o, "bf16", 2.5e-3)
        self.compare("  state", job.at["state"], state, "f32", 2e-6)

    def backward(self):
        job, rng = Job(self.device, [0, 40, 75], 2, 128, -5.0, 5), np.random.default_rng(6)
        job.add("d_o", rng.normal(size=job.x["v"].shape), "bf16")
        job.add("d_state", rng.normal(size=job.x["state"].shape) * 0.2, "f32")
        names = ["q", "k", "v", "f", "beta", "a_log", "dt_bias", "state"]
        out = {name: job.space(name) for name in names}
        size = self.lib.backward_workspace(job.batch, job.bound)
        workspace = self.device.new(np.zeros(size, np.uint8))
        self.must(self.lib.backward(job.batch, job.inputs, job.at["state"],
                                    Tensor(job.at["d_o"], job.width), job.at["d_state"],
                                    Gradients(*out.values()), workspace, size, None))

        def loss():
            o, state, _ = job.reference()
            return (o * job.x["d_o"]).sum() + (state * job.x["d_state"]).sum()

        for name in names:  # along a random direction, against the difference of the loss
            kind = "bf16" if name in ("q", "k", "v", "f") else "f32"
            gradient = self.device.get(out[name], job.x[name].shape, kind)
            way, here, two = rng.choice([-1.0, 1.0], gradient.shape), job.x[name], []
            for side in (1e-5, -1e-5):
                job.x[name] = here + side * way
                two.append(loss())
            job.x[name] = here
            error = abs((two[0] - two[1]) / 2e-5 - (gradient * way).sum())
            self.row(f"backward: d{name}", error / np.linalg.norm(gradient), 3e-2)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lib, device = load(sys.argv[1]), Device()
    if lib.forward_workspace(Batch(1, 1, None, 1, 96), -5.0, AUTO) >= 0:
        sys.exit("a head of 96 channels was taken")
    if device.why:
        print("SKIP", device.why)
        sys.exit(77)
    checks = Checks(lib, device)
    for dim, bound in ((128, -5.0), (128, 0.0), (64, -5.0)):
        checks.forward(dim, bound)
    for dim in (128, 64):
        checks.decode(dim)
        checks.decode_fused(dim)
    checks.backward()
    print(checks.failed, "outside their limits")
    sys.exit(1 if checks.failed else 0)


if __name__ == "__main__":
    main()
