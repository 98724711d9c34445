#include "k3/tensor/dtype.h"

#include <array>
#include <cmath>
#include <utility>

namespace k3 {
namespace {
constexpr std::array<std::pair<DType, std::string_view>, 9> kNames{{{DType::kF32, "F32"},
                                                                    {DType::kBF16, "BF16"},
                                                                    {DType::kF16, "F16"},
                                                                    {DType::kU8, "U8"},
                                                                    {DType::kI32, "I32"},
                                                                    {DType::kI64, "I64"},
                                                                    {DType::kF8E8M0, "F8_E8M0"},
                                                                    {DType::kF8E4M3, "F8_E4M3"},
                                                                    {DType::kI8, "I8"}}};
}  // namespace

std::string_view Name(DType t) {
  for (const auto& [type, name] : kNames) {
    if (type == t) return name;
  }
  return "?";
}

std::optional<DType> ParseDType(std::string_view name) {
  for (const auto& [type, n] : kNames) {
    if (n == name) return type;
  }
  return std::nullopt;
}

float ToFloat(F16 x) {
  const std::uint32_t sign = std::uint32_t{x.bits} >> 15 << 31;
  const std::uint32_t exponent = (x.bits >> 10) & 31u;
  const std::uint32_t mantissa = x.bits & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
    const float v = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -v : v;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

float ToFloat(F8E4M3 x) {
  const std::uint32_t sign = std::uint32_t{x.bits} >> 7 << 31, magnitude = x.bits & 127u;
  if (magnitude == 127) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (magnitude < 8) {  // zero and subnormals: mantissa * 2^-9
    const float v = static_cast<float>(magnitude) * 0x1p-9f;
    return sign ? -v : v;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

F8E4M3 ToF8E4M3(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x), magnitude = u & 0x7FFFFFFFu;
  const std::uint32_t sign = u >> 31 << 7;
  std::uint32_t code = 0;
  if (magnitude > 0x7F800000u) {
    code = 127;
  } else if (magnitude < std::bit_cast<std::uint32_t>(0x1p-6f)) {
    // Adding 2^14 leaves a unit of 2^-9 and rounds to even; 8 units are the first normal code.
    const float sum = std::bit_cast<float>(magnitude) + 0x1p14f;
    code = std::bit_cast<std::uint32_t>(sum) - std::bit_cast<std::uint32_t>(0x1p14f);
  } else {
    const std::uint32_t rounded = (magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20;
    code = rounded - (120u << 3);
    if (code > 126) code = 126;
  }
  return {static_cast<std::uint8_t>(sign | code)};
}

}  // namespace k3
