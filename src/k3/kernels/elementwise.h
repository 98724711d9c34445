// Pointwise ops.
#pragma once

#include <optional>

#include "k3/tensor/view.h"

namespace k3 {

/// The activation of every feed-forward part. Spec section 8.
///   SiTU:   b1 tanh(g / b1) sigmoid(g) * (b2 tanh(u / b2), or u when b2 is absent)
///   SwiGLU: g sigmoid(g) * u
struct GatedActivation {
  bool situ = false;
  float b1 = 0.f;
  std::optional<float> b2;
};

/// y = act(gate, up). Shapes: gate, up, y [T, D]; y may be gate or up. SiTU is finite for every
/// finite input. Golden: situ.
struct GatedActArgs {
  CMat gate;
  CMat up;
  GatedActivation act;
  Mat y;
};

/// y = a + b. Shapes [T, D]; y may be a or b.
struct AddArgs {
  CMat a;
  CMat b;
  Mat y;
};

/// y = sigmoid(x). Shapes [T, D]; y may be x.
struct SigmoidArgs {
  CMat x;
  Mat y;
};

/// y = x * sigmoid(gate). Shapes [T, D]; y may be x. The MLA output gate (spec section 7, step 5).
struct SigmoidGateArgs {
  CMat x;
  CMat gate;
  Mat y;
};

}  // namespace k3
