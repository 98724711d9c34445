// Kimi Delta Attention: projections, short convolution, decay, recurrence, gated output norm.
#pragma once

#include <span>

#include "k3/kernels/exec.h"
#include "k3/layers/config.h"
#include "k3/layers/sequence.h"
#include "k3/tensor/view.h"
#include "k3/tensor/weight.h"

namespace k3 {

/// Tensors of one layer (names: spec section 14). Views; the model owns the memory.
struct KdaWeights {
  WeightRef q, k, v, o;         // [P, H] and [H, P], P = n_heads * head_dim
  CMat conv_q, conv_k, conv_v;  // [P, kernel]
  WeightRef f_a, f_b;           // decay: [K, H], [P, K]
  CVec dt_bias, a_log;          // [P], [N]
  WeightRef b;                  // [N, H]
  WeightRef g;                  // full-rank output gate [P, H], or empty
  WeightRef g_a, g_b;           // low-rank output gate [K, H], [P, K], or empty
  CVec o_norm;                  // [K]
};

/// y = KDA(x) for the packed batch x [T, H]; advances the KDA cache of every sequence.
/// Exact mode recurs token by token; fast mode uses 16-token chunks for the chunks that lie whole
/// inside a run (SplitOnGrid). Spec section 6. `log_decay`, when set, receives the logarithms of
/// the gates [T, P]; they live in the scratch until the caller's mark.
void KdaForward(const KdaConfig& config, float rms_eps, const KdaWeights& w, Exec& exec, CMat x,
                std::span<const SequenceSlice> sequences, Mat y, CMat* log_decay = nullptr);

}  // namespace k3
