// Floats to stored weights: every format that `k3 quantize` writes, and what the rounding costs.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "k3/tensor/weight.h"

namespace k3 {

/// "f32", "bf16", "f16", "mxfp4", "fp8-e4m3", "int8"
std::string_view Name(WeightFormat format);
std::optional<WeightFormat> ParseWeightFormat(std::string_view name);

/// Whether it stores codes with scales, and so fewer values than floats are.
bool HasScales(WeightFormat format);

/// Bytes of the codes (or dense elements) and of the scales of a whole matrix.
std::int64_t CodeBytes(WeightFormat format, std::int64_t rows, std::int64_t cols);
std::int64_t ScaleBytes(WeightFormat format, std::int64_t rows, std::int64_t cols);

/// Whether rows of `cols` values can be stored so: kMxfp4 and kInt8 need a multiple of 32.
bool FitsWidth(WeightFormat format, std::int64_t cols);

/// Rounds a run of rows of finite values to `to` (kBF16, kMxfp4, kFp8 or kInt8). Nearest code, ties
/// to the even one; an all-zero block has codes 0. For kFp8 the run starts at a block's first row
/// and rows % 128 is 0 or the matrix ends there.
///
/// kFp8: scale = the smallest power of two (at least 2^-126, at most 2^119) with amax / scale <=
/// 448; zero blocks 1. Powers of two cost no accuracy, since e4m3 is a float itself, and make
/// decoding exact in f32 and bf16 alike.
/// kInt8: scale = amax / 127 rounded to bf16 (2^-126 to 2^120); zero blocks 1. bf16 instead of f32
/// makes 8.5 bits a weight instead of 9 and keeps code * scale exact in f32; codes are chosen for
/// the rounded scale, so nothing is lost but a 2^-9th of the range.
/// kMxfp4: scales as MxScaleRule::kNoSaturation.
void EncodeRows(WeightFormat to, const float* values, std::int64_t rows, std::int64_t cols,
                std::uint8_t* codes, std::uint8_t* scales);

/// Sums of what rounding changed. Add is for one thread; Merge joins the sums of several.
struct RoundingError {
  double squares = 0;        // of the original values
  double error_squares = 0;  // of the differences
  double max_abs = 0;        // largest difference

  void Add(const float* original, const float* rounded, std::int64_t n);
  void Merge(const RoundingError& other);
  /// |w' - w| / |w|; 0 for a matrix of zeros that stayed one.
  double relative_l2() const;
};

}  // namespace k3
