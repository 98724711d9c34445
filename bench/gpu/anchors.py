#!/usr/bin/env python3
"""Our KDA and flash-linear-attention's Triton kernels: same tensors, same process, same events.

usage: anchors.py LIBK3_KDA.SO [ROW...]   needs PyTorch and the package fla-core on the path
Only the rows whose names begin with a ROW; Triton tunes each shape first, which takes minutes.
Both get bf16 q, k, v, gate input and beta logit with everything fused that they can fuse:
q/k norm, bounded gate (-5), sigmoid of beta, final state. A row is a shape; its figures are medians
of CUDA events in turns, so that a change of clocks meets both.
"""
import ctypes as c
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/kda"))
import kda  # noqa: E402

BOUND, DIM = -5.0, 128
FORWARD = [("H96 1x8192", 96, [8192]), ("H96 8x4096", 96, [4096] * 8),
           ("H96 varlen6", 96, [1300, 547, 2048, 963, 271, 3063]), ("H96 1x32768", 96, [32768]),
           ("H32 1x8192", 32, [8192]), ("H12 1x8192", 12, [8192])]
DECODE = [("decode H96 batch 64", 64), ("decode H96 batch 256", 256)]


def address(x):
    return None if x is None else x.data_ptr()


class Case:
    """Random tensors of one packed batch and the structures of our interface over them."""

    def __init__(self, lib, heads, lengths, seed=1):
        torch.manual_seed(seed)
        self.lib, tokens = lib, sum(lengths)
        self.cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        self.cu32 = self.cu.to(torch.int32)
        self.x = {name: torch.randn(1, tokens, heads, DIM, device="cuda", dtype=torch.bfloat16)
                  for name in ("q", "k", "v", "f")}
        self.x["beta"] = torch.randn(1, tokens, heads, device="cuda", dtype=torch.bfloat16)
        self.a_log = torch.rand(heads, device="cuda").log()
        self.dt_bias = torch.randn(heads * DIM, device="cuda") * 0.5
        self.o = torch.empty_like(self.x["v"])
        self.state = torch.zeros(len(lengths), heads, DIM, DIM, device="cuda")
        row = heads * DIM
        self.batch = kda.Batch(tokens, len(lengths), address(self.cu32), heads, DIM)
        self.inputs = kda.Inputs(*[kda.Tensor(address(self.x[n]), row if n != "beta" else heads)
                                   for n in ("q", "k", "v", "f", "beta")],
                                 address(self.a_log), address(self.dt_bias), BOUND, DIM**-0.5)
        size = lib.forward_workspace(c.byref(self.batch), BOUND, kda.AUTO)
        self.workspace = torch.empty(max(size, 1), device="cuda", dtype=torch.uint8)

    def check(self, status):
        if status != kda.OK:
            sys.exit(f"anchors.py: {self.lib.status_text(status).decode()}")

    def stream(self):
        return torch.cuda.current_stream().cuda_stream

    def ours(self):
        self.check(self.lib.forward(
            c.byref(self.batch), c.byref(self.inputs), address(self.o), self.x["q"].stride(1), None,
            address(self.state), kda.AUTO, address(self.workspace), self.workspace.numel(),
            self.stream()))
        return self.o

    def fla_arguments(self):
        return dict(q=self.x["q"], k=self.x["k"], v=self.x["v"], g=self.x["f"],
                    beta=self.x["beta"], scale=DIM**-0.5, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=self.a_log,
                    dt_bias=self.dt_bias, lower_bound=BOUND, use_beta_sigmoid_in_kernel=True,
                    output_final_state=True, cu_seqlens=self.cu if len(self.cu) > 2 else None)

    def fla(self):
        from fla.ops.kda import chunk_kda
        with torch.no_grad():
            return chunk_kda(**self.fla_arguments(), safe_gate=True)[0]

    def our_step(self):
        self.check(self.lib.decode(c.byref(self.batch), c.byref(self.inputs), address(self.o),
                                   self.x["q"].stride(1), address(self.state), None, self.stream()))
        return self.o

    def fla_step(self):
        from fla.ops.kda import fused_recurrent_kda
        with torch.no_grad():
            return fused_recurrent_kda(**self.fla_arguments(), initial_state=self.state)[0]

    def our_training_step(self):
        self.ours()
        if not hasattr(self, "grads"):
            size = self.lib.backward_workspace(c.byref(self.batch), BOUND)
            self.space = torch.empty(size, device="cuda", dtype=torch.uint8)
            self.d_o = torch.randn_like(self.o)
            flat = {n: torch.empty_like(self.x[n]) for n in ("q", "k", "v", "f")}
            rest = [torch.empty_like(self.x["beta"], dtype=torch.float32), self.a_log.clone(),
                    self.dt_bias.clone()]
            self.grads = (flat, rest)
        flat, rest = self.grads
        out = kda.Gradients(*[address(flat[n]) for n in ("q", "k", "v", "f")],
                            *[address(x) for x in rest], None)
        self.check(self.lib.backward(
            c.byref(self.batch), c.byref(self.inputs), None,
            kda.Tensor(address(self.d_o), self.x["q"].stride(1)), None, c.byref(out),
            address(self.space), self.space.numel(), self.stream()))
        return flat["q"]

    def fla_training_step(self):
        from fla.ops.kda import chunk_kda
        if not hasattr(self, "leaves"):
            self.leaves = [x.requires_grad_() for x in
                           (*self.x.values(), self.a_log, self.dt_bias)]
        for x in self.leaves:
            x.grad = None
        o = chunk_kda(**self.fla_arguments(), safe_gate=True)[0]
        o.backward(self.d_o)
        return self.x["q"].grad


def times(calls, repeats=15, warm=4):
    """Median milliseconds of each call, taken in turns."""
    for call in calls:
        for _ in range(warm):
            call()
    torch.cuda.synchronize()
    taken = [[] for _ in calls]
    for _ in range(repeats):
        for call, list_ in zip(calls, taken):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(4_000_000)  # the host queues everything before the clock starts
            start.record()
            call()
            end.record()
            end.synchronize()
            list_.append(start.elapsed_time(end))
    return [statistics.median(x) for x in taken]


def difference(a, b):
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


def measure(name, ours, fla):
    far = difference(ours(), fla())
    mine, theirs = times([ours, fla])
    print(f"{name:30} k3 {mine:8.4f} ms   fla {theirs:8.4f} ms   {theirs / mine:5.2f}x   "
          f"apart {far:.1e}", flush=True)
    return far


def rows(lib):
    """(name, what runs it) of every row; a case lives as long as its row."""
    def forward(heads, lengths):
        case = Case(lib, heads, lengths)
        return case.ours, case.fla

    def training():
        case = Case(lib, 96, [8192])
        case.our_training_step()
        return case.our_training_step, case.fla_training_step

    def step(batch):  # each moves a state of its own
        return Case(lib, 96, [1] * batch).our_step, Case(lib, 96, [1] * batch).fla_step

    for name, batch in DECODE:
        yield name, lambda batch=batch: step(batch)
    for name, heads, lengths in FORWARD:
        yield "forward " + name, lambda h=heads, n=lengths: forward(h, n)
    yield "forward + backward H96 1x8192", training


def main(library, *only):
    import fla
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, fla {fla.__version__}; "
          "medians of 15 in turns, eager", flush=True)
    worst = 0
    for name, make in rows(kda.load(library)):
        if not only or any(name.startswith(row) for row in only):
            worst = max(worst, measure(name, *make()))
    return 0 if worst < 0.02 else 1


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
