// KDA token by token with the state in registers: decode, and any length when no chunk form fits.
#include "k3/kernels/cuda/kda_recurrent.cuh"

#include <type_traits>

#include "k3/kernels/cuda/kda_steps.cuh"

namespace k3::cuda {
namespace {

/// A block's columns of one head of one sequence.
template <int kD, int kSplit, int kWarps>
struct BlockJob {
  using Sh = Shape<kD, kSplit, kWarps>;
  int warp, lane, part, head, sequence, column, row0;
  Rows rows;
  int64_t state_at;

  __device__ __forceinline__ explicit BlockJob(const KdaParams& p)
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32), part(blockIdx.x % kSplit) {
    const int pair = blockIdx.x / kSplit;
    head = pair % p.n_heads, sequence = pair / p.n_heads;
    rows = SequenceRows(p.cu, p.n_tokens, sequence);
    column = part * Sh::kColumns + 4 * (lane % Sh::kLaneColumns);
    row0 = warp * Sh::kWarpRows;
    state_at = static_cast<int64_t>(pair) * kD * kD +
               (row0 + lane / Sh::kLaneColumns * Sh::kRows) * kD + column;
  }
  __device__ __forceinline__ void Load(const float* from, float4 (&S)[Sh::kRows]) const {
#pragma unroll
    for (int r = 0; r < Sh::kRows; ++r) {
      S[r] = from ? __ldcs(reinterpret_cast<const float4*>(from + state_at + r * kD))
                  : make_float4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void Store(float* to, const float4 (&S)[Sh::kRows]) const {
#pragma unroll
    for (int r = 0; r < Sh::kRows; ++r) {
      __stcs(reinterpret_cast<float4*>(to + state_at + r * kD), S[r]);
    }
  }
  /// The state after a token; `to` is laid out as the state, with tokens in the place of sequences.
  __device__ __forceinline__ void StoreToken(const KdaParams& p, int64_t token,
                                             const float4 (&S)[Sh::kRows]) const {
    if (p.token_states == nullptr) return;
    Store(p.token_states + (token - sequence) * p.n_heads * kD * kD, S);
  }
};

template <int kD>
__device__ __forceinline__ void LoadBias(const KdaParams& p, int head, int lane,
                                         float (&bias)[kD / 32]) {
#pragma unroll
  for (int i = 0; i < kD / 32; ++i) bias[i] = p.dt_bias[head * kD + lane * (kD / 32) + i];
}

template <int kD, int kSplit, int kWarps, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) RecurrentKernel(const KdaParams p) {
  using Sh = Shape<kD, kSplit, kWarps>;
  __shared__ typename Sh::Shared shared;
  const BlockJob<kD, kSplit, kWarps> job(p);
  const Rows rows = job.rows;
  float4 S[Sh::kRows];
  job.Load(p.s_in, S);
  const float a = __expf(p.a_log[job.head]);
  float bias[kD / 32];
  LoadBias<kD>(p, job.head, job.lane, bias);

  TokenInputs<kD> next;
  if (rows.count > 0) next.Load(p, rows.begin, job.head, job.lane, job.column);
  for (int t = 0; t < rows.count; ++t) {
    const TokenInputs<kD> x = next;
    const int64_t token = rows.begin + t;
    if (t + 1 < rows.count) next.Load(p, token + 1, job.head, job.lane, job.column);
    const TokenTerms<kD> terms(p, x, bias, a, job.row0, Sh::kWarpRows,
                               &shared.terms[job.warp][0][0], job.lane);
    Step<kD, kSplit, kWarps>(x.V(), terms, t & 1, shared, S, [&](float4 o) {
      if (threadIdx.x < Sh::kLaneColumns) StoreOutput(p, token, job.head * kD + job.column, o);
    });
    job.StoreToken(p, token, S);
  }
  if (p.s_out == nullptr || (rows.count == 0 && p.s_out == p.s_in)) return;
  job.Store(p.s_out, S);
}

/// The same with convolution and norm. The blocks of a head are a cluster: they add up the squares
/// of their outputs, and the first one replaces the tails of q and k once all have read them.
template <int kD, int kSplit, int kWarps, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks)
    FusedDecodeKernel(const KdaParams p, const __grid_constant__ KdaFusion x) {
  using Sh = Shape<kD, kSplit, kWarps>;
  constexpr int kColumns = Sh::kColumns;
  __shared__ typename Sh::Shared shared;
  __shared__ TokenRows<kD, kColumns> staged[2];
  __shared__ float squares[2][kSplit];
  const BlockJob<kD, kSplit, kWarps> job(p);
  const Rows rows = job.rows;
  if (rows.count == 0) return;  // states and tails stay
  const bool norm = x.norm_weight != nullptr, owner = job.part == 0;
  if (norm) ClusterArrive();  // no block writes into another that has not started
  float4 S[Sh::kRows];
  job.Load(p.s_in, S);
  auto stage = [&](int t) {
    StageToken<kD, kColumns>(p, x, rows, job.sequence, t, job.head, job.part * kColumns, owner,
                             staged[t & 1]);
  };
  const float a = __expf(p.a_log[job.head]);
  float bias[kD / 32];
  LoadBias<kD>(p, job.head, job.lane, bias);
  StagedInputs<kD> in;
  NormInputs gate;
  auto load = [&](int t) {
    in.LoadGate(p, rows.begin + t, job.head, job.lane);
    if (norm) gate.Load(x, rows.begin + t, job.head * kD, job.column);
  };
  load(0);
  stage(0);
  __syncthreads();
  for (int t = 0; t < rows.count; ++t) {
    const int64_t token = rows.begin + t;
    in.LoadRows(staged[t & 1], job.lane, job.column % kColumns);
    if (t + 1 < rows.count) stage(t + 1);  // its place was read before the last step's barrier
    const TokenTerms<kD> terms(p, in, bias, a, job.row0, Sh::kWarpRows,
                               &shared.terms[job.warp][0][0], job.lane);
    float4 output;
    Step<kD, kSplit, kWarps>(in.V(), terms, t & 1, shared, S, [&](float4 o) {
      output = o;
      if (!norm) return;
      float sum = o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w;
#pragma unroll
      for (int mask = 1; mask < Sh::kLaneColumns; mask <<= 1) {
        sum += __shfl_xor_sync(~0u, sum, mask);
      }
      if (t == 0) ClusterWait();
      if (threadIdx.x < kSplit)
        StoreRemote(SharedAddress(&squares[t & 1][job.part]), threadIdx.x, sum);
      ClusterArrive();
    });
    job.StoreToken(p, token, S);
    if (norm) {
      ClusterWait();
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kSplit; ++i) sum += squares[t & 1][i];
      output = gate.Apply(output, sum / kD, x.norm_eps);
    }
    if (threadIdx.x < Sh::kLaneColumns) StoreOutput(p, token, job.head * kD + job.column, output);
    if (t + 1 < rows.count) load(t + 1);
  }
  if (x.weights[0] != nullptr) ClusterArrive();
  job.Store(p.s_out, S);
  if (x.weights[0] == nullptr) return;
  ClusterWait();
  StoreTails<kD, kColumns>(p, x, rows, job.sequence, job.head, job.part * kColumns, owner);
}

