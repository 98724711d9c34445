// MXFP4: 4-bit E2M1 codes with one E8M0 scale for 32 values. Spec section 10.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "k3/quant/decode_row.h"

namespace k3 {

constexpr std::int64_t kMxBlock = 32;

/// Value of each 4-bit code: bit 3 is the sign, the rest an index into {0,.5,1,1.5,2,3,4,6}.
constexpr std::array<float, 16> kE2M1{0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                      -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

/// 2^(e - 127); e = 0 is the subnormal 2^-127. e = 255 is NaN by the OCP standard.
float E8M0ToFloat(std::uint8_t e);

/// How a block's scale is chosen. Both decode the same way.
enum class MxScaleRule : std::uint8_t {
  kNoSaturation,  // smallest power of two with amax / scale <= 6, as the release's training does
  kOcp,           // exponent floor(log2 amax) - 2; values above 6 saturate
};

/// Packs `values` (a multiple of 32) into codes (half as many bytes) and scales (a 32nd). Codes are
/// rounded to nearest, ties to the even code; an all-zero block gets scale byte 0.
void PackMxfp4(std::span<const float> values, MxScaleRule rule, std::uint8_t* codes,
               std::uint8_t* scales);

}  // namespace k3
