// KDA token by token with the state in registers: decode, and any length when no chunk form fits.
#include "k3/kernels/cuda/kda_recurrent.cuh"

namespace k3::cuda {
namespace {

/// One lane's share of a token's inputs, loaded one token ahead.
template <int kD>
struct TokenInputs {
  static constexpr int kPer = kD / 32;  // channels a lane: 2 or 4
  uint32_t q[kPer / 2], k[kPer / 2], f[kPer / 2];
  uint2 v;
  float logit;

  __device__ __forceinline__ void Load(const KdaParams& p, int64_t t, int head, int lane,
                                       int column) {
    const int64_t at = head * kD + lane * kPer;
#pragma unroll
    for (int i = 0; i < kPer / 2; ++i) {
      q[i] = *reinterpret_cast<const uint32_t*>(p.q + t * p.q_row + at + 2 * i);
      k[i] = *reinterpret_cast<const uint32_t*>(p.k + t * p.k_row + at + 2 * i);
      f[i] = *reinterpret_cast<const uint32_t*>(p.f + t * p.f_row + at + 2 * i);
    }
    v = *reinterpret_cast<const uint2*>(p.v + t * p.v_row + head * kD + column);
    logit = __bfloat162float(p.beta[t * p.beta_row + head]);
  }
};

/// A token's coefficients for the key rows of one warp, and what all lanes need.
template <int kD>
struct TokenTerms {
  static constexpr int kPer = kD / 32;
  float beta, kq;  // kq = k . q

  /// Writes decay, k and q of rows [row0, row0 + rows) to `to` [3][rows]. Called by a whole warp.
  __device__ __forceinline__ TokenTerms(const KdaParams& p, const TokenInputs<kD>& x,
                                        const float (&bias)[kPer], float a, int row0, int rows,
                                        float* to, int lane)
      : beta(Sigmoid(x.logit)) {
    float q[kPer], k[kPer], decay[kPer], qq = 0, kk = 0;
    kq = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      q[i] = i % 2 ? High(x.q[i / 2]) : Low(x.q[i / 2]);
      k[i] = i % 2 ? High(x.k[i / 2]) : Low(x.k[i / 2]);
      decay[i] =
          __expf(LogDecay(i % 2 ? High(x.f[i / 2]) : Low(x.f[i / 2]), bias[i], a, p.lower_bound));
      qq += q[i] * q[i], kk += k[i] * k[i], kq += q[i] * k[i];
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      qq += __shfl_xor_sync(~0u, qq, mask);
      kk += __shfl_xor_sync(~0u, kk, mask);
      kq += __shfl_xor_sync(~0u, kq, mask);
    }
    const float q_norm = rsqrtf(qq + kNormEps) * p.scale, k_norm = rsqrtf(kk + kNormEps);
    kq *= q_norm * k_norm;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int row = lane * kPer + i - row0;
      if (row >= 0 && row < rows) {
        to[row] = decay[i], to[rows + row] = k[i] * k_norm, to[2 * rows + row] = q[i] * q_norm;
      }
    }
    __syncwarp();
  }
};

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

template <int kD, int kSplit, int kWarps>
__device__ __forceinline__ void Step(const KdaParams& p, const TokenInputs<kD>& x,
                                     const TokenTerms<kD>& terms, int64_t token, int head,
                                     int column, int parity,
                                     typename Shape<kD, kSplit, kWarps>::Shared& shared,
                                     float4 (&S)[Shape<kD, kSplit, kWarps>::kRows]) {
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
  const float4 u = make_float4(terms.beta * (Low(x.v.x) - sk.x), terms.beta * (High(x.v.x) - sk.y),
                               terms.beta * (Low(x.v.y) - sk.z), terms.beta * (High(x.v.y) - sk.w));
#pragma unroll
  for (int r = 0; r < Sh::kRows; ++r) {
    const float k = shared.terms[warp][1][first + r];
    S[r].x += u.x * k, S[r].y += u.y * k, S[r].z += u.z * k, S[r].w += u.w * k;
  }
  if (threadIdx.x < Sh::kLaneColumns) {
    *reinterpret_cast<uint2*>(p.o + token * p.o_row + head * kD + column) = {
        PackBf16(sq.x + u.x * terms.kq, sq.y + u.y * terms.kq),
        PackBf16(sq.z + u.z * terms.kq, sq.w + u.w * terms.kq)};
  }
  if (p.token_states) {
    float* to = p.token_states + (token * p.n_heads + head) * kD * kD +
                (warp * Sh::kWarpRows + first) * kD + column;
#pragma unroll
    for (int r = 0; r < Sh::kRows; ++r) __stcs(reinterpret_cast<float4*>(to + r * kD), S[r]);
  }
}

