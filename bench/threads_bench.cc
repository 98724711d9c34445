// What one ParallelFor costs: the price every op pays before it computes anything.
#include <benchmark/benchmark.h>

#include <cstdint>

#include "k3/base/threads.h"

namespace {

void BM_ParallelForEmpty(benchmark::State& state) {
  k3::ThreadPool pool(static_cast<int>(state.range(0)));
  const std::int64_t n = 4 * state.range(0);
  for (auto _ : state) {
    pool.ParallelFor(n, 1,
                     [](std::int64_t begin, std::int64_t) { benchmark::DoNotOptimize(begin); });
  }
}
BENCHMARK(BM_ParallelForEmpty)->Arg(1)->Arg(2)->UseRealTime();

}  // namespace
