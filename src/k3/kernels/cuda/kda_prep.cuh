// The token-parallel part of the chunk form: one warpgroup turns 32 tokens of one head into the
// operands of the state chain (a "record").
//
// With G the running sum of log2 decays inside the chunk, ref = G after 16 tokens rounded to a
// whole number, everything per channel:
//   Kc = k 2^(G - ref)   Qc = q 2^(G - ref)   Ki = k 2^(ref - G)
//   L = strict_lower(diag(beta) Kc Ki^T)      A = lower(Qc Ki^T)      M = (I + L)^-1 diag(beta)
//   Kd = Kc 2^ref   Qd = Qc 2^ref   Kr = Ki 2^(G_end - ref)   decay = 2^G_end
// The bound makes one dense product safe: |G - ref| <= 16 x 5 log2(e) + 1 < 117, so no factor
// leaves the range of bf16; entries above the diagonal may overflow and are masked by selection.
// ref is whole, so that Kd and Qd are exact multiples of Kc and Qc in bf16.
#pragma once

#include "k3/kernels/cuda/kda_common.cuh"

namespace k3::cuda {

// A record: tiles [32 tokens][64 channels] twice, rows of 128 bytes with the 128-byte swizzle; M
// transposed and A [32][32], rows of 64 bytes with the 64-byte swizzle; decay [128] f32.
constexpr uint32_t kTile = kChunk * 256;
constexpr uint32_t kRecordKd = 0, kRecordQd = kTile, kRecordKr = 2 * kTile;
constexpr uint32_t kRecordM = 3 * kTile, kRecordA = kRecordM + 2048, kRecordDecay = kRecordA + 2048;
constexpr uint32_t kRecordBytes = kRecordDecay + 512;

// A stage of shared memory: a record and `kWidth` values of its tokens, in rows padded by 16 bytes
// against bank conflicts.
template <int kWidth>
struct Stage {
  static constexpr uint32_t kValueRow = 2 * kWidth + 16, kValues = kRecordBytes;
  static constexpr uint32_t kBytes = (kValues + kChunk * kValueRow + 1023) / 1024 * 1024;
};

// Shared memory of a prep warpgroup. The inverse reuses the Kc, Qc tile once L and A are out of it.
constexpr uint32_t kPrepRaw = 0;  // q, k, f as loaded, rows of 256 bytes
constexpr uint32_t kPrepKcQc = 3 * kTile, kPrepKi = 5 * kTile, kPrepTotals = 6 * kTile;
constexpr uint32_t kPrepBytes = kPrepTotals + 2048;
constexpr uint32_t kSolveBlock = 768;  // two 8x8 blocks of L, rows of 48 bytes
constexpr uint32_t kSolveL = kPrepKcQc, kSolveL21 = kSolveL + 2 * kSolveBlock,
                   kSolveX = kSolveL21 + 768;

/// Gate constants of one lane's four channels of one head.
struct PrepHead {
  float slope, offset[4], bound, scale;

  __device__ __forceinline__ PrepHead(const KdaParams& p, int head, int lane) {
    slope = -__expf(p.a_log[head]) * kLog2e;
    const float4 bias = *reinterpret_cast<const float4*>(p.dt_bias + head * 128 + lane * 4);
    offset[0] = slope * bias.x, offset[1] = slope * bias.y;
    offset[2] = slope * bias.z, offset[3] = slope * bias.w;
    bound = p.lower_bound * kLog2e;
    scale = p.scale;
  }
};

/// Starts the loads of a warp's own eight rows of q, k and f; missing rows become zeros. One group
/// of asynchronous copies; nobody else reads these rows, so __syncwarp is all they need.
__device__ __forceinline__ void PrepLoad(const KdaParams& p, int64_t token, int count, int head,
                                         uint32_t raw, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 8 * warp + 2 * i + lane / 16, piece = lane % 16;
    const bool valid = row < count;
    const int64_t t = token + (valid ? row : 0);
    const uint32_t to = raw + row * 256 + piece * 16;
    CopyAsync(to, p.q + t * p.q_row + head * 128 + piece * 8, valid);
    CopyAsync(to + kTile, p.k + t * p.k_row + head * 128 + piece * 8, valid);
    CopyAsync(to + 2 * kTile, p.f + t * p.f_row + head * 128 + piece * 8, valid);
  }
  CopyCommit();
}

