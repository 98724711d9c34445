// The last step of the backward pass: gradients of one chunk of one head, chunks independent of
// each other. Given the state S before the chunk, dS behind it, U and dR = dv (see kda_chain.cuh):
//   dQd = dO S^T      dKd = -dR S^T      dKr = U dS^T          dA = strict_lower(dO U^T)
//   dP  = strict_lower(-dR U^T), the gradient of Kc Ki^T
//   dKc = dP Ki       dQc = dA Ki        dKi = dP^T Kc + dA^T Qc
// and dbeta_i = (dR_i . U_i) / beta_i^2, since (I + L) U = diag(beta) R. The diagonal of dO U^T
// meets q_i . k_i without any decay and is added apart: in the gradient by the decay it would only
// be subtracted again, and what rounding leaves of it can be more than the gradient.
#pragma once

#include "k3/kernels/cuda/kda_backward.cuh"
#include "k3/kernels/cuda/kda_fused.cuh"

namespace k3::cuda {

/// Shared memory of one block: padded rows, no swizzle.
struct GradientLayout {
  static constexpr uint32_t kRow = 272, kTile = kChunk * kRow, kFloatRow = 132 * 4;
  static constexpr uint32_t kS = 0, kDs = kS + 128 * kRow;  // [value][key] bf16
  static constexpr uint32_t kDo = kDs + 128 * kRow, kU = kDo + kTile, kDr = kU + kTile;
  static constexpr uint32_t kKc = kDr + kTile, kQc = kKc + kTile, kKi = kQc + kTile;
  static constexpr uint32_t kE = kKi + kTile;                    // log2 decay less ref, f32
  static constexpr uint32_t kDg = kE + kChunk * kFloatRow;       // by the running decay, f32
  static constexpr uint32_t kSmall = kDg + kChunk * kFloatRow;   // dA, dP: rows of 80 bytes
  static constexpr uint32_t kTotals = kSmall + 2 * kChunk * 80;  // [8][128] f32
  static constexpr uint32_t kChannel = kTotals + 4096;    // 2^ref, 2^(end - ref), 2^end, and a sum
  static constexpr uint32_t kNorms = kChannel + 4 * 512;  // [2][32] f32: q, k
  static constexpr uint32_t kDots = kNorms + 256;         // [8][2][32] f32
  static constexpr uint32_t kDiagonal = kDots + 2048;     // [32] f32: dO_i . U_i
  static constexpr uint32_t kBytes = kDiagonal + 128;
};

/// Gradients of one warp: 32 tokens x 16 keys, as two by two mma accumulators.
using GradientTile = float[2][2][4];

/// d += a b^T-like products over kSteps x 16: `a_at(m, step)` and `b_at(step)` give the lane's
/// ldmatrix addresses; b_at covers 16 columns.
template <int kSteps, bool kTransposeA, bool kTransposeB, class AAt, class BAt>
__device__ __forceinline__ void Product(GradientTile& d, AAt&& a_at, BAt&& b_at) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t b[4];
    if constexpr (kTransposeB) {
      LoadMatrix4Transposed(b, b_at(s));
    } else {
      LoadMatrix4(b, b_at(s));
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t a[4];
      if constexpr (kTransposeA) {
        LoadMatrix4Transposed(a, a_at(m, s));
      } else {
        LoadMatrix4(a, a_at(m, s));
      }
      MmaBf16(d[m][0], a, b[0], b[1]);
      MmaBf16(d[m][1], a, b[2], b[3]);
    }
  }
}

__device__ __forceinline__ float LoadF(uint32_t address) {
  float r;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ void StoreF(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

/// A thread's share of a dumped state: fetched early, put into the tile [value][key] later.
struct GradientState {
  uint4 x[8];

  __device__ __forceinline__ void Fetch(const uint4* dump) {
    const int half = threadIdx.x / 128, thread = threadIdx.x % 128;
#pragma unroll
    for (int s = 0; s < 8; ++s) x[s] = __ldcs(dump + half * 1024 + s * 128 + thread);
  }
  __device__ __forceinline__ void Put(uint32_t tile) const {
    const int half = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int matrix = lane / 8;
    const uint32_t row = 64 * half + 16 * warp + lane % 8 + 8 * (matrix & 1);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const uint32_t to = tile + row * GradientLayout::kRow + (16 * s + 8 * (matrix >> 1)) * 2;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "r"(x[s].x), "r"(x[s].y), "r"(x[s].z), "r"(x[s].w)
                   : "memory");
    }
  }
};

/// Starts the copy of a chunk's rows into a tile; missing rows become zeros.
__device__ __forceinline__ void GradientLoadRows(const bf16* from, int64_t row_stride, int count,
                                                 uint32_t tile) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = threadIdx.x / 16 + 16 * i, piece = threadIdx.x % 16;
    CopyAsync(tile + row * GradientLayout::kRow + piece * 16,
              from + (row < count ? row : 0) * row_stride + piece * 8, row < count);
  }
}

