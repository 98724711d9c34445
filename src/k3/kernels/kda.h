// Kimi Delta Attention: decay gate, token recurrence, chunkwise form. Spec section 6.
#pragma once

#include <optional>
#include <span>

#include "k3/kernels/short_conv.h"
#include "k3/tensor/view.h"

namespace k3 {

/// Log decay g of every key channel, from the low-rank projection f.
///   z = f + dt_bias
///   bounded:  g = lower_bound * sigmoid(exp(a_log[n]) z), in [lower_bound, 0]
///   softplus: g = -exp(a_log[n]) softplus(z), in (-inf, 0]
/// The bounded form is another function, not a clamp of the softplus one.
/// Shapes: f, g [T, N * K]; dt_bias [N * K]; a_log [N]. g may be f. Golden: kda_gate.
struct KdaGateArgs {
  CMat f;
  CVec dt_bias;
  CVec a_log;
  std::optional<float> lower_bound;  // set: bounded form
  Mat g;
};

/// Delta-rule recurrence with per-channel decay, for every head and sequence:
///   S' = diag(exp(g_t)) S;  u = beta_t (v_t - S'^T k_t);  S = S' + k_t u^T;  o_t = S^T (scale q_t)
/// Shapes: q, k, g [T, N * K], q and k L2-normalised; v, o [T, N * V]; beta [T, N];
/// states[s] points to [N, K, V] f32, read as the initial and left as the final state.
/// KdaRecurrent runs token by token: a sequence's result does not depend on how it is cut.
/// KdaChunk is the chunkwise matrix form (spec section 6.1) with chunks of `chunk` tokens counted
/// from the start of each range; equal in exact arithmetic. `lower_bound` set promises
/// g >= lower_bound and allows the factored form; without it any g <= 0 is handled.
/// No sequence, and an empty sequence, leave states as they are. Golden: kda_bounded, kda_softplus.
/// Tolerance: 1e-5 relative for the recurrence, 1e-4 for f32 chunks (golden.json).
struct KdaArgs {
  CMat q, k, v, g;
  CMat beta;
  std::int64_t n_heads = 0;
  float scale = 1.f;
  std::span<const SequenceRange> sequences;
  std::span<float* const> states;
  Mat o;

  std::int64_t chunk = 16;           // KdaChunk only
  std::optional<float> lower_bound;  // KdaChunk only

  std::int64_t key_dim() const { return q.dim(1) / n_heads; }
  std::int64_t value_dim() const { return v.dim(1) / n_heads; }
};

}  // namespace k3