/// Starts the load of `kWidth` values of each token by `threads` threads; missing rows become
/// zeros.
template <int kWidth>
__device__ __forceinline__ void LoadValues(const KdaParams& p, int64_t token, int count, int at,
                                           uint32_t to, int thread, int threads) {
  constexpr int kPieces = kWidth / 8;
#pragma unroll
  for (int i = 0; i < kChunk * kPieces / threads; ++i) {
    const int row = (i * threads + thread) / kPieces, piece = thread % kPieces;
    const bool valid = row < count;
    CopyAsync(to + row * Stage<kWidth>::kValueRow + piece * 16,
              p.v + (token + (valid ? row : 0)) * p.v_row + at + piece * 8, valid);
  }
}

/// The bf16 logit of token `lane`, -inf past the end; loaded a chunk ahead of PrepBeta.
__device__ __forceinline__ uint32_t PrepLogit(const KdaParams& p, int64_t token, int count,
                                              int head, int lane) {
  uint32_t bits = 0xFF80;
  if (lane < count) {
    bits = reinterpret_cast<const uint16_t*>(p.beta)[(token + lane) * p.beta_row + head];
  }
  return bits;
}
__device__ __forceinline__ float PrepBeta(uint32_t logit) { return Sigmoid(Low(logit)); }

/// Adds up 16 values over the warp: the sum of values[v] ends in lanes 2v and 2v + 1.
template <int kCount = 8>
__device__ __forceinline__ float SumSixteen(float (&values)[16], int lane) {
  const bool up = lane & (2 * kCount);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float keep = up ? values[i + kCount] : values[i];
    const float send = up ? values[i] : values[i + kCount];
    values[i] = keep + __shfl_xor_sync(~0u, send, 2 * kCount);
  }
  if constexpr (kCount > 1) {
    return SumSixteen<kCount / 2>(values, lane);
  } else {
    return values[0] + __shfl_xor_sync(~0u, values[0], 1);
  }
}

/// Decays and scaled rows of a warp's eight tokens: registers between the two passes.
struct PrepTokens {
  float G[8][4];  // running log2 decay inside this warp's tokens
  float norm;     // lane 2i: factor of q row i; lane 16 + 2i: of k row i
};

__device__ __forceinline__ void PrepGate(const PrepHead& h, uint32_t raw, int count, int warp,
                                         int lane, PrepTokens& x) {
  float sums[16], c[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t at = raw + (8 * warp + i) * 256 + lane * 8;
    const uint2 q = Load64(at), k = Load64(at + kTile), f = Load64(at + 2 * kTile);
    sums[i] =
        Low(q.x) * Low(q.x) + High(q.x) * High(q.x) + Low(q.y) * Low(q.y) + High(q.y) * High(q.y);
    sums[8 + i] =
        Low(k.x) * Low(k.x) + High(k.x) * High(k.x) + Low(k.y) * Low(k.y) + High(k.y) * High(k.y);
    const float g[4] = {Low(f.x), High(f.x), Low(f.y), High(f.y)};
    const float bound = 8 * warp + i < count ? h.bound : 0.f;  // a missing token decays nothing
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float s = Reciprocal(1.f + Exp2(fmaf(h.slope, g[j], h.offset[j])));
      c[j] = fmaf(bound, s, c[j]);
      x.G[i][j] = c[j];
    }
  }
  x.norm = ReciprocalRoot(SumSixteen(sums, lane) + kNormEps) * (lane < 16 ? h.scale : 1.f);
}

