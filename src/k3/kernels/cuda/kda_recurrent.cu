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

// Many states: a block walks over heads and keeps three states of 64 KB in flight, one loading, one
// in registers, one on its way out, each moved by one bulk copy. Inputs come one head ahead.
constexpr int kStateBytes = 128 * 128 * 4, kStreamBuffers = 3;
constexpr int kStreamDynamic = kStreamBuffers * kStateBytes + 128;

__global__ void __launch_bounds__(256, 1) StreamKernel(const __grid_constant__ KdaParams p) {
  constexpr int kD = 128;
  using Sh = Shape<kD, 1, 8>;
  extern __shared__ unsigned char dynamic[];
  __shared__ Sh::Shared shared;
  __shared__ uint64_t barriers[kStreamBuffers];
  const uint32_t base = (SharedAddress(dynamic) + 127) & ~127u;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = 4 * lane;
  const int pairs = p.n_sequences * p.n_heads;
  const uint32_t mine = warp * Sh::kWarpRows * 512 + lane * 16;
  auto load = [&](int pair, int buffer) {
    const uint32_t barrier = SharedAddress(&barriers[buffer]);
    BarrierArriveExpect(barrier, kStateBytes);
    BulkLoad(base + buffer * kStateBytes, p.s_in + static_cast<int64_t>(pair) * kD * kD,
             kStateBytes, barrier);
  };
  if (threadIdx.x == 0) {
    for (auto& barrier : barriers) BarrierInit(SharedAddress(&barrier), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = 0; i < 2; ++i) {
      const int pair = blockIdx.x + i * gridDim.x;
      if (pair < pairs) load(pair, i);
    }
  }
  __syncthreads();
  struct Ahead {  // of one head
    TokenInputs<kD> x;
    Rows rows;
    float a;
    float4 bias;
  } next;
  auto fetch = [&](int pair) {
    if (pair >= pairs) return;
    const int head = pair % p.n_heads;
    next.rows = SequenceRows(p.cu, p.n_tokens, pair / p.n_heads);
    next.a = p.a_log[head];
    next.bias = *reinterpret_cast<const float4*>(p.dt_bias + head * kD + lane * 4);
    if (next.rows.count > 0) next.x.Load(p, next.rows.begin, head, lane, column);
  };
  fetch(blockIdx.x);
  int buffer = 0;
  uint32_t parity = 0;
  for (int pair = blockIdx.x; pair < pairs; pair += gridDim.x) {
    const Ahead now = next;
    fetch(pair + gridDim.x);
    const int head = pair % p.n_heads;
    const float a = __expf(now.a), bias[4] = {now.bias.x, now.bias.y, now.bias.z, now.bias.w};
    const uint32_t state = base + buffer * kStateBytes + mine;
    float4 S[Sh::kRows];
    for (int t = 0; t < max(now.rows.count, 1); ++t) {
      TokenInputs<kD> x = now.x;
      if (t > 0) x.Load(p, now.rows.begin + t, head, lane, column);
      if (t == 0 && now.rows.count == 0) {
        BarrierWait(SharedAddress(&barriers[buffer]), parity);
        __syncthreads();
        break;
      }
      const TokenTerms<kD> terms(p, x, bias, a, warp * Sh::kWarpRows, Sh::kWarpRows,
                                 &shared.terms[warp][0][0], lane);
      if (t == 0) {
        BarrierWait(SharedAddress(&barriers[buffer]), parity);
#pragma unroll
        for (int r = 0; r < Sh::kRows; ++r) S[r] = LoadF4(state + r * 512);
      }
      Step<kD, 1, 8>(p, x, terms, now.rows.begin + t, head, column, t & 1, shared, S);
      if (t + 1 < now.rows.count) continue;
#pragma unroll
      for (int r = 0; r < Sh::kRows; ++r) StoreF4(state + r * 512, S[r]);
      FenceAsync();
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      BulkStore(p.s_out + static_cast<int64_t>(pair) * kD * kD, base + buffer * kStateBytes,
                kStateBytes);
      BulkCommit();
      BulkWaitRead<1>();  // the buffer of the head before is free
      const int later = pair + 2 * gridDim.x;
      if (later < pairs) load(later, (buffer + 2) % kStreamBuffers);
    }
    if (++buffer == kStreamBuffers) buffer = 0, parity ^= 1;
  }
  if (threadIdx.x == 0) BulkWait<0>();
}

}  // namespace

cudaError_t LaunchKdaRecurrent(const KdaParams& p, int head_dim, cudaStream_t stream) {
  const int pairs = p.n_sequences * p.n_heads;
  if (pairs == 0) return cudaSuccess;
  if (head_dim == 64) {
    RecurrentKernel<64, 2, 4, 4><<<pairs * 2, 128, 0, stream>>>(p);
  } else if (p.n_tokens > 8 * static_cast<int64_t>(p.n_sequences)) {
    RecurrentKernel<128, 4, 4, 4><<<pairs * 4, 128, 0, stream>>>(p);
  } else if (pairs < 2048 || p.s_in == nullptr || p.s_out == nullptr) {
    RecurrentKernel<128, 4, 2, 8><<<pairs * 4, 64, 0, stream>>>(p);
  } else {
    const cudaError_t error = cudaFuncSetAttribute(
        StreamKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStreamDynamic);
    if (error != cudaSuccess) return error;
    StreamKernel<<<132, 256, kStreamDynamic, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace k3::cuda
