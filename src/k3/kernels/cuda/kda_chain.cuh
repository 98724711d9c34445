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
  int chunks, head, column;  // column: first value inside the head, 0 or 64
  int64_t state;             // offset of the state [128][128] in s_in, s_out
  int64_t slot = 0;          // of the first chunk in `dump`
};

/// kForward: outputs o. kStates: the forward chain for the backward pass: outputs U and dumps the
/// state before every chunk. kReverse: the chain of dS from the last chunk to the first,
///   dU = A^T dO + Kr dS    dR = M^T dU    dS = diag(decay) dS + Qd^T dO - Kd^T dR
/// with dO in the place of v; outputs dR, which is dv, and dumps dS behind every chunk.
enum class ChainKind { kForward, kStates, kReverse };

/// Where chunk `slot` of a head dumps 64 columns of a state: [8][128 threads] 16-byte fragments.
__device__ __forceinline__ uint4* StateDump(const KdaParams& p, int64_t slot, int head, int half) {
  return p.dump + ((slot * p.n_heads + head) * 2 + half) * 1024;
}

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

/// x = S b^T over the 128 channels of a tile: `tile16` is its address / 16. S is packed and used in
/// kPieces pieces, with a wait between them: a whole copy needs 16 registers more than half of one.
/// kept(first, packed) sees each piece; `first` counts fragments of four registers.
template <int kPieces, class Kept>
__device__ __forceinline__ void TileProduct(float (&x)[16], const float (&S)[64], uint32_t tile16,
                                            Kept&& kept) {
  constexpr int kSteps = 8 / kPieces;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    uint32_t a[4 * kSteps];
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      const int at = 8 * kSteps * piece + 2 * i;
      a[i] = PackBf16(S[at], S[at + 1]);
    }
    kept(piece * kSteps, a);
    WgmmaFence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int step = piece * kSteps + s;
      const uint32_t at = tile16 + ((step / 4) * 4096 + (step % 4) * 32) / 16;
      WgmmaRs<0>(x, a + 4 * s, Descriptor<128, 1024>(at), step > 0);
    }
    if (piece + 1 < kPieces) {
      WgmmaCommit();
      WgmmaWait<0>();
    }
  }
}

/// x (+)= a B for a [32][32] matrix B of a record; kTransposed: B is stored as it stands (its rows
/// are what a's columns meet), otherwise transposed.
template <int kTransposed>
__device__ __forceinline__ void SmallProduct(float (&x)[16], const uint32_t (&a)[8],
                                             uint32_t matrix16, bool accumulate) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const uint32_t at = matrix16 + s * (kTransposed ? 1024 : 32) / 16;
    WgmmaRs<kTransposed>(x, a + 4 * s, Descriptor<64, 512>(at), accumulate || s > 0);
  }
}

/// S += a T for a tile T [32 tokens][128 channels].
__device__ __forceinline__ void StateProduct(float (&S)[64], const uint32_t (&a)[8],
                                             uint32_t tile16) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    WgmmaRs<1>(S, a + 4 * s, Descriptor<128, 1024, 4096>(tile16 + s * 2048 / 16), 1);
  }
}

__device__ __forceinline__ void DecayState(float (&S)[64], uint32_t record, int lane) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 d = LoadF2(record + kRecordDecay + (8 * j + 2 * (lane % 4)) * 4);
    S[4 * j] *= d.x, S[4 * j + 1] *= d.y, S[4 * j + 2] *= d.x, S[4 * j + 3] *= d.y;
  }
}

__device__ __forceinline__ void StoreTile(uint32_t output, const uint32_t (&x)[8]) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    StoreMatrix4Transposed(output + s * 16 * kOutputRow, x[4 * s], x[4 * s + 1], x[4 * s + 2],
                           x[4 * s + 3]);
  }
}

