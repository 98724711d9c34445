// KDA token by token with the state in registers: decode, and any length when no chunk form fits.
#include "k3/kernels/cuda/kda_recurrent.cuh"
#include <cstdlib>

namespace k3::cuda {
namespace {

/// One lane's share of a token's inputs, loaded one token ahead.
template <int kD>
struct TokenInputs {
  static constexpr int kPer = kD / 32;  // channels a lane: 2 or 4
  uint32_t q[kPer / 2], k[kPer / 2], f[kPer / 2];
  uint2 v;
  float beta;

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
    beta = Sigmoid(__bfloat162float(p.beta[t * p.beta_row + head]));
  }
};

/// A block owns kD / kSplit value columns of one head of one sequence. A thread owns four columns
/// of kRows key rows; a warp covers kLaneRows rows at once. Warps meet once a token, to add their
/// parts of S'^T k and S'^T q: o = S'^T q + u (k . q) needs no second pass over the state.
template <int kD, int kSplit, int kWarps, int kBlocks, bool kAhead>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) RecurrentKernel(const KdaParams p) {
  constexpr int kColumns = kD / kSplit, kLaneColumns = kColumns / 4;
  constexpr int kLaneRows = 32 / kLaneColumns, kRows = kD / (kWarps * kLaneRows);
  constexpr int kPer = kD / 32, kWarpRows = kD / kWarps;
  __shared__ float partial[2][kWarps][2][kColumns];
  __shared__ float coefficient[kWarps][3][kWarpRows];  // decay, k, q of a warp's rows

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = blockIdx.x % kSplit, pair = blockIdx.x / kSplit;
  const int head = pair % p.n_heads, sequence = pair / p.n_heads;
  const Rows rows = SequenceRows(p.cu, p.n_tokens, sequence);
  const int column = part * kColumns + 4 * (lane % kLaneColumns);
  const int row0 = warp * kWarpRows + (lane / kLaneColumns) * kRows;
  const int64_t state_at = static_cast<int64_t>(pair) * kD * kD + row0 * kD + column;

  float4 S[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    S[r] = p.s_in ? __ldcs(reinterpret_cast<const float4*>(p.s_in + state_at + r * kD))
                  : make_float4(0, 0, 0, 0);
  }
  const float a = __expf(p.a_log[head]);
  float bias[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) bias[i] = p.dt_bias[head * kD + lane * kPer + i];

  TokenInputs<kD> next;
  if (kAhead && rows.count > 0) next.Load(p, rows.begin, head, lane, column);
  for (int t = 0; t < rows.count; ++t) {
    if (!kAhead) next.Load(p, rows.begin + t, head, lane, column);
    const TokenInputs<kD> x = next;
    if (kAhead && t + 1 < rows.count) next.Load(p, rows.begin + t + 1, head, lane, column);

    float q[kPer], k[kPer], decay[kPer], qq = 0, kk = 0, kq = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      q[i] = i % 2 ? High(x.q[i / 2]) : Low(x.q[i / 2]);
      k[i] = i % 2 ? High(x.k[i / 2]) : Low(x.k[i / 2]);
      decay[i] = __expf(
          LogDecay(i % 2 ? High(x.f[i / 2]) : Low(x.f[i / 2]), bias[i], a, p.lower_bound));
      qq += q[i] * q[i];
      kk += k[i] * k[i];
      kq += q[i] * k[i];
    }
    const float q_norm = rsqrtf(WarpSum(qq) + kNormEps) * p.scale;
    const float k_norm = rsqrtf(WarpSum(kk) + kNormEps);
    kq = WarpSum(kq) * q_norm * k_norm;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int row = lane * kPer + i - warp * kWarpRows;
      if (row >= 0 && row < kWarpRows) {
        coefficient[warp][0][row] = decay[i];
        coefficient[warp][1][row] = k[i] * k_norm;
        coefficient[warp][2][row] = q[i] * q_norm;
      }
    }
    __syncwarp();

    float pk[4] = {0, 0, 0, 0}, pq[4] = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = (lane / kLaneColumns) * kRows + r;
      const float e = coefficient[warp][0][row], kr = coefficient[warp][1][row],
                  qr = coefficient[warp][2][row];
      S[r].x *= e, S[r].y *= e, S[r].z *= e, S[r].w *= e;
      pk[0] += S[r].x * kr, pk[1] += S[r].y * kr, pk[2] += S[r].z * kr, pk[3] += S[r].w * kr;
      pq[0] += S[r].x * qr, pq[1] += S[r].y * qr, pq[2] += S[r].z * qr, pq[3] += S[r].w * qr;
    }
