// The token recurrence in f32, on inputs as the ops have them: normalised keys, log decays.
#include "k3/kernels/cuda/kda_steps.cuh"
#include "k3/kernels/cuda/op_kernels.cuh"

namespace k3::cuda {
namespace {

struct OpParams {
  const float *q, *k, *v, *g, *beta;
  int64_t q_row, k_row, v_row, g_row, beta_row, o_row;
  float* o;
  int n_heads;
  float scale;
};

/// Inputs of a token, loaded one token ahead.
template <int kD>
struct OpInputs {
  static constexpr int kPer = kD / 32;
  float q[kPer], k[kPer], g[kPer], v[4], beta;

  __device__ __forceinline__ void Load(const OpParams& p, int64_t t, int head, int lane,
                                       int column) {
    const int64_t at = int64_t{head} * kD + lane * kPer;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      q[i] = p.q[t * p.q_row + at + i] * p.scale, k[i] = p.k[t * p.k_row + at + i];
      g[i] = p.g[t * p.g_row + at + i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = p.v[t * p.v_row + int64_t{head} * kD + column + i];
    beta = p.beta[t * p.beta_row + head];
  }
};

/// As TokenTerms, for inputs that are normalised and gated already.
template <int kD>
struct OpTerms {
  float beta, kq;

  __device__ __forceinline__ OpTerms(const OpInputs<kD>& x, int row0, int rows, float* to, int lane)
      : beta(x.beta), kq(0) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < OpInputs<kD>::kPer; ++i) {
      kq += x.q[i] * x.k[i];
      const int row = lane * OpInputs<kD>::kPer + i - row0;
      if (row >= 0 && row < rows) {
        to[row] = expf(x.g[i]), to[rows + row] = x.k[i], to[2 * rows + row] = x.q[i];
      }
    }
    kq = WarpSum(kq);
    __syncwarp();
  }
};

template <int kD, int kSplit, int kWarps>
__global__ void __launch_bounds__(kWarps * 32)
    OpKdaKernel(const OpParams p, const __grid_constant__ OpSequences sequences) {
  using Sh = Shape<kD, kSplit, kWarps>;
  __shared__ typename Sh::Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pair = blockIdx.x / kSplit, head = pair % p.n_heads;
  const SequenceRange range = sequences.ranges[pair / p.n_heads];
  if (range.count <= 0) return;
  const int column = blockIdx.x % kSplit * Sh::kColumns + 4 * (lane % Sh::kLaneColumns);
  const int row0 = warp * Sh::kWarpRows, first = row0 + lane / Sh::kLaneColumns * Sh::kRows;
  float* state = sequences.states[pair / p.n_heads] + (int64_t{head} * kD + first) * kD + column;
  float4 S[Sh::kRows];
#pragma unroll
  for (int r = 0; r < Sh::kRows; ++r) S[r] = *reinterpret_cast<float4*>(state + r * kD);
  OpInputs<kD> next;
  next.Load(p, range.begin, head, lane, column);
  for (int64_t t = 0; t < range.count; ++t) {
    const OpInputs<kD> x = next;
    if (t + 1 < range.count) next.Load(p, range.begin + t + 1, head, lane, column);
    const OpTerms<kD> terms(x, row0, Sh::kWarpRows, &shared.terms[warp][0][0], lane);
    const float4 v = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    Step<kD, kSplit, kWarps>(v, terms, t & 1, shared, S, [&](float4 o) {
      if (threadIdx.x >= Sh::kLaneColumns) return;
      float* to = p.o + (range.begin + t) * p.o_row + int64_t{head} * kD + column;
      to[0] = o.x, to[1] = o.y, to[2] = o.z, to[3] = o.w;
    });
  }
#pragma unroll
  for (int r = 0; r < Sh::kRows; ++r) *reinterpret_cast<float4*>(state + r * kD) = S[r];
}

template <int kD, int kSplit, int kWarps>
void Launch(const OpParams& p, const OpSequences& part, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(part.count * p.n_heads * kSplit);
  OpKdaKernel<kD, kSplit, kWarps><<<blocks, kWarps * 32, 0, stream>>>(p, part);
}

}  // namespace

bool KdaShapeOk(const KdaArgs& a) {
  const int64_t dim = a.n_heads > 0 ? a.key_dim() : 0;
  if (a.n_heads > 4096 || dim != a.value_dim() || (dim != 32 && dim != 64 && dim != 128)) {
    return false;
  }
  for (const float* state : a.states) {
    if (reinterpret_cast<uintptr_t>(state) % 16 != 0) return false;
  }
  return true;
}

cudaError_t LaunchOp(const KdaArgs& a, cudaStream_t stream) {
  OpParams p = {};
  p.q = a.q.data, p.q_row = a.q.strides[0], p.k = a.k.data, p.k_row = a.k.strides[0];
  p.v = a.v.data, p.v_row = a.v.strides[0], p.g = a.g.data, p.g_row = a.g.strides[0];
  p.beta = a.beta.data, p.beta_row = a.beta.strides[0], p.o = a.o.data, p.o_row = a.o.strides[0];
  p.n_heads = static_cast<int>(a.n_heads), p.scale = a.scale;
  const int64_t dim = a.key_dim();
  return ForSequences(a.sequences, a.states, [&](const OpSequences& part) {
    if (dim == 32) {
      Launch<32, 1, 2>(p, part, stream);
    } else if (dim == 64) {
      Launch<64, 2, 4>(p, part, stream);
    } else {
      Launch<128, 4, 4>(p, part, stream);
    }
  });
}

}  // namespace k3::cuda
