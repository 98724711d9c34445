// Grouped-query attention with optional rotation, query-key norms and output gate.
#pragma once

#include <span>

#include "k3/kernels/exec.h"
#include "k3/layers/config.h"
#include "k3/layers/sequence.h"
#include "k3/tensor/view.h"
#include "k3/tensor/weight.h"

namespace k3 {

/// Tensors of one layer (names: spec section 15.5). Views; the model owns the memory.
struct GqaWeights {
  WeightRef q, k, v, o;  // [N D, H], [G D, H], [G D, H], [H, N D]
  WeightRef g;           // output gate [N D, H], or empty
  CVec q_norm, k_norm;   // [D], or empty
};

/// y = GQA(x) for the packed batch x [T, H]; appends one key row (after norm and rotation) and one
/// value row a token to every sequence's cache.
void GqaForward(const GqaConfig& config, std::int64_t n_heads, float rms_eps, const GqaWeights& w,
                Exec& exec, CMat x, std::span<const SequenceSlice> sequences, Mat y);

}  // namespace k3
