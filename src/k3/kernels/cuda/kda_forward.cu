// KDA forward in chunks of 32 tokens, bounded decay, head_dim 128.
#include "k3/kernels/cuda/kda_forward.cuh"

#include <algorithm>

#include "k3/kernels/cuda/kda_fused.cuh"

namespace k3::cuda {
namespace {

// Two kernels -------------------------------------------------------------------------------------

constexpr uint32_t kPrepRecord = (kRecordBytes + 1023) / 1024 * 1024;
constexpr uint32_t kPrepDynamic = kPrepRecord + kPrepBytes + 1024;

/// A block's share of all chunks, head by head, so that gate constants are loaded rarely.
struct PrepJobs {
  int head, slot, left, n_slots;
  SlotJob chunk;

  __device__ __forceinline__ PrepJobs(const KdaParams& p, int slots, int64_t jobs)
      : n_slots(slots) {
    const int64_t first = jobs * blockIdx.x / gridDim.x;
    left = static_cast<int>(jobs * (blockIdx.x + 1) / gridDim.x - first);
    head = static_cast<int>(first / slots), slot = static_cast<int>(first % slots);
    Find(p);
  }
  __device__ __forceinline__ void Next(const KdaParams& p) {
    Step();
    Find(p);
  }
  __device__ __forceinline__ bool Done() const { return left <= 0; }

 private:
  __device__ __forceinline__ void Step() {
    --left;
    if (++slot == n_slots) slot = 0, ++head;
  }
  __device__ __forceinline__ void Find(const KdaParams& p) {  // skips slots without a chunk
    for (; left > 0; Step()) {
      chunk = FindSlot(p, slot);
      if (chunk.count > 0) return;
    }
  }
};

__global__ void __launch_bounds__(128, 3)
    PrepKernel(const __grid_constant__ KdaParams p, unsigned char* records, int n_slots) {
  extern __shared__ unsigned char dynamic[];
  const uint32_t base = AlignedShared(dynamic), smem = base + kPrepRecord;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  PrepClearM(base, threadIdx.x);
  FenceAsync();
  __syncthreads();
  PrepJobs job(p, n_slots, static_cast<int64_t>(n_slots) * p.n_heads);
  if (job.Done()) return;
  PrepHead h(p, job.head, lane);
  uint32_t logit = PrepLogit(p, job.chunk.token, job.chunk.count, job.head, lane);
  PrepLoad(p, job.chunk.token, job.chunk.count, job.head, smem + kPrepRaw, warp, lane);
  while (!job.Done()) {
    const int head = job.head;
    unsigned char* to =
        records + (static_cast<int64_t>(job.slot) * p.n_heads + head) * kRecordBytes;
    const float beta = PrepBeta(logit);
    PrepTokens x;
    CopyWait<0>();
    __syncwarp();
    PrepGate(h, smem + kPrepRaw, job.chunk.count, warp, lane, x);
    StoreF4(smem + kPrepTotals + warp * 512 + lane * 16,
            make_float4(x.G[7][0], x.G[7][1], x.G[7][2], x.G[7][3]));
    if (threadIdx.x == 0) BulkWaitRead<0>();  // the record before has left shared memory
    NamedBarrier(1, 128);
    PrepTiles(x, smem, base, warp, lane);
    FenceAsync();
    __syncwarp();
    job.Next(p);
    if (!job.Done()) {
      logit = PrepLogit(p, job.chunk.token, job.chunk.count, job.head, lane);
      PrepLoad(p, job.chunk.token, job.chunk.count, job.head, smem + kPrepRaw, warp, lane);
      if (job.head != head) h = PrepHead(p, job.head, lane);
    }
    NamedBarrier(1, 128);
    PrepProducts(smem, base, beta, 1, warp, lane);
    FenceAsync();
    NamedBarrier(1, 128);
    if (threadIdx.x == 0) {
      BulkStore(to, base, kRecordBytes);
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
  const int sequence = p.n_sequences <= 160 ? SequenceOfRank(p, pair / p.n_heads, &sequence_of_rank)
                                            : pair / p.n_heads;
  const Rows rows = SequenceRows(p.cu, p.n_tokens, sequence);
  const int chunks = __shfl_sync(~0u, (rows.count + kChunk - 1) / kChunk, 0);  // uniform
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSplitStages; ++i) {
      BarrierInit(base + Layout::kFull + 8 * i, 1 + 32);
      BarrierInit(base + Layout::kEmpty + 8 * i, 4 * kWarpArrivals);
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
  const ChainSmem sm = {base, base + Layout::kFull, base + Layout::kEmpty, Stage<64>::kValues,
                        base + Layout::kOutput};
  RunChain<ChainKind::kForward, kSplitStages, 64>(p, job, sm);
}

}  // namespace

cudaError_t LaunchKdaFused(const KdaParams& p, cudaStream_t stream) {
  const int blocks = p.n_sequences * p.n_heads;
  if (blocks == 0) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(FusedKernel<ChainKind::kForward>,
                           cudaFuncAttributeMaxDynamicSharedMemorySize, FusedLayout::kDynamic);
  if (error != cudaSuccess) return error;
  FusedKernel<ChainKind::kForward><<<blocks, 512, FusedLayout::kDynamic, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchKdaSplit(const KdaParams& p, void* workspace, cudaStream_t stream) {
  const int pairs = p.n_sequences * p.n_heads;
  if (pairs == 0) return cudaSuccess;
  cudaError_t error =
      cudaFuncSetAttribute(PrepKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kPrepDynamic);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(SplitChainKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SplitLayout::kDynamic);
  }
  if (error != cudaSuccess) return error;
  const int64_t slots = kda::Slots(p.n_tokens, p.n_sequences);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(slots * p.n_heads, 3 * 132));
  auto* records = static_cast<unsigned char*>(workspace);
  PrepKernel<<<blocks, 128, kPrepDynamic, stream>>>(p, records, static_cast<int>(slots));
  SplitChainKernel<<<2 * pairs, 160, SplitLayout::kDynamic, stream>>>(p, records);
  return cudaGetLastError();
}

}  // namespace k3::cuda
