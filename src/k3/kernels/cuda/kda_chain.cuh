// The serial part of the chunk form. One warpgroup keeps S^T [64 values x 128 keys] in fp32 wgmma
// accumulators and runs, a chunk at a time,
//   U = M (V - Kd S)    O = Qd S + A U    S = diag(decay) S + Kr^T U
// transposed: the state is the register operand, a record's tiles are the shared one.
#pragma once

#include "k3/kernels/cuda/kda_prep.cuh"

namespace k3::cuda {

// v and o pass through shared memory in tiles [32 tokens][64 values]. A warp touches its own 16
// columns only, so no barrier is needed around them.
constexpr uint32_t kValueRow = 144;  // 64 values and 16 bytes against bank conflicts
constexpr uint32_t kValueTile = kChunk * kValueRow;

/// Shared memory and barriers of one chain warpgroup.
struct ChainSmem {
  uint32_t records, full, empty;  // kStages of each, shared by a head's warpgroups
  uint32_t values;                // kValueStages tiles
  uint32_t output;                // one tile
};

/// What one warpgroup works on: 64 value columns of one head of one sequence.
struct ChainJob {
  Rows rows;
  int chunks, head, column;  // column: first value inside the head
  int64_t state;             // offset of the state [128][128] in s_in, s_out
};

/// Where a lane's 16-byte piece of two rows of a chunk, 16 apart, lies; moves on chunk by chunk.
struct ValuePointer {
  const bf16* at;
  int64_t row;  // elements

  __device__ __forceinline__ ValuePointer(const bf16* base, int64_t row_stride, const ChainJob& job,
                                          int warp, int lane)
      : at(base + (job.rows.begin + lane / 2) * row_stride + job.head * 128 + job.column +
           16 * warp + 8 * (lane % 2)),
        row(row_stride) {}
  __device__ __forceinline__ void Next() { at += kChunk * row; }
};
__device__ __forceinline__ uint32_t ValuePiece(int warp, int lane) {
  return lane / 2 * kValueRow + 32 * warp + 16 * (lane % 2);
}

/// Starts the load of a warp's columns of a chunk of which `left` rows exist: one group of copies.
/// Missing rows become zeros; nothing is read for them.
__device__ __forceinline__ void ChainLoadValues(ValuePointer& v, int left, uint32_t tile, int lane) {
  CopyAsync(tile, v.at, lane / 2 < left);
  CopyAsync(tile + 16 * kValueRow, v.at + 16 * v.row, lane / 2 + 16 < left);
  CopyCommit();
  v.Next();
}

/// Stores a warp's columns of a chunk's outputs.
__device__ __forceinline__ void ChainStoreOutputs(ValuePointer& o, int left, uint32_t tile,
                                                  int lane) {
  bf16* to = const_cast<bf16*>(o.at);
  StoreIf(to, Load128(tile), lane / 2 < left);
  StoreIf(to + 16 * o.row, Load128(tile + 16 * kValueRow), lane / 2 + 16 < left);
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
__device__ __forceinline__ uint32_t ValueOffset(int warp, int lane) {
  return ((lane % 8) + (lane / 16) * 8) * kValueRow + (16 * warp + ((lane / 8) % 2) * 8) * 2;
}

/// One chunk. On return S holds the new state and the output tile is in shared memory. `between`
/// runs while the first products are under way: there is time for loads and stores, not for
/// branches, which would make the compiler wait for every product by itself.
template <class Between>
__device__ __forceinline__ void ChainStep(uint32_t record, uint32_t values, uint32_t empty,
                                          uint32_t output, int lane, float (&S)[64],
                                          Between&& between) {
  uint32_t state[32], v[8];
  PackOperand(S, state);
  float x[16], o[16];
  const uint32_t record16 = record >> 4;
  WgmmaFence();
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint32_t at = record16 + (kRecordKd + (s / 4) * 4096 + (s % 4) * 32) / 16;
    WgmmaRs<0>(x, state + 4 * s, Descriptor<128, 1024>(at), s > 0);
  }
  WgmmaCommit();
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint32_t at = record16 + (kRecordQd + (s / 4) * 4096 + (s % 4) * 32) / 16;
    WgmmaRs<0>(o, state + 4 * s, Descriptor<128, 1024>(at), s > 0);
  }
  WgmmaCommit();
  between();
  LoadMatrix4Transposed(v, values);
  LoadMatrix4Transposed(v + 4, values + 16 * kValueRow);
  WgmmaWait<1>();
  uint32_t y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = PackBf16(Low(v[i]) - x[2 * i], High(v[i]) - x[2 * i + 1]);
#pragma unroll
  for (int j = 0; j < 16; ++j) {  // decay the state while the tensor cores read its copy
    const float2 d = LoadF2(record + kRecordDecay + (8 * j + 2 * (lane % 4)) * 4);
    S[4 * j] *= d.x, S[4 * j + 1] *= d.y, S[4 * j + 2] *= d.x, S[4 * j + 3] *= d.y;
  }
  WgmmaFence();
#pragma unroll
  for (int s = 0; s < 2; ++s) {  // M is stored transposed, along the rows of the product
    WgmmaRs<1>(x, y + 4 * s, Descriptor<64, 512>(record16 + (kRecordM + s * 1024) / 16), s > 0);
  }
  WgmmaCommit();
  WgmmaWait<0>();
  uint32_t u[8];
  PackOperand(x, u);
  WgmmaFence();
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    WgmmaRs<0>(o, u + 4 * s, Descriptor<64, 512>(record16 + (kRecordA + s * 32) / 16), 1);
  }
  WgmmaCommit();