#pragma unroll
    for (int mask = kLaneColumns; mask < 32; mask <<= 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pk[i] += __shfl_xor_sync(~0u, pk[i], mask);
        pq[i] += __shfl_xor_sync(~0u, pq[i], mask);
      }
    }
    const int at = 4 * (lane % kLaneColumns);
    if (lane < kLaneColumns) {
      *reinterpret_cast<float4*>(&partial[t & 1][warp][0][at]) =
          make_float4(pk[0], pk[1], pk[2], pk[3]);
      *reinterpret_cast<float4*>(&partial[t & 1][warp][1][at]) =
          make_float4(pq[0], pq[1], pq[2], pq[3]);
    }
    __syncthreads();
    float4 sk = make_float4(0, 0, 0, 0), sq = sk;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 y = *reinterpret_cast<const float4*>(&partial[t & 1][w][0][at]);
      const float4 z = *reinterpret_cast<const float4*>(&partial[t & 1][w][1][at]);
      sk.x += y.x, sk.y += y.y, sk.z += y.z, sk.w += y.w;
      sq.x += z.x, sq.y += z.y, sq.z += z.z, sq.w += z.w;
    }
    const float4 u = make_float4(x.beta * (Low(x.v.x) - sk.x), x.beta * (High(x.v.x) - sk.y),
                                 x.beta * (Low(x.v.y) - sk.z), x.beta * (High(x.v.y) - sk.w));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float kr = coefficient[warp][1][(lane / kLaneColumns) * kRows + r];
      S[r].x += u.x * kr, S[r].y += u.y * kr, S[r].z += u.z * kr, S[r].w += u.w * kr;
    }
    const int64_t token = rows.begin + t;
    if (threadIdx.x < kLaneColumns) {
      const uint2 packed = {PackBf16(sq.x + u.x * kq, sq.y + u.y * kq),
                            PackBf16(sq.z + u.z * kq, sq.w + u.w * kq)};
      *reinterpret_cast<uint2*>(p.o + token * p.o_row + head * kD + column) = packed;
    }
    if (p.token_states) {
      float* to = p.token_states + (token * p.n_heads + head) * kD * kD + row0 * kD + column;
#pragma unroll
      for (int r = 0; r < kRows; ++r) __stcs(reinterpret_cast<float4*>(to + r * kD), S[r]);
    }
  }
  if (p.s_out == nullptr || (rows.count == 0 && p.s_out == p.s_in)) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    __stcs(reinterpret_cast<float4*>(p.s_out + state_at + r * kD), S[r]);
  }
}

}  // namespace

cudaError_t LaunchKdaRecurrent(const KdaParams& p, int head_dim, cudaStream_t stream) {
  const int pairs = p.n_sequences * p.n_heads;
  if (pairs == 0) return cudaSuccess;
  const bool few = pairs < 512;  // not enough blocks to fill the device with half heads
  static int mode = getenv("K3_MODE") ? atoi(getenv("K3_MODE")) : 0;
  if (head_dim == 128) {
    const bool ahead = p.n_tokens > 2 * (int64_t)p.n_sequences;
    switch (mode) {
      case 0:
    if (ahead) RecurrentKernel<128, 4, 4, 4, true><<<pairs * 4, 128, 0, stream>>>(p);
    else if (few) {
      RecurrentKernel<128, 4, 2, 8, false><<<pairs * 4, 64, 0, stream>>>(p);
    } else {
      RecurrentKernel<128, 2, 4, 5, false><<<pairs * 2, 128, 0, stream>>>(p);
    } break;
      case 1: RecurrentKernel<128, 2, 4, 4, false><<<pairs * 2, 128, 0, stream>>>(p); break;
      case 2: RecurrentKernel<128, 1, 8, 2, false><<<pairs, 256, 0, stream>>>(p); break;
      case 3: RecurrentKernel<128, 4, 4, 4,false><<<pairs * 4, 128, 0, stream>>>(p); break;
    }
  } else {
    RecurrentKernel<64, 2, 4, 4, true><<<pairs * 2, 128, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace k3::cuda