/// Second pass: writes the decayed tiles. `totals` holds the four warps' summed decays.
__device__ __forceinline__ void PrepTiles(const PrepTokens& x, uint32_t smem, uint32_t stage,
                                          int warp, int lane) {
  float shift[4], end[4];
  uint32_t lift[2];
  {
    float t[4][4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float4 y = LoadF4(smem + kPrepTotals + w * 512 + lane * 16);
      t[w][0] = y.x, t[w][1] = y.y, t[w][2] = y.z, t[w][3] = y.w;
    }
    float all[4];
    uint32_t power[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Adding 1.5 x 2^23 rounds to a whole number and leaves it in the low bits.
      const float middle = t[0][j] + t[1][j], magic = middle + 12582912.f, ref = magic - 12582912.f;
      all[j] = middle + t[2][j] + t[3][j];
      shift[j] = (warp > 0 ? t[0][j] : 0.f) + (warp > 1 ? t[1][j] : 0.f) +
                 (warp > 2 ? t[2][j] : 0.f) - ref;
      end[j] = Exp2(all[j] - ref);
      power[j] = (__float_as_uint(magic) - 0x4B400000u + 127u) << 7;  // 2^ref as bf16
    }
    lift[0] = power[0] | power[1] << 16, lift[1] = power[2] | power[3] << 16;
    if (warp == 0) {
      StoreF4(stage + kRecordDecay + lane * 16,
              make_float4(Exp2(all[0]), Exp2(all[1]), Exp2(all[2]), Exp2(all[3])));
    }
  }
  const uint32_t raw = smem + kPrepRaw + 8 * warp * 256 + lane * 8;
  const uint32_t half = lane / 16, column = ((lane % 16) / 2) << 4;
  const uint32_t rest = 8 * warp * 128 + (lane & 1) * 8;
  const uint32_t tiles = smem + kPrepKcQc + half * 8192 + rest;
  const uint32_t inverse = smem + kPrepKi + half * 4096 + rest, record = stage + half * 4096 + rest;
#pragma unroll
  for (int pair = 0; pair < 8; pair += 2) {  // two tokens at once: independent work for each other
    uint2 qr[2], kr[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      qr[n] = Load64(raw + (pair + n) * 256);
      kr[n] = Load64(raw + (pair + n) * 256 + kTile);
    }
    uint32_t kc[2][2], qc[2][2], ki[2][2], out[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int i = pair + n;
      const float q_norm = __shfl_sync(~0u, x.norm, 2 * i);
      const float k_norm = __shfl_sync(~0u, x.norm, 16 + 2 * i);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint32_t qp = j ? qr[n].y : qr[n].x, kp = j ? kr[n].y : kr[n].x;
        const float e0 = x.G[i][j] + shift[j], e1 = x.G[i][j + 1] + shift[j + 1];
        const float up0 = Exp2(e0), up1 = Exp2(e1), down0 = Exp2(-e0), down1 = Exp2(-e1);
        const float k0 = Low(kp) * k_norm, k1 = High(kp) * k_norm;
        const float i0 = k0 * down0, i1 = k1 * down1;
        kc[n][j / 2] = PackBf16(k0 * up0, k1 * up1);
        qc[n][j / 2] = PackBf16(Low(qp) * q_norm * up0, High(qp) * q_norm * up1);
        ki[n][j / 2] = PackBf16(i0, i1);
        out[n][j / 2] = PackBf16(i0 * end[j], i1 * end[j + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int i = pair + n;
      const uint32_t in_row = (column ^ (i << 4)) + i * 128;
      Store64(tiles + in_row, kc[n][0], kc[n][1]);
      Store64(tiles + in_row + 4096, qc[n][0], qc[n][1]);
      Store64(inverse + in_row, ki[n][0], ki[n][1]);
      Store64(record + in_row + kRecordKd, MulBf16x2(kc[n][0], lift[0]),
              MulBf16x2(kc[n][1], lift[1]));
      Store64(record + in_row + kRecordQd, MulBf16x2(qc[n][0], lift[0]),
              MulBf16x2(qc[n][1], lift[1]));
      Store64(record + in_row + kRecordKr, out[n][0], out[n][1]);
    }
  }
}

/// Byte offset of element (row, 2 pair) of a [32][32] bf16 matrix with the 64-byte swizzle.
__device__ __forceinline__ uint32_t SmallOffset(uint32_t row, uint32_t column) {
  return row * 64 + (((column >> 3) ^ ((row >> 1) & 3)) << 4) + (column & 7) * 2;
}

/// X = (I + L)^-1 of one diagonal 16x16 block of L, whose rows g and g + 8 are `l` (fragments of
/// two 8x8 column blocks, not yet masked). The two 8x8 blocks on its diagonal by substitution in
/// fp32, one lane a column; the block below them is -X22 L21 X11. Writes X diag(beta) to M, which
/// is stored transposed, and X in fp16, transposed too, for the block of M below the diagonal.
__device__ __forceinline__ void PrepSolve(uint32_t smem, uint32_t stage, float beta, uint32_t block,
                                          const float (&l)[8], int lane) {
  const uint32_t g = lane / 4, column = 2 * (lane % 4), half = (lane / 8) % 2, c = lane % 8;
  const uint32_t L = smem + kSolveL + block * kSolveBlock, X = smem + kSolveX + block * 768;
  const uint32_t M = stage + kRecordM;
#pragma unroll
  for (uint32_t s = 0; s < 2; ++s) {
    Store64(L + s * 384 + g * 48 + column * 4, __float_as_uint(column < g ? l[6 * s] : 0.f),
            __float_as_uint(column + 1 < g ? l[6 * s + 1] : 0.f));
  }
  const uint32_t below = TransposeMatrix(PackHalf(l[2], l[3]));
  const float mine = __shfl_sync(~0u, beta, block * 16 + half * 8 + c);
  const float b0 = -__shfl_sync(~0u, beta, block * 16 + column);
  const float b1 = -__shfl_sync(~0u, beta, block * 16 + column + 1);
  __syncwarp();
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float sum = static_cast<int>(c) == i ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 row = LoadF4(L + half * 384 + i * 48 + j * 4);
      sum -= row.x * x[j];
      if (j + 1 < i) sum -= row.y * x[j + 1];
      if (j + 2 < i) sum -= row.z * x[j + 2];
      if (j + 3 < i) sum -= row.w * x[j + 3];
    }
    x[i] = sum;
  }
  if (lane < 16) {
    const uint32_t row = half * 8 + c;
    Store128(X + row * 48 + half * 16, make_uint4(PackHalf(x[0], x[1]), PackHalf(x[2], x[3]),
                                                  PackHalf(x[4], x[5]), PackHalf(x[6], x[7])));
    if (half) Store128(X + row * 48, make_uint4(0, 0, 0, 0));
    Store128(M + SmallOffset(block * 16 + row, block * 16 + half * 8),
             make_uint4(PackBf16(x[0] * mine, x[1] * mine), PackBf16(x[2] * mine, x[3] * mine),
                        PackBf16(x[4] * mine, x[5] * mine), PackBf16(x[6] * mine, x[7] * mine)));
  }
  __syncwarp();
  const uint32_t x22 = LoadMatrix1Transposed(X + (8 + c) * 48 + 16), x11 = LoadMatrix1(X + c * 48);
  const float2 p = MmaHalf8(x22, below);
  const float2 d = MmaHalf8(PackHalf(p.x, p.y), x11);
  StoreMatrix1Transposed(X + c * 48 + 16, PackHalf(-d.x, -d.y));
  StoreMatrix1Transposed(M + SmallOffset(block * 16 + c, block * 16 + 8),
                         PackBf16(d.x * b0, d.y * b1));
}

