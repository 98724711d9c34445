#!/usr/bin/env python3
"""Writes src/k3/kernels/cuda/wgmma.cuh: one function for each wgmma shape in use.

usage: make_wgmma.py > src/k3/kernels/cuda/wgmma.cuh
"""

HEAD = """// Made by bench/gpu/make_wgmma.py: wgmma m64nNk16, bf16 operands, f32 accumulators.
// kTransposed: B is stored along N (its rows are K) instead of along K.
#pragma once

#include <cstdint>

namespace k3::cuda {
"""


def function(n, from_registers):
    count = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if from_registers:
        name, a_type = "WgmmaRs", "const uint32_t* a"
        a_text = f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}"
        a_args, used = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])', 4
        flags = f"p, 1, 1, %{count + used + 2}"
    else:
        name, a_type = "WgmmaSs", "uint64_t a"
        a_text, a_args, used = f"%{count}", '"l"(a)', 1
        flags = f"p, 1, 1, 0, %{count + used + 2}"
    gap = "\n" + 40 * " " if from_registers else " "  # as clang-format breaks the line
    return f"""
template <int kTransposed>
__device__ __forceinline__ void {name}(float (&d)[{count}], {a_type}, uint64_t b,{gap}int accumulate) {{
  // clang-format off
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + used + 1}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
      "{{{accumulators}}}, {a_text}, %{count + used}, {flags};}}"
      : {outputs}
      : {a_args}, "l"(b), "r"(accumulate), "n"(kTransposed));
  // clang-format on
}}
"""


print(HEAD + "".join(function(n, True) for n in (32, 64, 128))
      + function(32, False) + "\n}  // namespace k3::cuda")
