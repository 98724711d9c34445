#include "k3/quant/encode.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include "k3/base/check.h"
#include "k3/quant/mxfp4.h"
#include "k3/tensor/dtype.h"

namespace k3 {
namespace {

constexpr std::array<std::pair<WeightFormat, std::string_view>, 6> kNames{
    {{WeightFormat::kF32, "f32"},
     {WeightFormat::kBF16, "bf16"},
     {WeightFormat::kF16, "f16"},
     {WeightFormat::kMxfp4, "mxfp4"},
     {WeightFormat::kFp8, "fp8-e4m3"},
     {WeightFormat::kInt8, "int8"}}};

template <class T>
void Store(std::uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

float LargestOf(const float* p, std::int64_t n, float so_far = 0) {
  for (std::int64_t i = 0; i < n; ++i) so_far = std::max(so_far, std::abs(p[i]));
  return so_far;
}

float Fp8Scale(float amax) {
  if (amax == 0) return 1;
  int e = 0;
  const float m = std::frexp(amax, &e);  // amax = m 2^e, m in [0.5, 1); 448 = 0.875 2^9
  const int power = m <= 0.875f ? e - 9 : e - 8;
  return std::ldexp(1.f, std::clamp(power, -126, 119));
}

void EncodeFp8(const float* values, std::int64_t rows, std::int64_t cols, std::uint8_t* codes,
               std::uint8_t* scales) {
  for (std::int64_t r0 = 0; r0 < rows; r0 += kFp8Block) {
    const std::int64_t r1 = std::min(rows, r0 + kFp8Block);
    for (std::int64_t c0 = 0; c0 < cols; c0 += kFp8Block, scales += 4) {
      const std::int64_t n = std::min(kFp8Block, cols - c0);
      float amax = 0;
      for (std::int64_t r = r0; r < r1; ++r) amax = LargestOf(values + r * cols + c0, n, amax);
      const float scale = Fp8Scale(amax), inverse = 1 / scale;
      Store(scales, scale);
      for (std::int64_t r = r0; r < r1; ++r) {
        const std::int64_t at = r * cols + c0;
        for (std::int64_t i = 0; i < n; ++i) {
          codes[at + i] = ToF8E4M3(values[at + i] * inverse).bits;
        }
      }
    }
  }
}

void EncodeInt8(const float* values, std::int64_t n, std::uint8_t* codes, std::uint8_t* scales) {
  for (std::int64_t b = 0; b < n; b += kInt8Block, scales += 2) {
    const float amax = LargestOf(values + b, kInt8Block);
    const BF16 scale = ToBF16(amax == 0 ? 1.f : std::clamp(amax / 127, 0x1p-126f, 0x1p120f));
    Store(scales, scale);
    const double step = ToFloat(scale);
    for (std::int64_t i = b; i < b + kInt8Block; ++i) {
      const double code = std::clamp(std::nearbyint(values[i] / step), -127.0, 127.0);
      codes[i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(code));
    }
  }
}

}  // namespace

std::string_view Name(WeightFormat format) {
  for (const auto& [f, name] : kNames) {
    if (f == format) return name;
  }
  return "?";
}

std::optional<WeightFormat> ParseWeightFormat(std::string_view name) {
  for (const auto& [f, n] : kNames) {
    if (n == name) return f;
  }
  return std::nullopt;
}

bool HasScales(WeightFormat format) {
  return format == WeightFormat::kMxfp4 || format == WeightFormat::kFp8 ||
         format == WeightFormat::kInt8;
}

std::int64_t CodeBytes(WeightFormat format, std::int64_t rows, std::int64_t cols) {
  const WeightRef w{format, rows, cols, nullptr, nullptr, 0};
  return w.bytes() - ScaleBytes(format, rows, cols);
}

std::int64_t ScaleBytes(WeightFormat format, std::int64_t rows, std::int64_t cols) {
  switch (format) {
    case WeightFormat::kMxfp4:
      return rows * cols / kMxBlock;
    case WeightFormat::kFp8:
      return 4 * ((rows + kFp8Block - 1) / kFp8Block) * ((cols + kFp8Block - 1) / kFp8Block);
    case WeightFormat::kInt8:
      return 2 * (rows * cols / kInt8Block);
    default:
      return 0;
  }
}

bool FitsWidth(WeightFormat format, std::int64_t cols) {
  const bool blocks = format == WeightFormat::kMxfp4 || format == WeightFormat::kInt8;
  return !blocks || cols % 32 == 0;
}

void EncodeRows(WeightFormat to, const float* values, std::int64_t rows, std::int64_t cols,
                std::uint8_t* codes, std::uint8_t* scales) {
  K3_CHECK(FitsWidth(to, cols), "the caller checks widths");
  const std::int64_t n = rows * cols;
  switch (to) {
    case WeightFormat::kBF16:
      for (std::int64_t i = 0; i < n; ++i) Store(codes + 2 * i, ToBF16(values[i]));
      return;
    case WeightFormat::kMxfp4:
      return PackMxfp4({values, static_cast<std::size_t>(n)}, MxScaleRule::kNoSaturation, codes,
                       scales);
    case WeightFormat::kFp8:
      return EncodeFp8(values, rows, cols, codes, scales);
    case WeightFormat::kInt8:
      return EncodeInt8(values, n, codes, scales);
    default:
      K3_CHECK(false, "no encoder for this format");
  }
}

void RoundingError::Add(const float* original, const float* rounded, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const double w = original[i], d = static_cast<double>(rounded[i]) - w;
    squares += w * w;
    error_squares += d * d;
    max_abs = std::max(max_abs, std::abs(d));
  }
}

void RoundingError::Merge(const RoundingError& other) {
  squares += other.squares;
  error_squares += other.error_squares;
  max_abs = std::max(max_abs, other.max_abs);
}

double RoundingError::relative_l2() const {
  if (squares > 0) return std::sqrt(error_squares / squares);
  return error_squares > 0 ? std::numeric_limits<double>::infinity() : 0.0;
}

}  // namespace k3
