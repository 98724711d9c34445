// Element types as the safetensors format names them.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

namespace k3 {

enum class DType : std::uint8_t { kF32, kBF16, kF16, kU8, kI32, kI64, kF8E8M0, kF8E4M3, kI8 };

constexpr int SizeOf(DType t) {
  switch (t) {
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kU8:
    case DType::kF8E8M0:
    case DType::kF8E4M3:
    case DType::kI8:
      return 1;
  }
  return 0;
}

std::string_view Name(DType t);                          // "BF16"
std::optional<DType> ParseDType(std::string_view name);  // nullopt when unknown

/// bf16 and f16 are storage only: 16 raw bits, decoded to f32 before any arithmetic.
struct BF16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

inline float ToFloat(BF16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

/// Round to nearest, ties to even; NaN stays NaN.
inline BF16 ToBF16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16)};
}

/// The nearest number that bf16 holds.
inline float RoundToBF16(float x) { return ToFloat(ToBF16(x)); }

float ToFloat(F16 x);

/// Eight-bit floats of the OCP standard: sign, four exponent bits of bias 7, three mantissa bits,
/// no infinities. Magnitude 0x7F is NaN; the largest number is 448, the smallest 2^-9.
struct F8E4M3 {
  std::uint8_t bits;
};

float ToFloat(F8E4M3 x);

/// Round to nearest, ties to the even code. What rounds to more than 448 becomes 448, NaN stays
/// NaN.
F8E4M3 ToF8E4M3(float x);

}  // namespace k3
