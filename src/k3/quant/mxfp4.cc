#include "k3/quant/mxfp4.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace k3 {
namespace {

/// Scale byte of a block whose largest magnitude is amax > 0.
std::uint8_t ScaleByte(double amax, MxScaleRule rule) {
  int e = 0;
  if (rule == MxScaleRule::kOcp) {
    std::frexp(amax, &e);  // amax = m * 2^e, m in [0.5, 1)
    e -= 3;
  } else {
    e = static_cast<int>(std::ceil(std::log2(amax / 6.0)));
    if (amax > std::ldexp(6.0, e)) ++e;  // log2 may be off by an ulp either way
    if (amax <= std::ldexp(6.0, e - 1)) --e;
  }
  return static_cast<std::uint8_t>(std::clamp(e + 127, 0, 254));
}

std::uint8_t Code(double x) {
  const double a = std::abs(x);
  std::uint8_t c = 0;
  while (c < 7) {
    const double low = kE2M1[c], high = kE2M1[c + 1u], mid = (low + high) / 2;
    if (a < mid || (a == mid && c % 2 == 0)) break;
    ++c;
  }
  return static_cast<std::uint8_t>(c | (std::signbit(x) ? 8 : 0));
}

}  // namespace

float E8M0ToFloat(std::uint8_t e) {
  if (e == 0) return 0x1.0p-127f;
  if (e == 255) return std::bit_cast<float>(0x7FC00000u);
  return std::bit_cast<float>(std::uint32_t{e} << 23);
}

void PackMxfp4(std::span<const float> values, MxScaleRule rule, std::uint8_t* codes,
               std::uint8_t* scales) {
  for (std::size_t b = 0; b < values.size() / kMxBlock; ++b) {
    const auto block = values.subspan(b * kMxBlock, kMxBlock);
    double amax = 0;
    for (const float v : block) amax = std::max(amax, std::abs(static_cast<double>(v)));
    const std::uint8_t e = amax > 0 ? ScaleByte(amax, rule) : std::uint8_t{0};
    scales[b] = e;
    const double scale = std::ldexp(1.0, int{e} - 127);
    for (std::size_t i = 0; i < kMxBlock / 2; ++i) {
      const std::uint8_t low = Code(block[2 * i] / scale), high = Code(block[2 * i + 1] / scale);
      codes[b * kMxBlock / 2 + i] = static_cast<std::uint8_t>(low | (high << 4));
    }
  }
}

}  // namespace k3
