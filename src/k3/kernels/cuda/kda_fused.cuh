// The fused kernel: one block runs one head of one sequence. Two warpgroups prepare chunks in turn,
// two run the chain of 64 values each; records stay in shared memory.
#pragma once

#include "k3/kernels/cuda/kda_chain.cuh"
#include "k3/kernels/kda_check_internal.h"

namespace k3::cuda {

static_assert(kChunk == kda::kChunk && kRecordBytes == kda::kRecordBytes);

/// Records of sequence s start at slot cu[s] / 32 + s: no two sequences meet, and no sum is needed.
__device__ __forceinline__ int64_t FirstSlot(const Rows& rows, int s) {
  return rows.begin / kChunk + s;
}

/// Which chunk a slot holds; count 0 when it holds none.
struct SlotJob {
  int64_t token;
  int count;
};
__device__ __forceinline__ SlotJob FindSlot(const KdaParams& p, int64_t slot) {
  int low = 0, high = p.n_sequences - 1;  // the last sequence whose first slot is <= slot
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (FirstSlot(SequenceRows(p.cu, p.n_tokens, middle), middle) <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const Rows rows = SequenceRows(p.cu, p.n_tokens, low);
  const int64_t at = (slot - FirstSlot(rows, low)) * kChunk;
  if (at < 0 || at >= rows.count) return {0, 0};
  return {rows.begin + at, static_cast<int>(min(int64_t{kChunk}, rows.count - at))};
}

__device__ __forceinline__ uint32_t AlignedShared(const void* dynamic) {
  return (SharedAddress(dynamic) + 1023) & ~1023u;
}

/// The sequence of rank `rank` when the longest come first, so that the last blocks are short ones.
/// Called by the whole block. Long lists keep their order.
__device__ inline int SequenceOfRank(const KdaParams& p, int rank, int* shared) {
  if (p.n_sequences == 1 || p.n_sequences > 256) return rank;
  const int s = threadIdx.x;
  if (s < p.n_sequences) {
    const int mine = SequenceRows(p.cu, p.n_tokens, s).count;
    int before = 0;
    for (int other = 0; other < p.n_sequences; ++other) {
      const int length = SequenceRows(p.cu, p.n_tokens, other).count;
      before += length > mine || (length == mine && other < s);
    }
    if (before == rank) *shared = s;
  }
  __syncthreads();
  return *shared;
}

constexpr int kFusedStages = 3;

// Registers a thread of each role; both sum up to twice the 128 of the launch. The chain waits for
// records anyway, so it is the one that lives with fewer than it would like.
constexpr int kChainRegisters = 144, kPrepRegisters = 256 - kChainRegisters;
struct FusedLayout {
  static constexpr uint32_t kStage = Stage<128>::kBytes;
  static constexpr uint32_t kPrep = kFusedStages * kStage;  // two prep warpgroups
  static constexpr uint32_t kOutputs = kPrep + 2 * kPrepBytes;
  static constexpr uint32_t kFull = kOutputs + 2 * kOutputTile;
  static constexpr uint32_t kEmpty = kFull + 8 * kFusedStages;
  static constexpr uint32_t kDynamic = kEmpty + 8 * kFusedStages + 1024;
};
static_assert(FusedLayout::kDynamic <= 227 * 1024);

/// A prep warpgroup of the fused kernel: every second chunk.
template <ChainKind kKind>
__device__ __forceinline__ void FusedPrep(const KdaParams& p, const Rows& rows, int chunks,
                                          int head, uint32_t base, int group) {
  using Layout = FusedLayout;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t smem = base + Layout::kPrep + group * kPrepBytes;
  const int barrier = 3 + group;
  const PrepHead h(p, head, lane);
  int stage = group % kFusedStages;
  uint32_t parity = 0;
  // Tokens of the n-th chunk on the way: the reverse chain starts at the end.
  auto first_of = [&](int n) {
    return (kKind == ChainKind::kReverse ? chunks - 1 - n : n) * kChunk;
  };
  auto count_of = [&](int n) { return min(kChunk, rows.count - first_of(n)); };
  uint32_t logit = 0;
  if (group < chunks) {
    logit = PrepLogit(p, rows.begin + first_of(group), count_of(group), head, lane);
    PrepLoad(p, rows.begin + first_of(group), count_of(group), head, smem + kPrepRaw, warp, lane);
  }
  for (int n = group; n < chunks; n += 2) {
    const float beta = PrepBeta(logit);
    PrepTokens x;
    CopyWait<0>();
    __syncwarp();
    PrepGate(h, smem + kPrepRaw, count_of(n), warp, lane, x);
    StoreF4(smem + kPrepTotals + warp * 512 + lane * 16,
            make_float4(x.G[7][0], x.G[7][1], x.G[7][2], x.G[7][3]));
    NamedBarrier(barrier, 128);
    const uint32_t to = base + stage * Layout::kStage;
    BarrierWait(base + Layout::kEmpty + 8 * stage, parity ^ 1);
    LoadValues<128>(p, rows.begin + first_of(n), count_of(n), head * 128, to + Stage<128>::kValues,
                    threadIdx.x % 128, 128);
    CopyCommit();
    PrepTiles(x, smem, to, warp, lane);
    FenceAsync();
    __syncwarp();
    if (n + 2 < chunks) {
      logit = PrepLogit(p, rows.begin + first_of(n + 2), count_of(n + 2), head, lane);
      PrepLoad(p, rows.begin + first_of(n + 2), count_of(n + 2), head, smem + kPrepRaw, warp, lane);
    } else {
      CopyCommit();
    }
    NamedBarrier(barrier, 128);
    PrepProducts(smem, to, beta, barrier, warp, lane);
    FenceAsync();
    CopyWait<1>();  // the values
    BarrierArrive(base + Layout::kFull + 8 * stage);
    stage += 2;
    if (stage >= kFusedStages) stage -= kFusedStages, parity ^= 1;
  }
}

template <ChainKind kKind>
__global__ void __launch_bounds__(512, 1) FusedKernel(const __grid_constant__ KdaParams p) {
  using Layout = FusedLayout;
  extern __shared__ unsigned char dynamic[];
  __shared__ int sequence_of_rank;
  const uint32_t base = AlignedShared(dynamic);
  const int head = blockIdx.x % p.n_heads;
  const int sequence = SequenceOfRank(p, blockIdx.x / p.n_heads, &sequence_of_rank);
  const Rows rows = SequenceRows(p.cu, p.n_tokens, sequence);
  const int chunks = __shfl_sync(~0u, (rows.count + kChunk - 1) / kChunk, 0);  // uniform
  if (threadIdx.x == 0) {
    for (int i = 0; i < kFusedStages; ++i) {
      BarrierInit(base + Layout::kFull + 8 * i, 128);
      BarrierInit(base + Layout::kEmpty + 8 * i, 8 * kWarpArrivals);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = 0; i < kFusedStages; ++i) PrepClearM(base + i * Layout::kStage, threadIdx.x);
  FenceAsync();
  __syncthreads();

  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // uniform
  if (group >= 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kPrepRegisters));
    FusedPrep<kKind>(p, rows, chunks, head, base, group - 2);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kChainRegisters));
    const ChainJob job = {rows,
                          chunks,
                          head,
                          64 * group,
                          (static_cast<int64_t>(sequence) * p.n_heads + head) * 128 * 128,
                          FirstSlot(rows, sequence)};
    const ChainSmem sm = {base, base + Layout::kFull, base + Layout::kEmpty,
                          Stage<128>::kValues + 128 * group,
                          base + Layout::kOutputs + group * kOutputTile};
    RunChain<kKind, kFusedStages, 128>(p, job, sm);
  }
}

}  // namespace k3::cuda
