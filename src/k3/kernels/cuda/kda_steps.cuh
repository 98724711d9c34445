// One step of the state with its part of a token: a block of a few value columns with the state in
// registers, or a block a head with the state in shared memory.
#pragma once

#include "k3/kernels/cuda/kda_token.cuh"

namespace k3::cuda {

/// A block owns kD / kSplit value columns of a head; a thread four columns of kRows key rows; a
/// warp covers kLaneRows rows at once. Warps meet once a token, to add their parts of S'^T k and
/// S'^T q: o = S'^T q + u (k . q) needs no second pass over the state.
template <int kD, int kSplit, int kWarps>
struct Shape {
  static constexpr int kColumns = kD / kSplit, kLaneColumns = kColumns / 4;
  static constexpr int kLaneRows = 32 / kLaneColumns, kRows = kD / (kWarps * kLaneRows);
  static constexpr int kWarpRows = kD / kWarps;
  struct Shared {
    float partial[2][kWarps][2][kColumns];
    float terms[kWarps][3][kWarpRows];
  };
};

/// Updates S by a token and calls emit(o) with the lane's four columns of S^T q; all lanes have
/// their columns' sums.
template <int kD, int kSplit, int kWarps, class Terms, class Emit>
__device__ __forceinline__ void Step(float4 v, const Terms& terms, int parity,
                                     typename Shape<kD, kSplit, kWarps>::Shared& shared,
                                     float4 (&S)[Shape<kD, kSplit, kWarps>::kRows], Emit&& emit) {
  using Sh = Shape<kD, kSplit, kWarps>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = lane / Sh::kLaneColumns * Sh::kRows, at = 4 * (lane % Sh::kLaneColumns);
  float pk[4] = {0, 0, 0, 0}, pq[4] = {0, 0, 0, 0};
#pragma unroll
  for (int r = 0; r < Sh::kRows; ++r) {
    const float e = shared.terms[warp][0][first + r], k = shared.terms[warp][1][first + r],
                q = shared.terms[warp][2][first + r];
    S[r].x *= e, S[r].y *= e, S[r].z *= e, S[r].w *= e;
    pk[0] += S[r].x * k, pk[1] += S[r].y * k, pk[2] += S[r].z * k, pk[3] += S[r].w * k;
    pq[0] += S[r].x * q, pq[1] += S[r].y * q, pq[2] += S[r].z * q, pq[3] += S[r].w * q;
  }
#pragma unroll
  for (int mask = Sh::kLaneColumns; mask < 32; mask <<= 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pk[i] += __shfl_xor_sync(~0u, pk[i], mask);
      pq[i] += __shfl_xor_sync(~0u, pq[i], mask);
    }
  }
  auto& partial = shared.partial[parity];
  if (lane < Sh::kLaneColumns) {
    *reinterpret_cast<float4*>(&partial[warp][0][at]) = make_float4(pk[0], pk[1], pk[2], pk[3]);
    *reinterpret_cast<float4*>(&partial[warp][1][at]) = make_float4(pq[0], pq[1], pq[2], pq[3]);
  }
  __syncthreads();
  float4 sk = make_float4(0, 0, 0, 0), sq = sk;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float4 y = *reinterpret_cast<const float4*>(&partial[w][0][at]);
    const float4 z = *reinterpret_cast<const float4*>(&partial[w][1][at]);
    sk.x += y.x, sk.y += y.y, sk.z += y.z, sk.w += y.w;
    sq.x += z.x, sq.y += z.y, sq.z += z.z, sq.w += z.w;
  }
  const float4 u = make_float4(terms.beta * (v.x - sk.x), terms.beta * (v.y - sk.y),
                               terms.beta * (v.z - sk.z), terms.beta * (v.w - sk.w));
  emit(make_float4(sq.x + u.x * terms.kq, sq.y + u.y * terms.kq, sq.z + u.z * terms.kq,
                   sq.w + u.w * terms.kq));
