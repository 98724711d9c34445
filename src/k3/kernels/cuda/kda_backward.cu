// KDA backward: the forward chain again with states kept, the chain of dS, then every chunk's
// gradients (kda_gradients.cuh). Bounded decay, head_dim 128.
#include "k3/kernels/cuda/kda_backward.cuh"

#include "k3/kernels/cuda/kda_gradients.cuh"

namespace k3::cuda {
namespace {

struct ChunkStates {
  const uint4 *S, *dS;  // dumps of the two chains
  const bf16* U;        // [n_tokens, n_heads, 128]
};

/// Second half of GradientKernel: from the six gradient tiles of a warp to dq, dk and the gradient
/// by the running decay. Needs dots of whole rows, which meet in shared memory.
struct WarpGradients {
  GradientTile dk, dq;  // by the normalised rows (q without its scale factor)

  __device__ __forceinline__ void Combine(const KdaParams& p, int64_t token, int count, int head,
                                          uint32_t base, int warp, int lane,
                                          const GradientTile& dqd, const GradientTile& dkd,
                                          const GradientTile& dkr, const GradientTile& dqc,
                                          const GradientTile& dkc, const GradientTile& dki);
  __device__ __forceinline__ void Store(const KdaParams& p, const KdaGradients& out, int64_t token,
                                        int count, int head, uint32_t base, int warp, int lane);
};

__device__ __forceinline__ uint32_t LoadPair(const bf16* x) {
  return *reinterpret_cast<const uint32_t*>(x);
}

__device__ __forceinline__ void WarpGradients::Combine(
    const KdaParams& p, int64_t token, int count, int head, uint32_t base, int warp, int lane,
    const GradientTile& dqd, const GradientTile& dkd, const GradientTile& dkr,
    const GradientTile& dqc, const GradientTile& dkc, const GradientTile& dki) {
  using At = GradientLayout;
  float dots[2][2][2] = {};  // q or k; m; row of the fragment
  float ends[2][2] = {};
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * m + lane / 4 + 8 * r;
      const int64_t t = token + (row < count ? row : 0);
      const float q_norm = row < count ? LoadF(base + At::kNorms + row * 4) : 0.f;
      const float k_norm = row < count ? LoadF(base + At::kNorms + 128 + row * 4) : 0.f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int key = 16 * warp + 8 * n + 2 * (lane % 4);
        const uint32_t qr = LoadPair(p.q + t * p.q_row + head * 128 + key);
        const uint32_t kr = LoadPair(p.k + t * p.k_row + head * 128 + key);
        const float2 e = LoadF2(base + At::kE + row * At::kFloatRow + key * 4);
        const float2 lift = LoadF2(base + At::kChannel + key * 4);
        const float2 end = LoadF2(base + At::kChannel + 512 + key * 4);
        const float diagonal = row < count ? LoadF(base + At::kDiagonal + row * 4) * p.scale : 0.f;
        const uint32_t tile = base + row * At::kRow + key * 2;
        const uint32_t kc = Load32(tile + At::kKc), qc = Load32(tile + At::kQc),
                       ki = Load32(tile + At::kKi);
        float dg[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int i = 2 * r + c;
          const float q = (c ? High(qr) : Low(qr)) * q_norm, k = (c ? High(kr) : Low(kr)) * k_norm;
          const float up = Exp2(c ? e.y : e.x), down = Exp2(-(c ? e.y : e.x));
          const float rise = (c ? lift.y : lift.x) * up;  // 2^G
          const float k_first = -rise * dkd[m][n][i];
          const float k_end = (c ? end.y : end.x) * dkr[m][n][i] * down;
          const float q_first = rise * dqd[m][n][i] * p.scale;
          const float gk = dkc[m][n][i] * up + dki[m][n][i] * down + k_first + k_end + diagonal * q;
          const float gq = dqc[m][n][i] * up * p.scale + q_first + diagonal * k;
          dk[m][n][i] = gk;
          dq[m][n][i] = gq;
          // The rounded tiles, so that what a pair of tokens adds at one it takes away at the
          // other.
          dg[c] = dkc[m][n][i] * (c ? High(kc) : Low(kc)) +
                  dqc[m][n][i] * (c ? High(qc) : Low(qc)) -
                  dki[m][n][i] * (c ? High(ki) : Low(ki)) + k * (k_first - k_end) + q * q_first;
          dots[0][m][r] += q * gq;
          dots[1][m][r] += k * gk;
          ends[n][c] += k * k_end;
        }
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(base + At::kDg + row * At::kFloatRow +
                                                              key * 4),
                     "f"(dg[0]), "f"(dg[1])
                     : "memory");
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& x = dots[i / 4][i / 2 % 2][i % 2];
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 2);
    const int row = 16 * (i / 2 % 2) + lane / 4 + 8 * (i % 2);
    if (lane % 4 == 0) StoreF(base + At::kDots + (warp * 2 + i / 4) * 128 + row * 4, x);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& x = ends[i / 2][i % 2];
    for (int mask = 4; mask < 32; mask <<= 1) x += __shfl_xor_sync(~0u, x, mask);
    const int key = 16 * warp + 8 * (i / 2) + 2 * (lane % 4) + i % 2;
    if (lane < 4) StoreF(base + At::kChannel + 1536 + key * 4, x);
  }
}

