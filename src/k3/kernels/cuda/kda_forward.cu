// KDA forward in chunks of 32 tokens, bounded decay, head_dim 128.
#include "k3/kernels/cuda/kda_forward.cuh"

#include <algorithm>

#include "k3/kernels/cuda/kda_chain.cuh"

namespace k3::cuda {
namespace {

__device__ __forceinline__ uint32_t AlignedShared(const void* dynamic) {
  return (SharedAddress(dynamic) + 1023) & ~1023u;
}

/// The sequence of rank `rank` when the longest come first, so that the last blocks are short ones.
/// Called by the whole block. Long lists keep their order.
__device__ int SequenceOfRank(const KdaParams& p, int rank, int* shared) {
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

// One kernel --------------------------------------------------------------------------------------

constexpr int kFusedStages = 3;
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
__device__ __forceinline__ void FusedPrep(const KdaParams& p, const Rows& rows, int chunks, int head,
                                          uint32_t base, int group) {
  using Layout = FusedLayout;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const uint32_t smem = base + Layout::kPrep + group * kPrepBytes;
  const int barrier = 3 + group;
  const PrepHead h(p, head, lane);
  int stage = group % kFusedStages;
  uint32_t parity = 0;
  auto count_of = [&](int n) { return min(kChunk, rows.count - n * kChunk); };
  uint32_t logit = 0;
  if (group < chunks) {
    logit = PrepLogit(p, rows.begin + group * kChunk, count_of(group), head, lane);
    PrepLoad(p, rows.begin + group * kChunk, count_of(group), head, smem + kPrepRaw, warp, lane);
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
    LoadValues<128>(p, rows.begin + n * kChunk, count_of(n), head * 128,
                    to + Stage<128>::kValues, threadIdx.x % 128, 128);
    CopyCommit();
    PrepTiles(x, smem, to, warp, lane);
    FenceAsync();
    __syncwarp();
    if (n + 2 < chunks) {
      logit = PrepLogit(p, rows.begin + (n + 2) * kChunk, count_of(n + 2), head, lane);
      PrepLoad(p, rows.begin + (n + 2) * kChunk, count_of(n + 2), head, smem + kPrepRaw, warp, lane);
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
      BarrierInit(base + Layout::kEmpty + 8 * i, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = 0; i < kFusedStages; ++i) PrepClearM(base + i * Layout::kStage, threadIdx.x);
  __syncthreads();

  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // uniform
  if (group >= 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 112;");
    FusedPrep(p, rows, chunks, head, base, group - 2);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 144;");
    const ChainJob job = {rows, chunks, head, 64 * group,
                          (static_cast<int64_t>(sequence) * p.n_heads + head) * 128 * 128};
    const ChainSmem sm = {base,
                          base + Layout::kFull,
                          base + Layout::kEmpty,
                          Stage<128>::kValues + 128 * group,
                          base + Layout::kOutputs + group * kOutputTile};
    ChainForward<kFusedStages, 128>(p, job, sm);
  }
}

// Two kernels -------------------------------------------------------------------------------------

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

constexpr uint32_t kPrepRecord = (kRecordBytes + 1023) / 1024 * 1024;
constexpr uint32_t kPrepDynamic = kPrepRecord + kPrepBytes + 1024;

__global__ void __launch_bounds__(128, 3)
    PrepKernel(const __grid_constant__ KdaParams p, unsigned char* records, int64_t n_slots) {
  extern __shared__ unsigned char dynamic[];
  const uint32_t base = AlignedShared(dynamic), smem = base + kPrepRecord;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t jobs = n_slots * p.n_heads;
  PrepClearM(base, threadIdx.x);
  __syncthreads();
  auto next_job = [&](int64_t job, SlotJob& found) {
    for (; job < jobs; job += gridDim.x) {
      found = FindSlot(p, job / p.n_heads);
      if (found.count > 0) return job;
    }
    return jobs;
  };
  SlotJob chunk = {0, 0};
  int64_t job = next_job(blockIdx.x, chunk);
  uint32_t logit = 0;
  auto load = [&] {
    if (job < jobs) {
      logit = PrepLogit(p, chunk.token, chunk.count, static_cast<int>(job % p.n_heads), lane);
      PrepLoad(p, chunk.token, chunk.count, static_cast<int>(job % p.n_heads), smem + kPrepRaw, warp,
               lane);
    }
  };
  load();
  while (job < jobs) {
    const int64_t current = job;
    const int head = static_cast<int>(current % p.n_heads), count = chunk.count;
    const PrepHead h(p, head, lane);
    const float beta = PrepBeta(logit);
    PrepTokens x;
    CopyWait<0>();
    __syncwarp();
    PrepGate(h, smem + kPrepRaw, count, warp, lane, x);
    StoreF4(smem + kPrepTotals + warp * 512 + lane * 16,
            make_float4(x.G[7][0], x.G[7][1], x.G[7][2], x.G[7][3]));
    if (threadIdx.x == 0) BulkWaitRead<0>();  // the record before has left shared memory
    NamedBarrier(1, 128);
    PrepTiles(x, smem, base, warp, lane);
    FenceAsync();
    __syncwarp();
    job = next_job(current + gridDim.x, chunk);
    load();
    NamedBarrier(1, 128);
    PrepProducts(smem, base, beta, 1, warp, lane);
    FenceAsync();
    NamedBarrier(1, 128);
    if (threadIdx.x == 0) {
      BulkStore(records + current * kRecordBytes, base, kRecordBytes);
      BulkCommit();
    }
  }
  if (threadIdx.x == 0) BulkWait<0>();
}

constexpr int kSplitStages = 5;
struct SplitLayout {
  static constexpr uint32_t kStage = Stage<64>::kBytes;
  static constexpr uint32_t kOutput = kSplitStages * kStage;
  static constexpr uint32_t kFull = kOutput + kOutputTile;
  static constexpr uint32_t kEmpty = kFull + 8 * kSplitStages;
  static constexpr uint32_t kDynamic = kEmpty + 8 * kSplitStages + 1024;
};
static_assert(SplitLayout::kDynamic <= 227 * 1024);

/// A block runs 64 values of one head; its fifth warp brings the records.
__global__ void __launch_bounds__(160, 1)
    SplitChainKernel(const __grid_constant__ KdaParams p, const unsigned char* records) {
  using Layout = SplitLayout;
  extern __shared__ unsigned char dynamic[];
  __shared__ int sequence_of_rank;
  const uint32_t base = AlignedShared(dynamic);
  const int pair = blockIdx.x / 2, head = pair % p.n_heads;
  const int sequence =
      p.n_sequences <= 160 ? SequenceOfRank(p, pair / p.n_heads, &sequence_of_rank)
                           : pair / p.n_heads;
  const Rows rows = SequenceRows(p.cu, p.n_tokens, sequence);
  const int chunks = __shfl_sync(~0u, (rows.count + kChunk - 1) / kChunk, 0);  // uniform
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSplitStages; ++i) {
      BarrierInit(base + Layout::kFull + 8 * i, 1 + 32);
      BarrierInit(base + Layout::kEmpty + 8 * i, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int column = 64 * static_cast<int>(blockIdx.x % 2);
  if (__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) == 4) {
    const int lane = threadIdx.x % 32;
    const int64_t first = FirstSlot(rows, sequence);
    int stage = 0;
    uint32_t parity = 1;
    for (int n = 0; n < chunks; ++n) {
      BarrierWait(base + Layout::kEmpty + 8 * stage, parity);
      const uint32_t to = base + stage * Layout::kStage, full = base + Layout::kFull + 8 * stage;
      if (lane == 0) {
        BarrierArriveExpect(full, kRecordBytes);
        BulkLoad(to, records + ((first + n) * p.n_heads + head) * kRecordBytes, kRecordBytes, full);
      }
      LoadValues<64>(p, rows.begin + n * kChunk, min(kChunk, rows.count - n * kChunk),
                     head * 128 + column, to + Stage<64>::kValues, lane, 32);
      CopyArrive(full);
      if (++stage == kSplitStages) stage = 0, parity ^= 1;
    }
    return;
  }
  const ChainJob job = {rows, chunks, head, column,
                        (static_cast<int64_t>(sequence) * p.n_heads + head) * 128 * 128};
  const ChainSmem sm = {base,
                        base + Layout::kFull,
                        base + Layout::kEmpty,
                        Stage<64>::kValues,
                        base + Layout::kOutput};
  ChainForward<kSplitStages, 64>(p, job, sm);
}

int64_t Slots(int64_t n_tokens, int n_sequences) { return n_tokens / kChunk + n_sequences; }

}  // namespace

int64_t KdaSplitWorkspace(int64_t n_tokens, int n_sequences, int n_heads) {
  return Slots(n_tokens, n_sequences) * n_heads * kRecordBytes;
}

cudaError_t LaunchKdaFused(const KdaParams& p, cudaStream_t stream) {
  const int blocks = p.n_sequences * p.n_heads;
  if (blocks == 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      FusedKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FusedLayout::kDynamic);
  if (error != cudaSuccess) return error;
  FusedKernel<<<blocks, 512, FusedLayout::kDynamic, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchKdaSplit(const KdaParams& p, void* workspace, cudaStream_t stream) {
  const int pairs = p.n_sequences * p.n_heads;
  if (pairs == 0) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(
      PrepKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kPrepDynamic);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(SplitChainKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SplitLayout::kDynamic);
  }
  if (error != cudaSuccess) return error;
  const int64_t slots = Slots(p.n_tokens, p.n_sequences);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(slots * p.n_heads, 3 * 132));
  auto* records = static_cast<unsigned char*>(workspace);
  PrepKernel<<<blocks, 128, kPrepDynamic, stream>>>(p, records, slots);
  SplitChainKernel<<<2 * pairs, 160, SplitLayout::kDynamic, stream>>>(p, records);
  return cudaGetLastError();
}

}  // namespace k3::cuda