#pragma unroll
  for (int r = 0; r < Sh::kRows; ++r) {
    const float k = shared.terms[warp][1][first + r];
    S[r].x += u.x * k, S[r].y += u.y * k, S[r].z += u.z * k, S[r].w += u.w * k;
  }
}

// Many states: a block a head, three blocks an SM. The state comes by one bulk copy into shared
// memory and is read there twice, for the two sums and for the update, so that no registers hold
// it; it leaves by streaming stores.
constexpr int kHeadWarps = 8, kHeadRows = 128 / kHeadWarps;
constexpr int kStateBytes = 128 * 128 * 4, kHeadDynamic = kStateBytes + 128;

struct HeadShared {
  alignas(16) float terms[kHeadWarps][3][kHeadRows];
  union {  // a staged token has been read before the sums are written: there is no room for both
    float partial[kHeadWarps][2][128];
    TokenRows<128, 128> rows;
  };
  uint64_t barrier;
};

/// Adds all warps' parts of one of the two sums.
__device__ __forceinline__ float4 SumParts(const HeadShared& shared, int which, int column) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int w = 0; w < kHeadWarps; ++w) {
    const float4 x = *reinterpret_cast<const float4*>(&shared.partial[w][which][column]);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  return sum;
}

/// One token. `state` is the lane's place in shared memory, `to` where the new state goes or null:
/// back to shared memory. Warp 0 calls emit(o) with the lane's four columns.
template <class Emit>
__device__ __forceinline__ void HeadStep(const KdaParams& p, float4 v, const TokenTerms<128>& terms,
                                         int64_t token, int head, uint32_t state, float* to,
                                         HeadShared& shared, Emit&& emit) {
  const int warp = threadIdx.x / 32, column = 4 * (threadIdx.x % 32);
  const auto& row = shared.terms[warp];  // decay, k, q
  float pk[4] = {0, 0, 0, 0}, pq[4] = {0, 0, 0, 0};
#pragma unroll
  for (int r = 0; r < kHeadRows; ++r) {
    const float4 s = LoadF4(state + r * 512);
    const float k = row[0][r] * row[1][r], q = row[0][r] * row[2][r];
    pk[0] += s.x * k, pk[1] += s.y * k, pk[2] += s.z * k, pk[3] += s.w * k;
    pq[0] += s.x * q, pq[1] += s.y * q, pq[2] += s.z * q, pq[3] += s.w * q;
  }
  auto& mine = shared.partial[warp];
  *reinterpret_cast<float4*>(&mine[0][column]) = make_float4(pk[0], pk[1], pk[2], pk[3]);
  *reinterpret_cast<float4*>(&mine[1][column]) = make_float4(pq[0], pq[1], pq[2], pq[3]);
  __syncthreads();
  const float4 sk = SumParts(shared, 0, column);
  const float u[4] = {terms.beta * (v.x - sk.x), terms.beta * (v.y - sk.y),
                      terms.beta * (v.z - sk.z), terms.beta * (v.w - sk.w)};
  float* kept =
      p.token_states == nullptr
          ? nullptr
          : p.token_states + ((token * p.n_heads + head) * 128 + warp * kHeadRows) * 128 + column;
#pragma unroll
  for (int r = 0; r < kHeadRows; ++r) {
    float4 s = LoadF4(state + r * 512);
    const float e = row[0][r], k = row[1][r];
    s.x = s.x * e + u[0] * k, s.y = s.y * e + u[1] * k;
    s.z = s.z * e + u[2] * k, s.w = s.w * e + u[3] * k;
    if (to) {
      __stcs(reinterpret_cast<float4*>(to + r * 128), s);
    } else {
      StoreF4(state + r * 512, s);
    }
    if (kept) __stcs(reinterpret_cast<float4*>(kept + r * 128), s);
  }
  if (warp == 0) {
    const float4 sq = SumParts(shared, 1, column);
    emit(make_float4(sq.x + u[0] * terms.kq, sq.y + u[1] * terms.kq, sq.z + u[2] * terms.kq,
                     sq.w + u[3] * terms.kq));
  }
}

}  // namespace k3::cuda
