// Latent experts (hidden -> latent -> experts -> hidden) against experts of full width: where does
// the detour pay? hidden 1024, inter 512, top 8, MXFP4 experts, bf16 projections, fast mode.
//   k3_microbench --benchmark_filter=BM_latent; bench/latent_table.py makes a table of it
#include <benchmark/benchmark.h>

#include "bench_weight.h"

namespace k3 {
namespace {

constexpr std::int64_t kHidden = 1024, kInter = 512, kTop = 8;

/// latent == kHidden: full width, without projections.
void BM_latent(benchmark::State& state) {
  const std::int64_t E = state.range(0), latent = state.range(1), T = state.range(2);
  Exec exec(1, MathMode::kFast);
  Workspace memory;
  memory.Reserve(3 * E * latent * kInter / 32 * 18 + 4 * kHidden * kHidden + (1 << 20));
  std::vector<ExpertWeights> table;
  for (std::int64_t e = 0; e < E; ++e) {
    table.push_back({Weight(memory, WeightFormat::kMxfp4, kInter, latent).ref,
                     Weight(memory, WeightFormat::kMxfp4, kInter, latent).ref,
                     Weight(memory, WeightFormat::kMxfp4, latent, kInter).ref});
  }
  const Weight down(memory, WeightFormat::kBF16, latent, kHidden),
      up(memory, WeightFormat::kBF16, kHidden, latent);
  const auto x = Values(T * kHidden), w = Values(T * kTop, 0, 1);
  std::vector<float> z(static_cast<std::size_t>(T * latent)), y(z.size()), out(x.size());
  std::vector<std::int32_t> experts(static_cast<std::size_t>(T * kTop));
  std::int64_t turn = 0;
  for (auto _ : state) {
    ++turn;  // a single token finds its experts out of cache, as in a model
    for (std::int64_t i = 0; i < T * kTop; ++i) {
      experts[static_cast<std::size_t>(i)] =
          static_cast<std::int32_t>((13 * i + i / kTop + 29 * turn) % E);
    }
    const bool full = latent == kHidden;
    const CMat in(full ? x.data() : z.data(), {T, latent});
    if (!full) {
      exec.ops->Gemm({CMat(x.data(), {T, kHidden}), down.ref, Mat(z.data(), {T, latent})});
    }
    exec.ops->ExpertMlp({in,
                         View<const std::int32_t, 2>(experts.data(), {T, kTop}),
                         CMat(w.data(), {T, kTop}),
                         table,
                         {true, 4.f, 25.f},
                         Mat(y.data(), {T, latent})});
    if (!full) exec.ops->Gemm({CMat(y.data(), {T, latent}), up.ref, Mat(out.data(), {T, kHidden})});
    benchmark::DoNotOptimize(out.data());
  }
  state.counters["us/token"] = benchmark::Counter(
      1e-6 * static_cast<double>(T),
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_latent)
    ->ArgNames({"experts", "latent", "tokens"})
    ->ArgsProduct({{16, 64, 256}, {128, 256, 512, 768, 1024}, {1, 16, 256}});

}  // namespace
}  // namespace k3