template <int kD, int kSplit, int kWarps, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) RecurrentKernel(const KdaParams p) {
  using Sh = Shape<kD, kSplit, kWarps>;
  constexpr int kPer = kD / 32;
  __shared__ typename Sh::Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = blockIdx.x % kSplit, pair = blockIdx.x / kSplit;
  const int head = pair % p.n_heads, sequence = pair / p.n_heads;
  const Rows rows = SequenceRows(p.cu, p.n_tokens, sequence);
  const int column = part * Sh::kColumns + 4 * (lane % Sh::kLaneColumns);
  const int row0 = warp * Sh::kWarpRows, first = row0 + lane / Sh::kLaneColumns * Sh::kRows;
  const int64_t state_at = static_cast<int64_t>(pair) * kD * kD + first * kD + column;
  float4 S[Sh::kRows];
#pragma unroll
  for (int r = 0; r < Sh::kRows; ++r) {
    S[r] = p.s_in ? __ldcs(reinterpret_cast<const float4*>(p.s_in + state_at + r * kD))
                  : make_float4(0, 0, 0, 0);
  }
  const float a = __expf(p.a_log[head]);
  float bias[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) bias[i] = p.dt_bias[head * kD + lane * kPer + i];

  TokenInputs<kD> next;
  if (rows.count > 0) next.Load(p, rows.begin, head, lane, column);
  for (int t = 0; t < rows.count; ++t) {
    const TokenInputs<kD> x = next;
    if (t + 1 < rows.count) next.Load(p, rows.begin + t + 1, head, lane, column);
    const TokenTerms<kD> terms(p, x, bias, a, row0, Sh::kWarpRows, &shared.terms[warp][0][0], lane);
    Step<kD, kSplit, kWarps>(p, x, terms, rows.begin + t, head, column, t & 1, shared, S);
  }
  if (p.s_out == nullptr || (rows.count == 0 && p.s_out == p.s_in)) return;
#pragma unroll
  for (int r = 0; r < Sh::kRows; ++r) {
    __stcs(reinterpret_cast<float4*>(p.s_out + state_at + r * kD), S[r]);
  }
}

// Many states: a block a head, three blocks an SM. The state comes by one bulk copy into shared
// memory and is read there twice, for the two sums and for the update, so that no registers hold
// it; it leaves by streaming stores.
constexpr int kManyPairs = 256;  // measured: faster from 384, not at 96
constexpr int kHeadWarps = 8, kHeadRows = 128 / kHeadWarps;
constexpr int kStateBytes = 128 * 128 * 4, kHeadDynamic = kStateBytes + 128;

struct HeadShared {
  alignas(16) float terms[kHeadWarps][3][kHeadRows];
  float partial[kHeadWarps][2][128];
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
/// back to shared memory.
__device__ __forceinline__ void HeadStep(const KdaParams& p, const TokenInputs<128>& x,
                                         const TokenTerms<128>& terms, int64_t token, int head,
                                         uint32_t state, float* to, HeadShared& shared) {
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
  const float u[4] = {terms.beta * (Low(x.v.x) - sk.x), terms.beta * (High(x.v.x) - sk.y),
                      terms.beta * (Low(x.v.y) - sk.z), terms.beta * (High(x.v.y) - sk.w)};
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
    *reinterpret_cast<uint2*>(p.o + token * p.o_row + head * 128 + column) = {
        PackBf16(sq.x + u[0] * terms.kq, sq.y + u[1] * terms.kq),
        PackBf16(sq.z + u[2] * terms.kq, sq.w + u[3] * terms.kq)};
  }
}

