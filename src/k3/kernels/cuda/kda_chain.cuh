// The serial part of the chunk form. One warpgroup keeps S^T [64 values x 128 keys] in fp32 wgmma
// accumulators and runs, a chunk at a time,
//   U = M (V - Kd S)    O = Qd S + A U    S = diag(decay) S + Kr^T U
// transposed: the state is the register operand, a record's tiles are the shared one.
#pragma once

#include "k3/kernels/cuda/kda_prep.cuh"

namespace k3::cuda {

// o leaves through a tile [32 tokens][64 values]. A warp touches its own 16 columns only, so no
// barrier is needed around it.
constexpr uint32_t kOutputRow = 144;  // 64 values and 16 bytes against bank conflicts
constexpr uint32_t kOutputTile = kChunk * kOutputRow;

/// Shared memory and barriers of one chain warpgroup.
struct ChainSmem {
  uint32_t stages, full, empty;  // kStages of each, shared by a head's warpgroups
  uint32_t values;               // offset of this warpgroup's values in a stage
  uint32_t output;               // one tile
};

/// What one warpgroup works on: 64 value columns of one head of one sequence.
struct ChainJob {
  Rows rows;
  int chunks, head, column;  // column: first value inside the head
  int64_t state;             // offset of the state [128][128] in s_in, s_out
};


/// Stores a warp's columns of a chunk of which `left` rows exist, 16 bytes of two rows a lane.
__device__ __forceinline__ void ChainStoreOutputs(bf16* to, int64_t row_stride, int left,
                                                  uint32_t tile, int lane) {
  StoreIf(to, Load128(tile), lane / 2 < left);
  StoreIf(to + 16 * row_stride, Load128(tile + 16 * kOutputRow), lane / 2 + 16 < left);
}

/// Accumulator element (4 j + i) of a thread is value `Value(i)`, key 8 j + `Key(i)`.
__device__ __forceinline__ int ChainValue(int warp, int lane, int i) {
  return 16 * warp + lane / 4 + 8 * (i / 2);
}
__device__ __forceinline__ int ChainKey(int lane, int i) { return 2 * (lane % 4) + i % 2; }

__device__ __forceinline__ void ChainLoadState(const float* from, const ChainJob& job, int warp,
                                               int lane, float (&S)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int key = 8 * (i / 4) + ChainKey(lane, i % 4);
    S[i] = from ? from[job.state + key * 128 + job.column + ChainValue(warp, lane, i % 4)] : 0.f;
  }
}
__device__ __forceinline__ void ChainStoreState(float* to, const ChainJob& job, int warp, int lane,
                                                const float (&S)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int key = 8 * (i / 4) + ChainKey(lane, i % 4);
    to[job.state + key * 128 + job.column + ChainValue(warp, lane, i % 4)] = S[i];
  }
}

/// Accumulators of 8 N columns as bf16 register operands of wgmma.
template <int N>
__device__ __forceinline__ void PackOperand(const float (&x)[N], uint32_t (&packed)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) packed[i] = PackBf16(x[2 * i], x[2 * i + 1]);
}

/// Offset of a lane's row of an 8x8 matrix of tile rows 16 j ... of 64 values a row: ldmatrix.trans
/// and stmatrix.trans turn [token][value] into fragments of [value][token].
__device__ __forceinline__ uint32_t ValueOffset(uint32_t row_bytes, int warp, int lane) {
  return ((lane % 8) + (lane / 16) * 8) * row_bytes + (16 * warp + ((lane / 8) % 2) * 8) * 2;
}

