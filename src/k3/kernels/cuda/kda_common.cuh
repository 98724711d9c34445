// What the KDA kernels share: their parameters and the arithmetic of gate and norms.
#pragma once

#include "k3/kernels/cuda/hopper.cuh"

namespace k3::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNormEps = 1e-6f;
constexpr int kChunk = 32;  // tokens a chunk of the bounded path

struct KdaParams {
  const bf16 *q, *k, *v, *f, *beta;
  int64_t q_row, k_row, v_row, f_row, beta_row, o_row;
  const float *a_log, *dt_bias;
  const float* s_in;    // null: zeros
  float* s_out;         // null: not kept
  float* token_states;  // null: not kept
  uint4* dump;          // states at chunk borders, for the backward pass
  bf16* o;
  const int* cu;  // null: one sequence
  int n_sequences, n_heads;
  int64_t n_tokens;
  float lower_bound, scale;
};

/// Rows [begin, begin + count) of one sequence. Values outside the batch are clamped.
struct Rows {
  int64_t begin;
  int count;
};
__device__ __forceinline__ Rows SequenceRows(const int* cu, int64_t n_tokens, int s) {
  if (cu == nullptr) return {0, static_cast<int>(n_tokens)};
  const int64_t begin = min(max(static_cast<int64_t>(cu[s]), int64_t{0}), n_tokens);
  const int64_t end = min(max(static_cast<int64_t>(cu[s + 1]), begin), n_tokens);
  return {begin, static_cast<int>(end - begin)};
}

__device__ __forceinline__ float Sigmoid(float x) { return Reciprocal(1.f + __expf(-x)); }

/// Natural-log decay of one channel; `a` = exp(a_log).
__device__ __forceinline__ float LogDecay(float f, float bias, float a, float lower_bound) {
  const float z = f + bias;
  if (lower_bound < 0.f) return lower_bound / (1.f + __expf(-a * z));
  return -a * (z > 20.f ? z : log1pf(__expf(z)));
}

__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

}  // namespace k3::cuda