constexpr int kManyPairs = 256;  // measured: faster from 384, not at 96

template <bool kFused>
__global__ void __launch_bounds__(kHeadWarps * 32, 3)
    HeadKernel(const __grid_constant__ KdaParams p, const __grid_constant__ KdaFusion fusion) {
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
  std::conditional_t<kFused, StagedInputs<kD>, TokenInputs<kD>> x;
  if constexpr (!kFused) {
    if (rows.count > 0) x.Load(p, rows.begin, head, lane, column);
  }
  const float a = __expf(p.a_log[head]);
  const float4 y = *reinterpret_cast<const float4*>(p.dt_bias + head * kD + column);
  const float bias[4] = {y.x, y.y, y.z, y.w};
  const int row0 = warp * kHeadRows;
  const uint32_t state = base + row0 * 512 + lane * 16;
  float* out = p.s_out + state_at + row0 * kD + column;
  const bool norm = kFused && fusion.norm_weight != nullptr;
  __syncthreads();  // the barrier is made
  for (int t = 0; t < rows.count; ++t) {
    const int64_t token = rows.begin + t;
    NormInputs gate;
    if constexpr (kFused) {
      x.LoadGate(p, token, head, lane);
      if (norm && warp == 0) gate.Load(fusion, token, head * kD, column);
      if (t > 0) __syncthreads();
      StageToken<kD, kD>(p, fusion, rows, sequence, t, head, 0, true, shared.rows);
      __syncthreads();
      x.LoadRows(shared.rows, lane, column);
      __syncthreads();  // the sums take the place of the rows
    } else if (t > 0) {
      x.Load(p, token, head, lane, column);
      __syncthreads();  // the sums of the token before are read
    }
    const TokenTerms<kD> terms(p, x, bias, a, row0, kHeadRows, &shared.terms[warp][0][0], lane);
    if (t == 0) BarrierWait(barrier, 0);
    HeadStep(p, x.V(), terms, token, head, state, t + 1 == rows.count ? out : nullptr, shared,
             [&](float4 o) {
               if (norm) {
                 const float sum = WarpSum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w);
                 o = gate.Apply(o, sum / kD, fusion.norm_eps);
               }
               StoreOutput(p, token, head * kD + column, o);
             });
  }
  if (rows.count > 0) {
    if constexpr (kFused) {
      if (fusion.weights[0] != nullptr) {
        StoreTails<kD, kD>(p, fusion, rows, sequence, head, 0, true);
      }
    }
    return;
  }
  BarrierWait(barrier, 0);  // no block ends while a copy into it is under way
  if (p.s_out == p.s_in) return;
