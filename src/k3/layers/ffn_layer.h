// Feed-forward parts: dense, and the mixture of experts in a latent or at full width.
#pragma once

#include <span>
#include <vector>

#include "k3/kernels/exec.h"
#include "k3/layers/config.h"
#include "k3/tensor/view.h"
#include "k3/tensor/weight.h"

namespace k3 {

/// y = down(act(gate x, up x)); gate, up [inter, H], down [H, inter].
struct DenseWeights {
  WeightRef gate, up, down;
};
void DenseForward(const GatedActivation& act, const DenseWeights& w, Exec& exec, CMat x, Mat y);

/// Tensors of one mixture (names: spec sections 14 and 15.5). Views; the model owns the memory.
struct MoeWeights {
  WeightRef router;          // [E, router input width]
  CVec router_bias;          // [E], e_score_correction_bias
  WeightRef router_encoder;  // [encoder_dim, H], only with RouterSpace::kEncoder
  WeightRef latent_down;     // [latent, H], or empty: experts work at the hidden width
  WeightRef latent_up;       // [H, latent], or empty
  CVec latent_norm;          // [latent], or empty
  DenseWeights shared;       // or empty
  std::vector<ExpertWeights> experts;
};

/// Which experts the tokens took; filled when asked for.
struct RoutingTrace {
  View<std::int32_t, 2> experts;  // [T, k], in the pass's workspace
  Mat weights;                    // [T, k]
};

/// y = up(norm(sum of chosen experts)) + shared(x) for x [T, H]. Spec section 9; router in the
/// hidden state, the latent or an encoder (15.5).
void MoeForward(const MoeConfig& config, const GatedActivation& act, float rms_eps,
                const MoeWeights& w, Exec& exec, CMat x, Mat y, RoutingTrace* trace);

}  // namespace k3
