#include "k3/kernels/machine_speed.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <vector>

#include "k3/base/workspace.h"

namespace k3 {
namespace {

constexpr double kSecondsEach = 0.2;
constexpr std::int64_t kDefaultBuffer = std::int64_t{256} << 20;

/// Shortest time of one call, after one that warms up.
double BestSeconds(const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  call();
  double best = 1e30, spent = 0;
  do {
    const auto start = Clock::now();
    call();
    const double s = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::min(best, s);
    spent += s;
  } while (spent < kSecondsEach);
  return std::max(best, 1e-9);
}

}  // namespace

MachineSpeed MeasureMachine(Exec& exec, std::int64_t buffer_bytes) {
  MachineSpeed speed;
  speed.buffer_bytes = buffer_bytes > 0 ? buffer_bytes : kDefaultBuffer;
  speed.threads = exec.pool.size();
  {
    const std::int64_t n = std::max<std::int64_t>(1, speed.buffer_bytes / 8);
    Workspace memory;  // in huge pages, as copied weights are
    auto* data = memory.Alloc<std::uint64_t>(n);
    std::fill(data, data + n, std::uint64_t{1});
    std::atomic<std::uint64_t> total{0};
    const double s = BestSeconds([&] {
      exec.pool.ParallelFor(n, 1 << 16, [&](std::int64_t b, std::int64_t e) {
        std::uint64_t sums[8] = {};
        std::int64_t i = b;
        for (; i + 8 <= e; i += 8) {
          for (std::int64_t l = 0; l < 8; ++l) sums[l] += data[i + l];
        }
        for (; i < e; ++i) sums[0] += data[i];
        std::uint64_t sum = 0;
        for (const std::uint64_t v : sums) sum += v;
        total += sum;
      });
    });
    if (total.load() > 0) speed.read_bytes_per_s = static_cast<double>(n) * 8 / s;
  }
  constexpr std::int64_t kRows = 64, kSize = 1024;
  std::vector<float> x(kRows * kSize, 0.5f), w(kSize * kSize, 0.25f), y(kRows * kSize);
  const WeightRef weight{WeightFormat::kF32, kSize, kSize, w.data(), nullptr};
  const double s = BestSeconds([&] {
    exec.ops->Gemm({CMat(x.data(), {kRows, kSize}), weight, Mat(y.data(), {kRows, kSize})});
  });
  speed.f32_ops_per_s = 2.0 * kRows * kSize * kSize / s;
  speed.method = fmt::format(
      "best of {:.1f} s each: {} threads read {} MiB; Gemm of [{}, {}] with [{}, {}] in f32",
      kSecondsEach, speed.threads, speed.buffer_bytes >> 20, kRows, kSize, kSize, kSize);
  return speed;
}

}  // namespace k3
