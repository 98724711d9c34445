// What compute-sanitizer racecheck says of handovers that are right by the letter of PTX, in the
// forms the KDA kernels use, and of the same forms with one barrier left out.
//   race_probe NAME: runs one form and checks its sums; `race_probe list` prints the names.
// Exit status: 0 the sums are right, 1 they are not, 2 usage, 3 CUDA failed, 77 no GPU.
#include <cstdio>
#include <cstring>
#include <vector>

#include "k3/kernels/cuda/hopper.cuh"

namespace k3::cuda {
namespace {

constexpr int kRounds = 24, kGroup = 128, kStages = 3;

enum class Form {
  kBlock,         // 128 threads, __syncthreads before and after the read
  kBlockBroken,   // the barrier after the read is missing: a race
  kNamed,         // two groups of 128 in a block of 256, bar.sync 3 + group, 128
  kNamedBroken,   // the barrier after the read is missing
  kNamedHalf,     // as kNamed, and 64 of each group meet at bar.sync 5 + group, 64
  kRing,          // two producers, two consumers, three stages, full and empty mbarriers; a
                  // consumer's first lane arrives for its warp
  kRingEvery,     // as kRing, every consumer arrives
  kRingCopy,      // as kRingEvery, filled by cp.async
  kRingBroken,    // the consumers do not wait for a full stage
  kRingLockstep,  // as kRing with a barrier of all 512 threads in the place of every mbarrier
};

__device__ __forceinline__ float Term(int round, int thread) {
  return static_cast<float>((round * 7 + thread) % 11);
}

/// Every thread adds what the four warps of its group wrote, lane by lane.
template <Form kForm>
__global__ void SumKernel(float* out) {
  __shared__ float sums[2][kGroup];
  const int group = threadIdx.x / kGroup, at = threadIdx.x % kGroup, lane = at % 32;
  constexpr bool kBlock = kForm == Form::kBlock || kForm == Form::kBlockBroken;
  constexpr bool kBroken = kForm == Form::kBlockBroken || kForm == Form::kNamedBroken;
  const uint32_t row = SharedAddress(&sums[group][0]);
  float total = 0;
  for (int round = 0; round < kRounds; ++round) {
    Store32(row + at * 4, __float_as_uint(Term(round, at)));
    if constexpr (kBlock) {
      __syncthreads();
    } else {
      NamedBarrier(3 + group, kGroup);
    }
    for (int w = 0; w < 4; ++w) total += __uint_as_float(Load32(row + (w * 32 + lane) * 4));
    if constexpr (kForm == Form::kNamedHalf) {
      if (at < 64) NamedBarrier(5 + group, 64);
    }
    if constexpr (kBroken) continue;
    if constexpr (kBlock) {
      __syncthreads();
    } else {
      NamedBarrier(3 + group, kGroup);
    }
  }
  out[threadIdx.x] = total;
}

/// Groups 0 and 1 read every stage, groups 2 and 3 fill every second one.
template <Form kForm>
__global__ void __launch_bounds__(512, 1) RingKernel(const float* in, float* out) {
  __shared__ alignas(16) float stages[kStages][kGroup * 4];
  __shared__ alignas(8) uint64_t barriers[2][kStages];
  constexpr bool kLockstep = kForm == Form::kRingLockstep, kCopy = kForm == Form::kRingCopy;
  constexpr int kArrivals = kForm == Form::kRingEvery || kCopy ? 32 : 1;
  const int group = threadIdx.x / kGroup, at = threadIdx.x % kGroup, lane = at % 32;
  const uint32_t data = SharedAddress(&stages[0][0]);
  const uint32_t full = SharedAddress(&barriers[0][0]), empty = SharedAddress(&barriers[1][0]);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(full + 8 * i, kGroup), BarrierInit(empty + 8 * i, kArrivals * 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  float total = 0;
  for (int n = 0; n < kRounds; ++n) {
    const int stage = n % kStages;
    const uint32_t parity = n / kStages % 2, to = data + stage * kGroup * 16;
    if (group - 2 == n % 2) {
      if (!kLockstep) BarrierWait(empty + 8 * stage, parity ^ 1);
      if constexpr (kCopy) {
        CopyAsync(to + at * 16, in + (n * kGroup + at) * 4, true);
        CopyCommit();
        CopyWait<0>();
      } else {
        StoreF4(to + at * 16, *reinterpret_cast<const float4*>(in + (n * kGroup + at) * 4));
      }
      if (!kLockstep) BarrierArrive(full + 8 * stage);
    }
    if (kLockstep) __syncthreads();
    if (group < 2) {
      if (!kLockstep && kForm != Form::kRingBroken) BarrierWait(full + 8 * stage, parity);
      __syncwarp();
      const float4 x = LoadF4(to + (kGroup - 1 - at) * 16);
      total += x.x + x.y + x.z + x.w;
      __syncwarp();
      if (!kLockstep && lane < kArrivals) BarrierArrive(empty + 8 * stage);
    }
    if (kLockstep) __syncthreads();
  }
  out[threadIdx.x] = total;
}

struct Run {
  const char* name;
  Form form;
  void (*launch)(const float* in, float* out);
};
template <Form kForm>
void Sum(const float*, float* out) {
  SumKernel<kForm><<<1, kForm == Form::kBlock || kForm == Form::kBlockBroken ? 128 : 256>>>(out);
}
template <Form kForm>
void Ring(const float* in, float* out) {
  RingKernel<kForm><<<1, 512>>>(in, out);
}
const Run kRuns[] = {
    {"block", Form::kBlock, Sum<Form::kBlock>},
    {"block-broken", Form::kBlockBroken, Sum<Form::kBlockBroken>},
    {"named", Form::kNamed, Sum<Form::kNamed>},
    {"named-broken", Form::kNamedBroken, Sum<Form::kNamedBroken>},
    {"named-half", Form::kNamedHalf, Sum<Form::kNamedHalf>},
    {"ring", Form::kRing, Ring<Form::kRing>},
    {"ring-every", Form::kRingEvery, Ring<Form::kRingEvery>},
    {"ring-copy", Form::kRingCopy, Ring<Form::kRingCopy>},
    {"ring-broken", Form::kRingBroken, Ring<Form::kRingBroken>},
    {"ring-lockstep", Form::kRingLockstep, Ring<Form::kRingLockstep>},
};

int RunOne(const Run& run) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIP no GPU is visible\n");
    return 77;
  }
  std::vector<float> in(kRounds * kGroup * 4, 1.f), got(512);
  float *device_in = nullptr, *out = nullptr;
  if (cudaMalloc(&device_in, in.size() * 4) != cudaSuccess ||
      cudaMalloc(&out, 512 * 4) != cudaSuccess) {
    return 3;
  }
  cudaMemcpy(device_in, in.data(), in.size() * 4, cudaMemcpyDefault);
  run.launch(device_in, out);
  if (cudaDeviceSynchronize() != cudaSuccess) return 3;
  cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDefault);
  bool right = true;
  const bool ring = run.form >= Form::kRing;
  for (int t = 0; t < (ring ? 256 : run.form <= Form::kBlockBroken ? 128 : 256); ++t) {
    float want = ring ? 4.f * kRounds : 0.f;
    for (int n = 0; !ring && n < kRounds * 4; ++n) {
      want += static_cast<float>((n / 4 * 7 + n % 4 * 32 + t % 32) % 11);
    }
    right &= got[static_cast<std::size_t>(t)] == want;
  }
  std::printf("%s: sums %s\n", run.name, right ? "right" : "wrong");
  cudaFree(device_in);
  cudaFree(out);
  return right ? 0 : 1;
}

}  // namespace
}  // namespace k3::cuda

int main(int argc, char** argv) {
  for (const auto& run : k3::cuda::kRuns) {
    if (argc == 2 && !std::strcmp(argv[1], run.name)) return k3::cuda::RunOne(run);
    if (argc == 2 && !std::strcmp(argv[1], "list")) std::printf("%s\n", run.name);
  }
  return argc == 2 && !std::strcmp(argv[1], "list") ? 0 : 2;
}
