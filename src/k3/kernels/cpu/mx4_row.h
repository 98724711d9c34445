// One row of x times MXFP4 weights without tiles (fast_mx4.simd.cc). Included by *.simd.cc files.
#pragma once

#include <cstdint>

namespace k3::cpu::K3_ISA {

/// Smallest exponent of the bf16 values that are not zero, and the largest of all; biased by 127.
struct Mx4Range {
  int low, high;
};
Mx4Range RangeOf(const std::uint8_t* x, std::int64_t cols);

/// Whether products of x with codes under these scales have the bits of tile products: no
/// intermediate may be subnormal or overflow.
bool Mx4Normal(const Mx4Range& x, const std::uint8_t* scales, std::int64_t n);

/// y of 16 weight rows of 32 * steps columns. x holds bf16 values as f32.
void Mx4Rows16(const float* x, const std::uint8_t* codes, const std::uint8_t* scales,
               std::int64_t steps, float* y);

}  // namespace k3::cpu::K3_ISA
