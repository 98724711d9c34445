// Normalisations. Statistics in f32 or better; eps placement differs and matters (spec section 3).
#pragma once

#include "k3/tensor/view.h"

namespace k3 {

/// y = w * x / sqrt(mean(x^2) + eps), over the last dimension.
/// Shapes: x, y [T, D]; w [D]. y may be x. Spec section 3. Golden: modules rms_norm.
struct RmsNormArgs {
  CMat x;
  CVec w;
  float eps = 0.f;
  Mat y;
};

/// y = w * x / sqrt(mean_V(x^2) + eps) * sigmoid(gate), for every head.
/// Shapes: x, gate, y [T, N * V]; w [V], shared by the heads. y may be x. Spec section 6, step 6:
/// here x is small (near sqrt(eps) at the start of a sequence), so eps and scale are visible.
struct GatedRmsNormArgs {
  CMat x;
  CMat gate;
  CVec w;
  float eps = 0.f;
  Mat y;
};

/// y = x / sqrt(sum(x^2) + eps) for every head: eps is added to the SUM. Zero rows give zeros.
/// Shapes: x, y [T, N * K]; head_dim = K. y may be x. Spec section 3 (D3). Golden: l2_norm.
struct L2NormArgs {
  CMat x;
  std::int64_t head_dim = 0;
  float eps = 1e-6f;
  Mat y;
};

}  // namespace k3