/// One chunk. On return S holds the new state and the output tile is in shared memory. `between`
/// runs while the first products are under way: there is time for loads and stores, not for
/// branches, which would make the compiler wait for every product by itself.
template <uint32_t kValueRow, class Between>
__device__ __forceinline__ void ChainStep(uint32_t record, uint32_t values, uint32_t empty,
                                          uint32_t output, int lane, float (&S)[64],
                                          Between&& between) {
  // At most one product's accumulators besides S are live at a time: registers saved here go to the
  // prep warpgroups, which need them more.
  uint32_t state[32], y[8], v[8];
  PackOperand(S, state);
  const uint32_t record16 = record >> 4;
  {
    float x[16];
    WgmmaFence();
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const uint32_t at = record16 + (kRecordKd + (s / 4) * 4096 + (s % 4) * 32) / 16;
      WgmmaRs<0>(x, state + 4 * s, Descriptor<128, 1024>(at), s > 0);
    }
    WgmmaCommit();
    between();
    LoadMatrix4Transposed(v, values);
    LoadMatrix4Transposed(v + 4, values + 16 * kValueRow);
    WgmmaWait<0>();
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = PackBf16(Low(v[i]) - x[2 * i], High(v[i]) - x[2 * i + 1]);
    WgmmaFence();
#pragma unroll
    for (int s = 0; s < 2; ++s) {  // M is stored transposed, along the rows of the product
      WgmmaRs<1>(x, y + 4 * s, Descriptor<64, 512>(record16 + (kRecordM + s * 1024) / 16), s > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    PackOperand(x, y);
  }
  float o[16];
  WgmmaFence();
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint32_t at = record16 + (kRecordQd + (s / 4) * 4096 + (s % 4) * 32) / 16;
    WgmmaRs<0>(o, state + 4 * s, Descriptor<128, 1024>(at), s > 0);
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    WgmmaRs<0>(o, y + 4 * s, Descriptor<64, 512>(record16 + (kRecordA + s * 32) / 16), 1);
  }
  WgmmaCommit();
#pragma unroll
  for (int j = 0; j < 16; ++j) {  // decay the state while the tensor cores read its copy
    const float2 d = LoadF2(record + kRecordDecay + (8 * j + 2 * (lane % 4)) * 4);
    S[4 * j] *= d.x, S[4 * j + 1] *= d.y, S[4 * j + 2] *= d.x, S[4 * j + 3] *= d.y;
  }
  WgmmaFence();
#pragma unroll
  for (int s = 0; s < 2; ++s) {  // stored along the keys: N; two spans of 64 keys
    WgmmaRs<1>(S, y + 4 * s, Descriptor<128, 1024, 4096>(record16 + (kRecordKr + s * 2048) / 16), 1);
  }
  WgmmaCommit();
  WgmmaWait<1>();
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    StoreMatrix4Transposed(output + s * 16 * kOutputRow, PackBf16(o[8 * s], o[8 * s + 1]),
                           PackBf16(o[8 * s + 2], o[8 * s + 3]),
                           PackBf16(o[8 * s + 4], o[8 * s + 5]),
                           PackBf16(o[8 * s + 6], o[8 * s + 7]));
  }
  WgmmaWait<0>();
  __syncwarp();
  if (lane == 0) BarrierArrive(empty);
}

/// The whole chain of one job; stages hold kWidth values a token.
template <int kStages, int kWidth>
__device__ __forceinline__ void ChainForward(const KdaParams& p, const ChainJob& job,
                                             const ChainSmem& sm) {
  using StageLayout = Stage<kWidth>;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t values = sm.values + ValueOffset(StageLayout::kValueRow, warp, lane);
  const uint32_t fragment = sm.output + ValueOffset(kOutputRow, warp, lane);
  const uint32_t piece = sm.output + lane / 2 * kOutputRow + 32 * warp + 16 * (lane % 2);
  float S[64];
  ChainLoadState(p.s_in, job, warp, lane, S);
  int stage = 0;
  uint32_t parity = 0;
  bf16* o = p.o + (job.rows.begin - kChunk + lane / 2) * p.o_row + job.head * 128 + job.column +
            16 * warp + 8 * (lane % 2);  // of the chunk before
  for (int n = 0; n < job.chunks; ++n) {
    const uint32_t record = sm.stages + stage * StageLayout::kBytes;
    BarrierWait(sm.full + 8 * stage, parity);
    __syncwarp();
    ChainStep<StageLayout::kValueRow>(record, record + values, sm.empty + 8 * stage, fragment, lane,
                                      S, [&] {
                                        ChainStoreOutputs(o, p.o_row, n ? kChunk : 0, piece, lane);
                                        o += kChunk * p.o_row;
                                        __syncwarp();
                                      });
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __syncwarp();
  if (job.chunks > 0) {
    ChainStoreOutputs(o, p.o_row, job.rows.count - (job.chunks - 1) * kChunk, piece, lane);
  }
  if (p.s_out) ChainStoreState(p.s_out, job, warp, lane, S);
}

}  // namespace k3::cuda
