// Products with weight matrices.
#pragma once

#include <span>

#include "k3/base/ids.h"
#include "k3/tensor/view.h"
#include "k3/tensor/weight.h"

namespace k3 {

/// y = x W^T.
/// Shapes: x [T, K] f32; w [N, K] in any WeightFormat, taken as DecodeRow gives it; y [T, N], not
/// x. Exact mode: every y element is one dot product in the order DotOrder of docs/numerics.md, so
/// a row's result is the same for T = 1 and T = 1000. Tolerance against ref: 1e-6 of |x| |w|, the
/// error of 16 interleaved f32 sums. Fast mode may round x and w to bf16 (2^-8
/// relative, a row still independent of its batch), but not with keep_f32: router scores.
struct GemmArgs {
  CMat x;
  WeightRef w;
  Mat y;
  bool keep_f32 = false;
};

/// y[t] = row ids[t] of the table, decoded to f32. ids are valid (the caller checked).
struct EmbedArgs {
  std::span<const TokenId> ids;
  WeightRef table;
  Mat y;
};

}  // namespace k3
