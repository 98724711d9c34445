#!/usr/bin/env python3
"""Writes one function for each wgmma shape in use.

usage: make_wgmma.py > src/k3/kernels/cuda/wgmma.cuh
       make_wgmma.py e4m3 > bench/gpu/wgmma_e4m3.cuh
"""

import sys

E4M3 = sys.argv[1:] == ["e4m3"]
K = 32 if E4M3 else 16
TYPE = "e4m3" if E4M3 else "bf16"

HEAD = f"""// Made by bench/gpu/make_wgmma.py{" e4m3" if E4M3 else ""}: wgmma m64nNk{K}, {TYPE} operands, \
f32 accumulators.
// {"Both operands are stored along K: eight-bit types have no other form."
    if E4M3 else "kTransposed: B is stored along N (its rows are K) instead of along K."}
#pragma once

#include <cstdint>

namespace k3::cuda {{
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
    template, last = "template <int kTransposed>\n", ', "n"(kTransposed)'
    if E4M3:
        name, template, last, flags = name + "E4m3", "", "", "p, 1, 1"
    gap = "\n" + 40 * " " if from_registers else " "  # as clang-format breaks the line
    if E4M3:
        gap = "\n" + 44 * " "
    return f"""
{template}__device__ __forceinline__ void {name}(float (&d)[{count}], {a_type}, uint64_t b,{gap}int accumulate) {{
  // clang-format off
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + used + 1}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k{K}.f32.{TYPE}.{TYPE} "
      "{{{accumulators}}}, {a_text}, %{count + used}, {flags};}}"
      : {outputs}
      : {a_args}, "l"(b), "r"(accumulate){last});
  // clang-format on
}}
"""


shapes = ((32, True), (128, True)) if E4M3 else ((32, True), (64, True), (128, True), (32, False))
print(HEAD + "".join(function(*shape) for shape in shapes) + "\n}  // namespace k3::cuda")
