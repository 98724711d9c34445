// Depthwise causal convolution followed by SiLU, over a packed batch of sequences.
#pragma once

#include <span>

#include "k3/tensor/view.h"

namespace k3 {

/// Rows [begin, begin + count) of a packed batch belong to one sequence; they may be none.
struct SequenceRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

/// y_t[c] = silu(sum_j w[c, j] x_{t - k + 1 + j}[c]): tap k-1 multiplies the current token.
/// Shapes: x, y [T, P], not the same buffer; w [P, k]. histories[s] points to [k - 1, P], the
/// pre-convolution rows before the sequence (oldest first), replaced by its last k - 1 rows.
/// Spec section 6, step 1. Golden: short_conv.
struct ShortConvArgs {
  CMat x;
  CMat w;
  std::span<const SequenceRange> sequences;
  std::span<float* const> histories;
  Mat y;
};

}  // namespace k3
