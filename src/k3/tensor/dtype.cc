#include "k3/tensor/dtype.h"

#include <array>
#include <cmath>
#include <utility>

namespace k3 {
namespace {
constexpr std::array<std::pair<DType, std::string_view>, 7> kNames{{{DType::kF32, "F32"},
                                                                    {DType::kBF16, "BF16"},
                                                                    {DType::kF16, "F16"},
                                                                    {DType::kU8, "U8"},
                                                                    {DType::kI32, "I32"},
                                                                    {DType::kI64, "I64"},
                                                                    {DType::kF8E8M0, "F8_E8M0"}}};
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

}  // namespace k3
