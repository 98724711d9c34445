// Attention residuals: every token mixes the rows its earlier layers left. Spec section 5.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "k3/tensor/view.h"

namespace k3 {

/// s_e = sum_d v_e[d] w[d] / sqrt(mean(v_e^2) + eps);  pi = softmax_e(s);  y = sum_e pi_e v_e.
/// With gamma: y = p + gamma (mix - p), p being the last row.
/// Shapes: rows[e] points to [T, H] dense, banked rows first and the live row p last, at least one;
/// w [H] = norm weight * projection, product in f32; y [T, H] may alias any row.
/// weights, when set, receives pi [T, n_rows]. Golden: attn_res.
struct AttnResArgs {
  std::span<const float* const> rows;
  CVec w;
  float eps = 0.f;
  std::optional<float> gamma;
  Mat y;
  Mat weights;                        // optional: data may be null
  const float* gamma_home = nullptr;  // where gamma lives; not read, a tape needs it
  /// Optional, per banked row [T]: sum_d v_e[d]^2 for later sites. The first `known` were left by
  /// this backend, the others are for it to fill; it may also leave all of them alone, always.
  std::span<float* const> squares = {};
  std::size_t known = 0;
};

constexpr std::int64_t kMaxAttnResRows = 16384;  // 2 * layers + 1 of the largest config we accept

}  // namespace k3
