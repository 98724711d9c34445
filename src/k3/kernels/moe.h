// Mixture of experts: routing and the experts' feed-forward parts. Spec section 9.
#pragma once

#include <cstdint>
#include <span>

#include "k3/kernels/elementwise.h"
#include "k3/tensor/view.h"
#include "k3/tensor/weight.h"

namespace k3 {

/// s = sigmoid or softmax of logits; the k experts with the largest s + bias are chosen (equal
/// values: lower index first); weights are the UNbiased scores, divided by their sum + 1e-20 when
/// `renormalize` and k > 1, times `scale`. With n_group > topk_group, only experts of the
/// topk_group groups whose two best biased scores sum highest take part.
/// Shapes: logits [T, E]; bias [E]; experts and weights [T, k], best first. Golden: route.
/// A NaN logit sorts last and never makes an expert appear twice.
struct RouteArgs {
  CMat logits;
  CVec bias;
  std::int64_t k = 0;
  bool softmax = false;
  bool renormalize = true;
  float scale = 1.f;
  std::int64_t n_group = 1;
  std::int64_t topk_group = 1;
  View<std::int32_t, 2> experts;
  Mat weights;
};

/// Matrices of one expert: y = w2 act(w1 z, w3 z). w1, w3 [inter, width]; w2 [width, inter].
struct ExpertWeights {
  WeightRef w1, w3, w2;
};

/// y[t] = sum_j weights[t, j] * expert_{experts[t, j]}(x[t]), summed over j in order, in f32.
/// Shapes: x, y [T, width], not the same buffer; experts, weights [T, k]. Experts without tokens
/// cost nothing and are not read.
struct ExpertMlpArgs {
  CMat x;
  View<const std::int32_t, 2> experts;
  CMat weights;
  std::span<const ExpertWeights> table;  // all experts of the layer
  GatedActivation act;
  Mat y;
};

}  // namespace k3
