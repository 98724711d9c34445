// Gated multi-head latent attention without rotation.
#pragma once

#include <span>

#include "k3/kernels/exec.h"
#include "k3/layers/config.h"
#include "k3/layers/sequence.h"
#include "k3/tensor/view.h"
#include "k3/tensor/weight.h"

namespace k3 {

/// Tensors of one layer (names: spec section 14). Views; the model owns the memory.
struct MlaWeights {
  WeightRef q;         // direct [N * (nope + rope), H], or empty
  WeightRef q_a, q_b;  // low rank [q_rank, H], [N * (nope + rope), q_rank], or empty
  CVec q_a_norm;       // [q_rank]
  WeightRef kv_a;      // [kv_rank + rope, H]
  CVec kv_a_norm;      // [kv_rank]
  WeightRef kv_b;      // [N * (nope + v), kv_rank]
  WeightRef g;         // output gate [N * v, H], or empty
  WeightRef o;         // [H, N * v]
};

/// y = MLA(x) for the packed batch x [T, H]; appends one row a token to every sequence's cache.
/// Exact mode always absorbs; fast mode expands keys for whole grid cells. Spec section 7.
void MlaForward(const MlaConfig& config, std::int64_t n_heads, const MlaWeights& w, Exec& exec,
                CMat x, std::span<const SequenceSlice> sequences, Mat y);

}  // namespace k3