__device__ __forceinline__ void WarpGradients::Store(const KdaParams& p, const KdaGradients& out,
                                                     int64_t token, int count, int head,
                                                     uint32_t base, int warp, int lane) {
  using At = GradientLayout;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int m = i / 2, r = i % 2, row = 16 * m + lane / 4 + 8 * r;
    if (row >= count) continue;
    const int64_t t = token + row;
    float dot_q = 0, dot_k = 0;
    for (int w = 0; w < 8; ++w) {
      dot_q += LoadF(base + At::kDots + w * 256 + row * 4);
      dot_k += LoadF(base + At::kDots + w * 256 + 128 + row * 4);
    }
    const float q_norm = LoadF(base + At::kNorms + row * 4);
    const float k_norm = LoadF(base + At::kNorms + 128 + row * 4);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = head * 128 + 16 * warp + 8 * n + 2 * (lane % 4);
      const uint32_t qr = LoadPair(p.q + t * p.q_row + key), kr = LoadPair(p.k + t * p.k_row + key);
      const float *gq = &dq[m][n][2 * r], *gk = &dk[m][n][2 * r];
      const int64_t to = t * p.n_heads * 128 + key;
      *reinterpret_cast<uint32_t*>(out.dq + to) =
          PackBf16(q_norm * (gq[0] - Low(qr) * q_norm * dot_q),
                   q_norm * (gq[1] - High(qr) * q_norm * dot_q));
      *reinterpret_cast<uint32_t*>(out.dk + to) =
          PackBf16(k_norm * (gk[0] - Low(kr) * k_norm * dot_k),
                   k_norm * (gk[1] - High(kr) * k_norm * dot_k));
    }
  }
}

/// From the gradient by the running decay to df, dA_log and ddt_bias: one thread for a channel and
/// 16 tokens, from the last token back.
__device__ __forceinline__ void GateGradient(const KdaParams& p, const KdaGradients& out,
                                             int64_t token, int count, int head, uint32_t base) {
  using At = GradientLayout;
  const int channel = threadIdx.x % 128, first = threadIdx.x / 128 * 16;
  uint32_t f[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int64_t t = token + min(first + i, count - 1);
    f[i] = reinterpret_cast<const uint16_t*>(p.f)[t * p.f_row + head * 128 + channel];
  }
  float decayed = 0;  // sum over values of S dS
#pragma unroll 8
  for (int v = 0; v < 128; ++v) {
    uint16_t s, ds;
    const uint32_t at = base + At::kS + v * At::kRow + channel * 2;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(s) : "r"(at) : "memory");
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(ds) : "r"(at + At::kDs - At::kS) : "memory");
    decayed += Low(s) * Low(ds);
  }
  float dg = LoadF(base + At::kChannel + 1536 + channel * 4) +
             decayed * LoadF(base + At::kChannel + 1024 + channel * 4);
  for (int t = kChunk - 1; t >= first + 16; --t) {
    dg += LoadF(base + At::kDg + t * At::kFloatRow + channel * 4);
  }
  const float a = __expf(p.a_log[head]), bias = p.dt_bias[head * 128 + channel];
  float sum = 0, sum_z = 0;
