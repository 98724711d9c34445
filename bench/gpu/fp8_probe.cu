// Time of one step of the state chain (32 tokens, 64 values a warpgroup, fp32 state) with bf16 and
// with e4m3 operands: the products of kda_chain.cuh in their order and with their dependences, on
// operands that lie in shared memory already. A throughput probe: values mean nothing, scales for
// e4m3 are left out. docs/adr/0008 says what came of it.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "k3/kernels/cuda/hopper.cuh"
#include "wgmma_e4m3.cuh"

namespace k3::cuda {
namespace {

constexpr int kSteps = 256;
constexpr uint32_t kTileBytes = 32 * 256;

/// Four floats as e4m3, the first in the lowest byte.
__device__ __forceinline__ uint32_t PackE4m3(float a, float b, float c, float d) {
  uint32_t r;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
template <bool kE4m3, int N>
__device__ __forceinline__ void Pack(const float (&x)[N], uint32_t (&to)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    if constexpr (kE4m3) {
      to[i] = PackE4m3(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    } else {
      to[2 * i] = PackBf16(x[4 * i], x[4 * i + 1]);
      to[2 * i + 1] = PackBf16(x[4 * i + 2], x[4 * i + 3]);
    }
  }
}

/// x (+)= a B for 32 x 128 (kK = 128) or 32 x 32 operands at `b16` (address / 16).
template <bool kE4m3, int kK>
__device__ __forceinline__ void Product(float (&x)[16], const uint32_t* a, uint32_t b16, bool add) {
  constexpr int kEach = kE4m3 ? 32 : 16;
#pragma unroll
  for (int s = 0; s < kK / kEach; ++s) {
    const uint64_t b = Descriptor<128, 1024>(b16 + ((s / 4) * 4096 + (s % 4) * 32) / 16);
    if constexpr (kE4m3) {
      WgmmaRsE4m3(x, a + 4 * s, b, add || s > 0);
    } else {
      WgmmaRs<0>(x, a + 4 * s, b, add || s > 0);
    }
  }
}

template <bool kE4m3>
__global__ void __launch_bounds__(256, 1) ChainKernel(float* out, int64_t* clocks) {
  extern __shared__ unsigned char dynamic[];
  const uint32_t base = (SharedAddress(dynamic) + 1023) & ~1023u, base16 = base >> 4;
  for (uint32_t i = threadIdx.x; i < 5 * kTileBytes / 4; i += blockDim.x) {
    Store32(base + 4 * i, kE4m3 ? 0x28a92729u + (i * 2654435761u & 0x03030303u)
                                : 0x3c2abc91u + (i * 2654435761u & 0x007f007fu));
  }
  FenceAsync();
  __syncthreads();
  float S[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) S[i] = static_cast<float>(threadIdx.x + i) * 1e-3f;
  const int64_t start = clock64();
  for (int n = 0; n < kSteps; ++n) {
    uint32_t state[32], y[8];
    float x[16];
    Pack<kE4m3>(S, state);
    WgmmaFence();
    Product<kE4m3, 128>(x, state, base16, false);
    WgmmaCommit();
    WgmmaWait<0>();
    Pack<kE4m3>(x, y);
    WgmmaFence();
    Product<kE4m3, 32>(x, y, base16 + 3 * kTileBytes / 16, false);
    WgmmaCommit();
    WgmmaWait<0>();
    Pack<kE4m3>(x, y);
    WgmmaFence();
    Product<kE4m3, 128>(x, state, base16 + kTileBytes / 16, false);
    Product<kE4m3, 32>(x, y, base16 + (3 * kTileBytes + 2048) / 16, true);
    WgmmaCommit();
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] *= 0.9f;
    WgmmaFence();
    if constexpr (kE4m3) {  // the tile of K must be stored along the tokens for this one
      WgmmaRsE4m3(S, y, Descriptor<128, 1024>(base16 + 2 * kTileBytes / 16), 1);
    } else {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint32_t at = base16 + (2 * kTileBytes + s * 2048) / 16;
        WgmmaRs<1>(S, y + 4 * s, Descriptor<128, 1024, 4096>(at), 1);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    out[threadIdx.x] = x[0] + x[7];
  }
  const int64_t stop = clock64();
#pragma unroll
  for (int i = 0; i < 64; ++i) out[256 + i] = S[i];
  if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
}

template <bool kE4m3>
double ClocksAStep(int threads) {
  float* out = nullptr;
  int64_t* clocks = nullptr;
  cudaMalloc(&out, 1024 * sizeof(float));
  cudaMalloc(&clocks, 132 * sizeof(int64_t));
  cudaFuncSetAttribute(ChainKernel<kE4m3>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
  std::vector<double> all;
  for (int i = 0; i < 12; ++i) {
    ChainKernel<kE4m3><<<132, threads, 65536>>>(out, clocks);
    std::vector<int64_t> host(132);
    cudaMemcpy(host.data(), clocks, host.size() * sizeof(int64_t), cudaMemcpyDefault);
    std::sort(host.begin(), host.end());
    if (i >= 2) all.push_back(static_cast<double>(host[66]) / kSteps);
  }
  cudaFree(out);
  cudaFree(clocks);
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

}  // namespace
}  // namespace k3::cuda

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIP no GPU is visible\n");
    return 77;
  }
  for (const int threads : {128, 256}) {
    const double bf16 = k3::cuda::ClocksAStep<false>(threads);
    const double e4m3 = k3::cuda::ClocksAStep<true>(threads);
    std::printf("chain step, %d warpgroup(s) an SM: bf16 %.0f clk, e4m3 %.0f clk, ratio %.2f, %s\n",
                threads / 128, bf16, e4m3, bf16 / e4m3, cudaGetErrorString(cudaGetLastError()));
  }
  return 0;
}
