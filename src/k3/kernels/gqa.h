// Grouped-query attention and rotary positions. Spec section 15.5.
#pragma once

#include <span>

#include "k3/tensor/view.h"

namespace k3 {

/// One sequence's share: queries are rows [begin, begin + count) of the batch; they attend causally
/// to n_rows cached keys and values, the last `count` of which are their own.
struct GqaSequence {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::span<const float* const> key_pages, value_pages;  // of page_rows rows each
  std::int64_t n_rows = 0;
};

/// o_h = softmax(q_h . k_{h G / N} D^-1/2) v_{h G / N}, causal: query head h of N reads key head
/// floor(h G / N) of G. Shapes: q, o [T, N * D]; a cached key or value row [G * D].
struct GqaArgs {
  CMat q;
  std::int64_t n_heads = 0;     // N
  std::int64_t n_kv_heads = 0;  // G, divides N
  std::int64_t page_rows = 0;
  std::span<const GqaSequence> sequences;
  Mat o;

  std::int64_t head_dim() const { return q.dim(1) / n_heads; }
};

/// Rotates every head of x [T, heads * head_dim] in place. Row t is at absolute position
/// positions[t]; for d < D / 2 with angle phi = t theta^(-2d/D):
///   (x_d, x_{d+D/2}) -> (x_d cos phi - x_{d+D/2} sin phi, x_{d+D/2} cos phi + x_d sin phi)
/// Angles are taken in float64: at a million tokens an f32 angle would be off by a twentieth.
struct RopeArgs {
  Mat x;
  std::int64_t head_dim = 0;  // even
  double theta = 10000.0;
  std::span<const std::int64_t> positions;
};

}  // namespace k3