/// Norms, running decays and the tiles Kc, Qc, Ki: four tokens a warp, four channels a lane.
__device__ __forceinline__ void GradientPrep(const KdaParams& p, int64_t token, int count, int head,
                                             uint32_t base) {
  using At = GradientLayout;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const PrepHead h(p, head, lane);
  float q[4][4], k[4][4], G[4][4], c[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * warp + i;
    const bool valid = row < count;
    const int64_t t = token + (valid ? row : 0), at = head * 128 + lane * 4;
    const uint2 none = {0, 0};
    const uint2 qr = valid ? *reinterpret_cast<const uint2*>(p.q + t * p.q_row + at) : none;
    const uint2 kr = valid ? *reinterpret_cast<const uint2*>(p.k + t * p.k_row + at) : none;
    const uint2 fr = *reinterpret_cast<const uint2*>(p.f + t * p.f_row + at);
    q[i][0] = Low(qr.x), q[i][1] = High(qr.x), q[i][2] = Low(qr.y), q[i][3] = High(qr.y);
    k[i][0] = Low(kr.x), k[i][1] = High(kr.x), k[i][2] = Low(kr.y), k[i][3] = High(kr.y);
    const float f[4] = {Low(fr.x), High(fr.x), Low(fr.y), High(fr.y)};
    float qq = 0, kk = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      qq += q[i][j] * q[i][j], kk += k[i][j] * k[i][j];
      const float s = Reciprocal(1.f + Exp2(fmaf(h.slope, f[j], h.offset[j])));
      c[j] = fmaf(valid ? h.bound : 0.f, s, c[j]);
      G[i][j] = c[j];
    }
    const float q_norm = ReciprocalRoot(WarpSum(qq) + kNormEps);
    const float k_norm = ReciprocalRoot(WarpSum(kk) + kNormEps);
    if (lane == 0) {
      StoreF(base + At::kNorms + row * 4, q_norm);
      StoreF(base + At::kNorms + 128 + row * 4, k_norm);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) q[i][j] *= q_norm * h.scale, k[i][j] *= k_norm;
  }
  StoreF4(base + At::kTotals + warp * 512 + lane * 16, make_float4(c[0], c[1], c[2], c[3]));
  __syncthreads();
  float before[4] = {0, 0, 0, 0}, middle[4] = {0, 0, 0, 0}, all[4] = {0, 0, 0, 0};
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    const float4 t4 = LoadF4(base + At::kTotals + w * 512 + lane * 16);
    const float t[4] = {t4.x, t4.y, t4.z, t4.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (w < warp) before[j] += t[j];
      if (w < 4) middle[j] += t[j];
      all[j] += t[j];
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) middle[j] = rintf(middle[j]);
  if (warp == 0) {
    const uint32_t to = base + At::kChannel + lane * 16;
    StoreF4(to, make_float4(Exp2(middle[0]), Exp2(middle[1]), Exp2(middle[2]), Exp2(middle[3])));
    StoreF4(to + 512, make_float4(Exp2(all[0] - middle[0]), Exp2(all[1] - middle[1]),
                                  Exp2(all[2] - middle[2]), Exp2(all[3] - middle[3])));
    StoreF4(to + 1024, make_float4(Exp2(all[0]), Exp2(all[1]), Exp2(all[2]), Exp2(all[3])));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float e[4], up[4], down[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      e[j] = G[i][j] + before[j] - middle[j], up[j] = Exp2(e[j]), down[j] = Exp2(-e[j]);
    }
    const uint32_t row = 4 * warp + i, at = row * At::kRow + lane * 8;
    StoreF4(base + At::kE + row * At::kFloatRow + lane * 16, make_float4(e[0], e[1], e[2], e[3]));
    Store64(base + At::kKc + at, PackBf16(k[i][0] * up[0], k[i][1] * up[1]),
            PackBf16(k[i][2] * up[2], k[i][3] * up[3]));
    Store64(base + At::kQc + at, PackBf16(q[i][0] * up[0], q[i][1] * up[1]),
            PackBf16(q[i][2] * up[2], q[i][3] * up[3]));
    Store64(base + At::kKi + at, PackBf16(k[i][0] * down[0], k[i][1] * down[1]),
            PackBf16(k[i][2] * down[2], k[i][3] * down[3]));
  }
}

/// dA (warps 0 to 3) and dP (4 to 7), masked, in bf16; a warp takes 16 columns of all rows or none.
__device__ __forceinline__ void GradientPairs(uint32_t base, int warp, int lane) {
  using At = GradientLayout;
  if (warp % 4 >= 2) return;
  const int half = warp % 4;  // columns 16 half ...
  const bool dp = warp >= 4;
  const uint32_t rows = (lane % 16) * At::kRow + (lane / 16) * 16;
  const uint32_t columns = ((lane % 8) + (lane / 16) * 8) * At::kRow + ((lane / 8) % 2) * 16;
  const uint32_t a = base + (dp ? At::kDr : At::kDo) + rows;
  const uint32_t b = base + At::kU + half * 16 * At::kRow + columns;
  GradientTile d = {};
  Product<8, false, false>(
      d, [&](int m, int s) { return a + m * 16 * At::kRow + s * 32; },
      [&](int s) { return b + s * 32; });
  const float sign = dp ? -1.f : 1.f;
  const uint32_t to = base + At::kSmall + (dp ? kChunk * 80 : 0);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = 16 * m + lane / 4 + 8 * r, c = 16 * half + 8 * n + 2 * (lane % 4);
        const float x = sign * d[m][n][2 * r], y = sign * d[m][n][2 * r + 1];
        Store32(to + row * 80 + c * 2, PackBf16(c < row ? x : 0.f, c + 1 < row ? y : 0.f));
        if (warp < 4 && (c == row || c + 1 == row)) {
          StoreF(base + At::kDiagonal + row * 4, c == row ? x : y);
        }
      }
    }
  }
}

}  // namespace k3::cuda