/// X21 = -(X22 L21) X11, scaled by beta, into the block of M below the diagonal.
__device__ __forceinline__ void PrepSolveBelow(uint32_t smem, uint32_t stage, float beta,
                                               int lane) {
  const uint32_t by_rows = (lane % 16) * 48 + (lane / 16) * 16;
  const uint32_t by_columns = ((lane % 8) + (lane / 16) * 8) * 48 + ((lane / 8) % 2) * 16;
  uint32_t a[4], b[4];
  float p0[4] = {0, 0, 0, 0}, p1[4] = {0, 0, 0, 0}, d0[4] = {0, 0, 0, 0}, d1[4] = {0, 0, 0, 0};
  LoadMatrix4Transposed(a, smem + kSolveX + 768 + by_columns);
  LoadMatrix4Transposed(b, smem + kSolveL21 + by_rows);
  MmaHalf(p0, a, b[0], b[1]);
  MmaHalf(p1, a, b[2], b[3]);
  a[0] = PackHalf(p0[0], p0[1]), a[1] = PackHalf(p0[2], p0[3]);
  a[2] = PackHalf(p1[0], p1[1]), a[3] = PackHalf(p1[2], p1[3]);
  LoadMatrix4(b, smem + kSolveX + by_columns);
  MmaHalf(d0, a, b[0], b[1]);
  MmaHalf(d1, a, b[2], b[3]);
  const uint32_t column = 2 * (lane % 4);
  const float b0 = -__shfl_sync(~0u, beta, column), b1 = -__shfl_sync(~0u, beta, column + 1);
  const float b2 = -__shfl_sync(~0u, beta, column + 8), b3 = -__shfl_sync(~0u, beta, column + 9);
  const uint32_t matrix = lane / 8, row = lane % 8 + 8 * (matrix / 2);
  StoreMatrix4Transposed(stage + kRecordM + SmallOffset(row, 16 + 8 * (matrix % 2)),
                         PackBf16(d0[0] * b0, d0[1] * b1), PackBf16(d0[2] * b0, d0[3] * b1),
                         PackBf16(d1[0] * b2, d1[1] * b3), PackBf16(d1[2] * b2, d1[3] * b3));
}