__global__ void __launch_bounds__(kHeadWarps * 32, 3)
    HeadKernel(const __grid_constant__ KdaParams p) {
  constexpr int kD = 128;
  extern __shared__ unsigned char dynamic[];
  __shared__ HeadShared shared;
  const uint32_t base = (SharedAddress(dynamic) + 127) & ~127u;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = 4 * lane;
  const int64_t state_at = static_cast<int64_t>(blockIdx.x) * kD * kD;
  const uint32_t barrier = SharedAddress(&shared.barrier);
  if (lane == 0 && warp == 0) {
    BarrierInit(barrier, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    BarrierArriveExpect(barrier, kStateBytes);
    BulkLoad(base, p.s_in + state_at, kStateBytes, barrier);
  }
  const int head = blockIdx.x % p.n_heads, sequence = blockIdx.x / p.n_heads;
  const Rows rows = SequenceRows(p.cu, p.n_tokens, sequence);
  TokenInputs<kD> x;
  if (rows.count > 0) x.Load(p, rows.begin, head, lane, column);
  const float a = __expf(p.a_log[head]);
  const float4 y = *reinterpret_cast<const float4*>(p.dt_bias + head * kD + column);
  const float bias[4] = {y.x, y.y, y.z, y.w};
  const int row0 = warp * kHeadRows;
  const uint32_t state = base + row0 * 512 + lane * 16;
  float* out = p.s_out + state_at + row0 * kD + column;
  __syncthreads();  // the barrier is made
  for (int t = 0; t < rows.count; ++t) {
    if (t > 0) {
      x.Load(p, rows.begin + t, head, lane, column);
      __syncthreads();  // the sums of the token before are read
    }
    const TokenTerms<kD> terms(p, x, bias, a, row0, kHeadRows, &shared.terms[warp][0][0], lane);
    if (t == 0) BarrierWait(barrier, 0);
    HeadStep(p, x, terms, rows.begin + t, head, state, t + 1 == rows.count ? out : nullptr, shared);
  }
  if (rows.count > 0) return;
  BarrierWait(barrier, 0);  // no block ends while a copy into it is under way
  if (p.s_out == p.s_in) return;
#pragma unroll
  for (int r = 0; r < kHeadRows; ++r) {
    __stcs(reinterpret_cast<float4*>(out + r * kD), LoadF4(state + r * 512));
  }
}

}  // namespace

cudaError_t LaunchKdaRecurrent(const KdaParams& p, int head_dim, cudaStream_t stream) {
  const int pairs = p.n_sequences * p.n_heads;
  if (pairs == 0) return cudaSuccess;
  if (head_dim == 64) {
    RecurrentKernel<64, 2, 4, 4><<<pairs * 2, 128, 0, stream>>>(p);
  } else if (p.n_tokens > 8 * static_cast<int64_t>(p.n_sequences)) {
    RecurrentKernel<128, 4, 4, 4><<<pairs * 4, 128, 0, stream>>>(p);
  } else if (pairs < kManyPairs || p.s_in == nullptr || p.s_out == nullptr) {
    RecurrentKernel<128, 4, 2, 8><<<pairs * 4, 64, 0, stream>>>(p);
  } else {
    const cudaError_t error =
        cudaFuncSetAttribute(HeadKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kHeadDynamic);
    if (error != cudaSuccess) return error;
    HeadKernel<<<pairs, kHeadWarps * 32, kHeadDynamic, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace k3::cuda