#pragma unroll
  for (int s = 0; s < 2; ++s) {  // stored along the keys: N; two spans of 64 keys
    WgmmaRs<1>(S, u + 4 * s, Descriptor<128, 1024, 4096>(record16 + (kRecordKr + s * 2048) / 16), 1);
  }
  WgmmaCommit();
  WgmmaWait<1>();
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    StoreMatrix4Transposed(output + s * 16 * kValueRow, PackBf16(o[8 * s], o[8 * s + 1]),
                           PackBf16(o[8 * s + 2], o[8 * s + 3]),
                           PackBf16(o[8 * s + 4], o[8 * s + 5]),
                           PackBf16(o[8 * s + 6], o[8 * s + 7]));
  }
  WgmmaWait<0>();
  __syncwarp();
  if (lane == 0) BarrierArrive(empty);
}

/// The whole chain of one job. `kValueStages` tiles of values rotate: one is read, the others load.
template <int kStages, int kValueStages>
__device__ __forceinline__ void ChainForward(const KdaParams& p, const ChainJob& job,
                                             const ChainSmem& sm) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t fragment = ValueOffset(warp, lane), piece = ValuePiece(warp, lane);
  ValuePointer v(p.v, p.v_row, job, warp, lane), o(p.o, p.o_row, job, warp, lane);
  float S[64];
  int left = job.rows.count;
  for (int n = 0; n < kValueStages - 1; ++n) {
    ChainLoadValues(v, left - n * kChunk, sm.values + n * kValueTile + piece, lane);
  }
  ChainLoadState(p.s_in, job, warp, lane, S);
  int stage = 0, slot = 0;
  uint32_t parity = 0;
  o.at -= kChunk * o.row;  // of the chunk before
  for (int n = 0; n < job.chunks; ++n, left -= kChunk) {
    const uint32_t before = sm.values + (slot ? slot - 1 : kValueStages - 1) * kValueTile + piece;
    CopyWait<kValueStages - 2>();
    BarrierWait(sm.full + 8 * stage, parity);
    __syncwarp();
    ChainStep(sm.records + stage * kStageBytes, sm.values + slot * kValueTile + fragment,
              sm.empty + 8 * stage, sm.output + fragment, lane, S, [&] {
                ChainStoreOutputs(o, n ? kChunk : 0, sm.output + piece, lane);
                o.Next();
                ChainLoadValues(v, left - (kValueStages - 1) * kChunk, before, lane);
                __syncwarp();
              });
    if (++stage == kStages) stage = 0, parity ^= 1;
    if (++slot == kValueStages) slot = 0;
  }
  __syncwarp();
  if (job.chunks > 0) ChainStoreOutputs(o, left + kChunk, sm.output + piece, lane);
  if (p.s_out) ChainStoreState(p.s_out, job, warp, lane, S);
}

}  // namespace k3::cuda