#pragma unroll
  for (int i = 15; i >= 0; --i) {
    const int t = first + i;
    dg += LoadF(base + At::kDg + t * At::kFloatRow + channel * 4);
    if (t >= count) continue;
    const float z = Low(f[i]) + bias;
    const float e = __expf(-a * z), sigma = Reciprocal(1.f + e);
    const float rest = isinf(e) ? 1.f : e * sigma;  // 1 - sigma
    const float dz = p.lower_bound * sigma * rest * a * dg;
    out.df[(token + t) * p.n_heads * 128 + head * 128 + channel] = __float2bfloat16(dz);
    sum += dz, sum_z += dz * z;
  }
  atomicAdd(out.ddt_bias + head * 128 + channel, sum);
  sum_z = WarpSum(sum_z);
  if (threadIdx.x % 32 == 0) atomicAdd(out.da_log + head, sum_z);
}

__device__ __forceinline__ void BetaGradient(const KdaParams& p, const KdaGradients& out,
                                             int64_t token, int count, int head, uint32_t base,
                                             int warp, int lane) {
  using At = GradientLayout;
  for (int row = 4 * warp; row < min(4 * warp + 4, count); ++row) {
    const uint2 u = Load64(base + At::kU + row * At::kRow + lane * 8);
    const uint2 d = Load64(base + At::kDr + row * At::kRow + lane * 8);
    const float dot = WarpSum(Low(u.x) * Low(d.x) + High(u.x) * High(d.x) + Low(u.y) * Low(d.y) +
                              High(u.y) * High(d.y));
    if (lane == 0) {
      const float beta = Sigmoid(__bfloat162float(p.beta[(token + row) * p.beta_row + head]));
      out.dbeta[(token + row) * p.n_heads + head] = beta > 0.f ? dot * (1.f - beta) / beta : 0.f;
    }
  }
}

__global__ void __launch_bounds__(256, 1)
    GradientKernel(const __grid_constant__ KdaParams p, const __grid_constant__ KdaGradients out,
                   const __grid_constant__ ChunkStates in) {
  using At = GradientLayout;
  extern __shared__ unsigned char dynamic[];
  const uint32_t base = AlignedShared(dynamic);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x % p.n_heads;
  const int64_t slot = blockIdx.x / p.n_heads;
  const SlotJob job = FindSlot(p, slot);
  if (job.count == 0) return;
  const int64_t dense = static_cast<int64_t>(p.n_heads) * 128;
  GradientLoadRows(out.d_o + job.token * out.d_o_row + head * 128, out.d_o_row, job.count,
                   base + At::kDo);
  GradientLoadRows(in.U + job.token * dense + head * 128, dense, job.count, base + At::kU);
  GradientLoadRows(out.dv + job.token * dense + head * 128, dense, job.count, base + At::kDr);
  CopyCommit();
  GradientState S, dS;
  S.Fetch(in.S + (slot * p.n_heads + head) * 2048);
  dS.Fetch(in.dS + (slot * p.n_heads + head) * 2048);
  GradientPrep(p, job.token, job.count, head, base);
  S.Put(base + At::kS);
  dS.Put(base + At::kDs);
  CopyWait<0>();
  __syncthreads();

  GradientPairs(base, warp, lane);
  const uint32_t rows = (lane % 16) * At::kRow + (lane / 16) * 16;
  GradientTile dqd = {}, dkd = {}, dkr = {};
  {
    // B is [value][key] as it lies: its rows are summed over.
    auto state = [&](uint32_t tile) {
      return [at = base + tile + rows + warp * 32](int s) { return at + s * 16 * At::kRow; };
    };
    auto tokens = [&](uint32_t tile) {
      return [at = base + tile + rows](int m, int s) { return at + m * 16 * At::kRow + s * 32; };
    };
    Product<8, false, true>(dqd, tokens(At::kDo), state(At::kS));
    Product<8, false, true>(dkd, tokens(At::kDr), state(At::kS));
    Product<8, false, true>(dkr, tokens(At::kU), state(At::kDs));
  }
  __syncthreads();
  GradientTile dqc = {}, dkc = {}, dki = {};
  {
    const uint32_t small = base + At::kSmall, dp = small + kChunk * 80;
    const uint32_t by_rows = (lane % 16) * 80 + (lane / 16) * 16;
    const uint32_t by_columns = ((lane % 8) + (lane / 16) * 8) * 80 + ((lane / 8) % 2) * 16;
    auto tile = [&](uint32_t at) {
      return [from = base + at + rows + warp * 32](int s) { return from + s * 16 * At::kRow; };
    };
    auto plain = [&](uint32_t at) {
      return [from = at + by_rows](int m, int s) { return from + m * 16 * 80 + s * 32; };
    };
    auto transposed = [&](uint32_t at) {
      return [from = at + by_columns](int m, int s) { return from + s * 16 * 80 + m * 32; };
    };
    Product<2, false, true>(dqc, plain(small), tile(At::kKi));
    Product<2, false, true>(dkc, plain(dp), tile(At::kKi));
    Product<2, true, true>(dki, transposed(dp), tile(At::kKc));
    Product<2, true, true>(dki, transposed(small), tile(At::kQc));
  }
  WarpGradients gradients;
  gradients.Combine(p, job.token, job.count, head, base, warp, lane, dqd, dkd, dkr, dqc, dkc, dki);
  __syncthreads();
  gradients.Store(p, out, job.token, job.count, head, base, warp, lane);
  BetaGradient(p, out, job.token, job.count, head, base, warp, lane);
  GateGradient(p, out, job.token, job.count, head, base);
}