#pragma unroll
  for (int r = 0; r < kHeadRows; ++r) {
    __stcs(reinterpret_cast<float4*>(out + r * kD), LoadF4(state + r * 512));
  }
}

template <bool kFused>
cudaError_t LaunchHeads(const KdaParams& p, const KdaFusion& x, int pairs, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      HeadKernel<kFused>, cudaFuncAttributeMaxDynamicSharedMemorySize, kHeadDynamic);
  if (error != cudaSuccess) return error;
  HeadKernel<kFused><<<pairs, kHeadWarps * 32, kHeadDynamic, stream>>>(p, x);
  return cudaGetLastError();
}

template <int kD, int kSplit, int kWarps, int kBlocks>
cudaError_t LaunchFused(const KdaParams& p, const KdaFusion& x, int pairs, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(pairs * kSplit)), config.blockDim = dim3(kWarps * 32);
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kSplit, 1, 1};
  config.attrs = &cluster, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, FusedDecodeKernel<kD, kSplit, kWarps, kBlocks>, p, x);
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
    return LaunchHeads<false>(p, {}, pairs, stream);
  }
  return cudaGetLastError();
}

cudaError_t LaunchKdaDecodeFused(const KdaParams& p, const KdaFusion& x, int head_dim,
                                 cudaStream_t stream) {
  const int pairs = p.n_sequences * p.n_heads;
  if (pairs == 0) return cudaSuccess;
  if (head_dim == 64) return LaunchFused<64, 2, 4, 4>(p, x, pairs, stream);
  if (pairs < kManyPairs) return LaunchFused<128, 4, 2, 8>(p, x, pairs, stream);
  return LaunchHeads<true>(p, x, pairs, stream);
}

}  // namespace k3::cuda