constexpr int kSolveThreads =
    kPlainBarriers ? 128 : 64;  // that meet between the parts of the inverse

/// L and A by wgmma over [Kc; Qc] (64 rows) and Ki, then M. Accumulator rows of warps 0 and 1 are
/// L, of warps 2 and 3 A. `barrier`: named barrier of the warpgroup; barrier + 2 is for warps 0
/// and 1.
__device__ __forceinline__ void PrepProducts(uint32_t smem, uint32_t stage, float beta, int barrier,
                                             int warp, int lane) {
  float acc[16];
  WgmmaFence();
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint32_t a = (smem >> 4) + (kPrepKcQc + (s / 4) * 8192 + (s % 4) * 32) / 16;
    const uint32_t b = (smem >> 4) + (kPrepKi + (s / 4) * 4096 + (s % 4) * 32) / 16;
    WgmmaSs<0>(acc, Descriptor<128, 1024>(a), Descriptor<128, 1024>(b), s > 0);
  }
  WgmmaCommit();
  WgmmaWait<0>();
  NamedBarrier(barrier, 128);  // every warp is done with the tiles that the solver overwrites
  const uint32_t g = lane / 4, column = 2 * (lane % 4);
  if (warp >= 2) {
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r) {
        const uint32_t row = (warp - 2) * 16 + g + 8 * r, c = 8 * j + column;
        Store32(stage + kRecordA + SmallOffset(row, c),
                PackBf16(c <= row ? acc[4 * j + 2 * r] : 0.f,
                         c + 1 <= row ? acc[4 * j + 2 * r + 1] : 0.f));
      }
    }
    if constexpr (kPlainBarriers) NamedBarrier(barrier + 2, kSolveThreads);
    return;
  }
  float l[8];
#pragma unroll
  for (uint32_t r = 0; r < 2; ++r) {
    const float b = __shfl_sync(~0u, beta, warp * 16 + g + 8 * r);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t i = 4 * j + 2 * r + e;
        l[i] = b * (warp ? acc[8 + i] : acc[i]);
      }
      if (warp) {
        Store32(smem + kSolveL21 + (g + 8 * r) * 48 + (8 * j + column) * 2,
                PackHalf(b * acc[4 * j + 2 * r], b * acc[4 * j + 2 * r + 1]));
      }
    }
  }
  PrepSolve(smem, stage, beta, warp, l, lane);
  NamedBarrier(barrier + 2, kSolveThreads);
  if (warp == 1) PrepSolveBelow(smem, stage, beta, lane);
}

/// The block of M above the diagonal (below it as stored) is zero in every record: written once for
/// each stage.
__device__ __forceinline__ void PrepClearM(uint32_t stage, int thread) {
  if (thread < 128) Store128(stage + kRecordM + thread * 16, make_uint4(0, 0, 0, 0));
}

}  // namespace k3::cuda