template <ChainKind kKind>
cudaError_t LaunchChain(const KdaParams& p, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      FusedKernel<kKind>, cudaFuncAttributeMaxDynamicSharedMemorySize, FusedLayout::kDynamic);
  if (error != cudaSuccess) return error;
  FusedKernel<kKind><<<p.n_sequences * p.n_heads, 512, FusedLayout::kDynamic, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchKdaBackward(const KdaParams& p, const KdaGradients& g, void* workspace,
                              cudaStream_t stream) {
  const int64_t slots = kda::Slots(p.n_tokens, p.n_sequences), blocks = slots * p.n_heads;
  cudaError_t error = cudaMemsetAsync(g.da_log, 0, sizeof(float) * p.n_heads, stream);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(g.ddt_bias, 0, sizeof(float) * p.n_heads * 128, stream);
  if (error != cudaSuccess || p.n_sequences == 0) return error;
  static_assert(2048 * sizeof(uint4) == kda::kStateBytes);
  auto* S = static_cast<uint4*>(workspace);  // laid out as k3_kda_backward_workspace counts
  uint4* dS = S + blocks * 2048;
  auto* U = reinterpret_cast<bf16*>(dS + blocks * 2048);

  KdaParams forward = p;
  forward.o = U, forward.o_row = static_cast<int64_t>(p.n_heads) * 128, forward.dump = S;
  error = LaunchChain<ChainKind::kStates>(forward, stream);
  if (error != cudaSuccess) return error;
  KdaParams reverse = forward;
  reverse.v = g.d_o, reverse.v_row = g.d_o_row, reverse.o = g.dv, reverse.dump = dS;
  reverse.s_in = g.ds_out, reverse.s_out = g.ds_in;
  error = LaunchChain<ChainKind::kReverse>(reverse, stream);
  if (error != cudaSuccess) return error;

  constexpr uint32_t kDynamic = GradientLayout::kBytes + 1024;
  error =
      cudaFuncSetAttribute(GradientKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kDynamic);
  if (error != cudaSuccess) return error;
  GradientKernel<<<static_cast<unsigned>(blocks), 256, kDynamic, stream>>>(p, g, {S, dS, U});
  return cudaGetLastError();
}

}  // namespace k3::cuda