/// One chunk. On return S holds the new state and the output tile is in shared memory. `between`
/// runs while the first products are under way: there is time for loads and stores, not for
/// branches, which would make the compiler wait for every product by itself.
/// At most one product's accumulators besides S are live at a time: registers saved here go to the
/// prep warpgroups, which need them more.
template <ChainKind kKind, int kPieces, uint32_t kValueRow, class Between>
__device__ __forceinline__ void ChainStep(uint32_t record, uint32_t values, uint32_t empty,
                                          uint32_t output, uint4* dump, int lane, float (&S)[64],
                                          Between&& between) {
  constexpr bool kReverse = kKind == ChainKind::kReverse;
  const uint32_t record16 = record >> 4;
  uint32_t y[8], v[8];
  float x[16];
  if constexpr (kReverse) {
    LoadMatrix4Transposed(v, values);
    LoadMatrix4Transposed(v + 4, values + 16 * kValueRow);
  }
  constexpr int kFragments = 8 / kPieces;  // of a piece of S
  TileProduct<kPieces>(x, S, record16 + (kReverse ? kRecordKr : kRecordKd) / 16,
                       [&](int first, const uint32_t(&a)[4 * kFragments]) {
                         if constexpr (kKind != ChainKind::kForward) {
#pragma unroll
                           for (int s = 0; s < kFragments; ++s) {
                             dump[(first + s) * 128] =
                                 make_uint4(a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3]);
                           }
                         }
                       });
  if constexpr (kReverse) SmallProduct<1>(x, v, record16 + kRecordA / 16, true);
  WgmmaCommit();
  between();
  if constexpr (!kReverse) {
    LoadMatrix4Transposed(v, values);
    LoadMatrix4Transposed(v + 4, values + 16 * kValueRow);
  }
  WgmmaWait<0>();
  if constexpr (kReverse) {
    PackOperand(x, y);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = PackBf16(Low(v[i]) - x[2 * i], High(v[i]) - x[2 * i + 1]);
  }
  WgmmaFence();
  SmallProduct<kReverse ? 0 : 1>(x, y, record16 + kRecordM / 16, false);  // M is stored transposed
  WgmmaCommit();
  WgmmaWait<0>();
  PackOperand(x, y);
  if constexpr (kKind == ChainKind::kForward) {
    TileProduct<kPieces>(x, S, record16 + kRecordQd / 16,
                         [](int, const uint32_t(&)[4 * kFragments]) {});
    SmallProduct<0>(x, y, record16 + kRecordA / 16, true);
    WgmmaCommit();
    DecayState(S, record, lane);  // while the tensor cores read its copy
    WgmmaFence();
    StateProduct(S, y, record16 + kRecordKr / 16);
    WgmmaCommit();
    WgmmaWait<1>();
    PackOperand(x, y);
    StoreTile(output, y);
  } else {
    StoreTile(output, y);
    DecayState(S, record, lane);
    if constexpr (kReverse) {
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] ^= 0x80008000u;
    }
    WgmmaFence();
    StateProduct(S, y, record16 + (kReverse ? kRecordKd : kRecordKr) / 16);
    if constexpr (kReverse) StateProduct(S, v, record16 + kRecordQd / 16);
    WgmmaCommit();
  }
  WgmmaWait<0>();
  BarrierArriveWarp(empty, lane);
}

/// The whole chain of one job; stages hold kWidth values a token.
template <ChainKind kKind, int kStages, int kWidth>
__device__ __forceinline__ void RunChain(const KdaParams& p, const ChainJob& job,
                                         const ChainSmem& sm) {
  using StageLayout = Stage<kWidth>;
  constexpr bool kReverse = kKind == ChainKind::kReverse;
  // Whole heads share their SM with the prep side and are short of registers; half heads are not.
  constexpr int kPieces = kWidth == 128 ? 2 : 1;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t values = sm.values + ValueOffset(StageLayout::kValueRow, warp, lane);
  const uint32_t fragment = sm.output + ValueOffset(kOutputRow, warp, lane);
  const uint32_t piece = sm.output + lane / 2 * kOutputRow + 32 * warp + 16 * (lane % 2);
  const int last = job.rows.count - (job.chunks - 1) * kChunk;  // rows of the last chunk
  float S[64];
  ChainLoadState(p.s_in, job, warp, lane, S);
  int stage = 0;
  uint32_t parity = 0;
  // Outputs are stored a chunk late; `o` points at the chunk before the current one.
  const int64_t step = (kReverse ? -kChunk : kChunk) * p.o_row;
  const int first = kReverse ? job.chunks * kChunk : -kChunk;
  bf16* o = p.o + (job.rows.begin + first + lane / 2) * p.o_row + job.head * 128 + job.column +
            16 * warp + 8 * (lane % 2);
  uint4* dump = nullptr;
  if constexpr (kKind != ChainKind::kForward) {
    const int64_t slot = job.slot + (kReverse ? job.chunks - 1 : 0);
    dump = StateDump(p, slot, job.head, job.column / 64) + threadIdx.x % 128;
  }
  for (int n = 0; n < job.chunks; ++n) {
    const uint32_t record = sm.stages + stage * StageLayout::kBytes;
    const int left = n == 0 ? 0 : kReverse && n == 1 ? last : kChunk;
    BarrierWait(sm.full + 8 * stage, parity);
    __syncwarp();
    ChainStep<kKind, kPieces, StageLayout::kValueRow>(
        record, record + values, sm.empty + 8 * stage, fragment, dump, lane, S, [&] {
          ChainStoreOutputs(o, p.o_row, left, piece, lane);
          o += step;
          __syncwarp();
        });
    if constexpr (kKind != ChainKind::kForward) {
      dump += (kReverse ? -1 : 1) * static_cast<int64_t>(p.n_heads) * 2048;
    }
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __syncwarp();
  if (job.chunks > 0) {
    ChainStoreOutputs(o, p.o_row, kReverse && job.chunks > 1 ? kChunk : last, piece, lane);
  }
  if (p.s_out) ChainStoreState(p.s_out, job, warp, lane, S);
}

}  // namespace k3::cuda
