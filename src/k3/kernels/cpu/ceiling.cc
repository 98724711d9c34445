#include "k3/kernels/cpu/ceiling.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "k3/base/check.h"
#include "k3/base/workspace.h"
#include "k3/kernels/cpu/isa.h"

namespace k3::cpu {
namespace {

/// Best of a few runs: a ceiling is what the machine does when nothing disturbs it.
template <class F>
double BestSeconds(F&& run) {
  double best = 1e30;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    run();
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

double ReadRate(ThreadPool& pool, const SimdTable& simd) {
  constexpr std::int64_t kBlock = 1 << 18, kBlocks = 256;  // 256 MiB
  Workspace ws;                                            // in huge pages, as copied weights are
  float* data = ws.Alloc<float>(kBlock * kBlocks);
  std::fill(data, data + kBlock * kBlocks, 1.f);
  std::vector<float> sums(static_cast<std::size_t>(kBlocks));
  const double s = BestSeconds([&] {
    pool.ParallelFor(kBlocks, 1, [&](std::int64_t b, std::int64_t e) {
      for (std::int64_t i = b; i < e; ++i) {
        const float* p = data + i * kBlock;
        // Four rows at a time, as a product with one row of x reads its weights.
        float y[4];
        const float one[64] = {1.f};
        float sum = 0.f;
        for (std::int64_t k = 0; k + 256 <= kBlock; k += 256) {
          simd.dot_block(one, 64, 1, p + k, 64, 4, 64, y, 4);
          sum += y[0];
        }
        sums[static_cast<std::size_t>(i)] = sum;
      }
    });
  });
  K3_CHECK(sums[0] > 0.f, "the sum keeps the loop");
  return 4.0 * static_cast<double>(kBlock * kBlocks) / s * 1e-9;
}

double ProductRate(ThreadPool& pool, const SimdTable& simd, bool fast) {
  constexpr std::int64_t kM = 32, kN = 32, kK = 256, kTimes = 400;
  const std::int64_t tasks = pool.size();
  const double s = BestSeconds([&] {
    pool.ParallelFor(tasks, 1, [&](std::int64_t b, std::int64_t e) {
      Workspace ws;
      float* x = ws.Alloc<float>(kM * kK);
      float* y = ws.Alloc<float>(kM * kN);
      std::fill(x, x + kM * kK, 1.f);
      std::byte *packed = nullptr, *scratch = nullptr;
      if (fast) {
        packed = ws.Alloc<std::byte>(simd.fast->packed_bytes(kM, kK));
        scratch = ws.Alloc<std::byte>(simd.fast->scratch_bytes(kM, kK));
        simd.fast->pack(x, kK, kM, kK, FastForm::kBf16, packed);
      }
      for (std::int64_t i = b * kTimes; i < e * kTimes; ++i) {
        if (fast) {
          simd.fast->gemm(packed, kM, {reinterpret_cast<const std::uint8_t*>(x), nullptr}, kN, kK,
                          y, kN, scratch);
        } else {
          simd.dot_block(x, kK, kM, x, kK, kN, kK, y, kN);
        }
      }
    });
  });
  return 2.0 * static_cast<double>(kM * kN * kK * kTimes * tasks) / s * 1e-9;
}

}  // namespace

double MeasureProductRate(ThreadPool& pool, MathMode mode) {
  const auto table = ChooseTable();
  K3_CHECK(table.ok(), "the instruction set was checked at start");
  const SimdTable& simd = **table;
  return ProductRate(pool, simd, mode == MathMode::kFast && simd.fast != nullptr);
}

Ceilings MeasureCeilings(ThreadPool& pool, MathMode mode) {
  const auto table = ChooseTable();
  K3_CHECK(table.ok(), "the instruction set was checked at start");
  return {ReadRate(pool, **table), MeasureProductRate(pool, mode)};
}

}  // namespace k3::cpu
