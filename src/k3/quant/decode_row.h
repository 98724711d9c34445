// Stored weights back to floats: the reference for every kernel that decodes.
#pragma once

#include <cstdint>

#include "k3/tensor/weight.h"

namespace k3 {

/// Decodes row `row` of a matrix in any format to w.cols floats. Exact, but for kFp8 with a scale
/// that is no power of two: there code * scale is rounded once, as an f32 product. NaN codes of
/// e4m3 and E8M0 give NaN.
void DecodeRow(const WeightRef& w, std::int64_t row, float* out);

}  // namespace k3
