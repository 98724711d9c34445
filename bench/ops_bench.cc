// Speed of single ops, on one thread unless said, in CPU time. Counters: products in
// multiply-adds a second, weight bytes a second, microseconds a head and token for KDA.
//   build/release/bench/k3_microbench --benchmark_filter=gemm
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "bench_weight.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/kernels/cpu/simd_table.h"
#include "k3/kernels/exec.h"

namespace k3 {
namespace {

MathMode ModeOf(std::int64_t i) { return i == 0 ? MathMode::kExact : MathMode::kFast; }

void Count(benchmark::State& state, double macs, double bytes) {
  using benchmark::Counter;
  state.counters["MAC/s"] = Counter(macs, Counter::kIsIterationInvariantRate);
  state.counters["B/s"] = Counter(bytes, Counter::kIsIterationInvariantRate);
}

/// What one core reads from memory, in the same pages as weights.
void BM_read(benchmark::State& state) {
  const cpu::SimdTable& simd = **cpu::ChooseTable();
  constexpr std::int64_t kFloats = 48 << 20, kBlock = 1 << 14;  // 192 MiB
  Workspace memory;
  float* data = memory.Alloc<float>(kFloats);
  std::fill(data, data + kFloats, 1.f);
  for (auto _ : state) {
    float most = 0;
    for (std::int64_t i = 0; i < kFloats; i += kBlock) {
      most = std::max(most, simd.max(data + i, kBlock));
    }
    benchmark::DoNotOptimize(most);
  }
  Count(state, 0, 4.0 * kFloats);
}
BENCHMARK(BM_read);

#if defined(__x86_64__)

/// Multiply-adds in f32 of one core when nothing else is done: the ceiling of exact mode.
__attribute__((target("avx512f"))) void FmaLoop(std::int64_t times) {
  asm volatile(
      "1:\n"
      ".irp r,0,1,2,3,4,5,6,7,8,9,10,11\n"
      "vfmadd231ps %%zmm30, %%zmm31, %%zmm\\r\n"
      ".endr\n"
      "dec %0\n"
      "jnz 1b\n"
      : "+r"(times)
      :
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
        "xmm10", "xmm11", "xmm30", "xmm31");
}
void BM_fma_peak(benchmark::State& state) {
  if (!__builtin_cpu_supports("avx512f")) return state.SkipWithError("no AVX-512");
  for (auto _ : state) FmaLoop(100000);
  Count(state, 12.0 * 16 * 100000, 0);
}
BENCHMARK(BM_fma_peak);

#endif

/// Several copies in turn, so that one row of x finds its weights in memory and not in a cache.
void Gemm(benchmark::State& state, WeightFormat format, std::int64_t N, std::int64_t K) {
  const std::int64_t M = state.range(0);
  Exec exec(1, ModeOf(state.range(1)));
  const std::int64_t one = WeightRef{format, N, K, nullptr, nullptr}.bytes();
  Workspace memory;
  memory.Reserve(M == 1 ? (256 << 20) + 2 * one : 2 * one);
  std::vector<Weight> copies;
  for (std::int64_t b = 0; b == 0 || (M == 1 && b < 192 << 20); b += one) {
    copies.emplace_back(memory, format, N, K);
  }
  const auto x = Values(M * K);
  std::vector<float> y(static_cast<std::size_t>(M * N));
  std::size_t at = 0;
  for (auto _ : state) {
    exec.ops->Gemm({CMat(x.data(), {M, K}), copies[at].ref, Mat(y.data(), {M, N})});
    at = (at + 1) % copies.size();
    benchmark::DoNotOptimize(y.data());
  }
  Count(state, static_cast<double>(M * N * K), static_cast<double>(one));
}

void BM_gemm_f32(benchmark::State& s) { Gemm(s, WeightFormat::kF32, 1024, 1024); }
void BM_gemm_bf16(benchmark::State& s) { Gemm(s, WeightFormat::kBF16, 1024, 1024); }
void BM_gemm_bf16_4096(benchmark::State& s) { Gemm(s, WeightFormat::kBF16, 4096, 4096); }
void BM_gemm_mxfp4(benchmark::State& s) { Gemm(s, WeightFormat::kMxfp4, 3072, 3584); }
void BM_gemm_fp8_4096(benchmark::State& s) { Gemm(s, WeightFormat::kFp8, 4096, 4096); }
void BM_gemm_int8_4096(benchmark::State& s) { Gemm(s, WeightFormat::kInt8, 4096, 4096); }
void Rows(benchmark::internal::Benchmark* b) {
  b->ArgNames({"rows", "fast"})->ArgsProduct({{1, 4, 16, 32, 96, 512}, {0, 1}});
}
BENCHMARK(BM_gemm_f32)->ArgNames({"rows", "fast"})->ArgsProduct({{1, 96}, {0}});
BENCHMARK(BM_gemm_bf16)->Apply(Rows);
BENCHMARK(BM_gemm_bf16_4096)->ArgNames({"rows", "fast"})->ArgsProduct({{1, 16, 96}, {0, 1}});
BENCHMARK(BM_gemm_fp8_4096)->ArgNames({"rows", "fast"})->ArgsProduct({{1, 16, 96}, {0, 1}});
BENCHMARK(BM_gemm_int8_4096)->ArgNames({"rows", "fast"})->ArgsProduct({{1, 16, 96}, {0, 1}});
BENCHMARK(BM_gemm_mxfp4)->ArgNames({"rows", "fast"})->ArgsProduct({{1, 4, 16, 32, 64}, {0, 1}});

/// heads of 128: token recurrence (chunk 0) or chunks, bounded or not.
void BM_kda(benchmark::State& state) {
  const std::int64_t T = state.range(0), form = state.range(1), H = 16, D = 128;
  Exec exec(1, form == 3 ? MathMode::kFast : MathMode::kExact);
  Workspace memory;  // in large pages, as the engine's activations and states are
  memory.Reserve(4 * H * D * (5 * T + D) + 4 * T * H + 4096);
  auto in_memory = [&](const std::vector<float>& values) {
    auto* p = memory.Alloc<float>(static_cast<std::int64_t>(values.size()));
    std::copy(values.begin(), values.end(), p);
    return p;
  };
  const Mat qm(in_memory(Values(T * H * D)), {T, H * D}),
      km(in_memory(Values(T * H * D)), {T, H * D}), o(memory.Alloc<float>(T * H * D), {T, H * D});
  const CMat v(in_memory(Values(T * H * D)), {T, H * D}),
      g(in_memory(Values(T * H * D, -5, 0)), {T, H * D}),
      beta(in_memory(Values(T * H, 0, 1)), {T, H});
  exec.ops->L2Norm({qm, D, 1e-6f, qm});
  exec.ops->L2Norm({km, D, 1e-6f, km});
  const SequenceRange all{0, T};
  float* states[] = {in_memory(std::vector<float>(static_cast<std::size_t>(H * D * D)))};
  KdaArgs a;
  a.q = qm, a.k = km, a.v = v, a.g = g, a.beta = beta;
  a.n_heads = H, a.scale = 0.0883883f;
  a.sequences = {&all, 1}, a.states = states, a.o = o;
  a.chunk = 16;
  if (form != 2) a.lower_bound = -5.f;
  for (auto _ : state) {
    if (form == 0) {
      exec.ops->KdaRecurrent(a);
    } else {
      exec.ops->KdaChunk(a);
    }
    benchmark::DoNotOptimize(o.data);
  }
  state.counters["us/head-token"] = benchmark::Counter(
      1e-6 * static_cast<double>(T * H),
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_kda)
    ->ArgNames({"tokens", "form(0 rec,1 chunk,2 unbounded,3 fast)"})
    ->ArgsProduct({{1, 64, 512}, {0, 1, 2, 3}});

void BM_mla(benchmark::State& state) {
  const std::int64_t count = state.range(0), rows = state.range(1), N = 16, dn = 128, dr = 64,
                     dv = 128, R = 512, page = 64;
  Exec exec(1, ModeOf(state.range(2)));
  Workspace memory;
  const Weight kv_b(memory, WeightFormat::kBF16, N * (dn + dv), R);
  const auto q = Values(count * N * (dn + dr)), cache = Values((rows + page) * (R + dr));
  std::vector<const float*> pages;
  for (std::int64_t i = 0; i < rows; i += page) pages.push_back(cache.data() + i * (R + dr));
  std::vector<float> o(static_cast<std::size_t>(count * N * dv));
  const MlaSequence seq{0, count, pages, rows};
  MlaArgs a;
  a.q = CMat(q.data(), {count, N * (dn + dr)});
  a.kv_b = kv_b.ref;
  a.n_heads = N, a.nope_dim = dn, a.rope_dim = dr, a.v_dim = dv, a.page_rows = page;
  a.scale = 0.07f;
  a.sequences = {&seq, 1};
  a.form = count >= page && state.range(2) == 1 ? MlaForm::kPlain : MlaForm::kAbsorbed;
  a.o = Mat(o.data(), {count, N * dv});
  for (auto _ : state) {
    exec.ops->Mla(a);
    benchmark::DoNotOptimize(o.data());
  }
  state.counters["us/token"] = benchmark::Counter(
      1e-6 * static_cast<double>(count),
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_mla)
    ->ArgNames({"queries", "rows", "fast"})
    ->Args({1, 512, 0})
    ->Args({1, 8192, 0})
    ->Args({512, 512, 0})
    ->Args({512, 512, 1})
    ->Args({512, 4096, 1});

/// 64 experts, top 8, latent and inter 512.
void BM_experts(benchmark::State& state) {
  const std::int64_t T = state.range(0), D = 512, E = 64, k = 8;
  Exec exec(1, ModeOf(state.range(1)));
  Workspace memory;
  memory.Reserve(3 * E * D * D);
  std::vector<Weight> weights;
  for (std::int64_t i = 0; i < 3 * E; ++i) weights.emplace_back(memory, WeightFormat::kMxfp4, D, D);
  std::vector<ExpertWeights> table;
  for (std::size_t e = 0; e < static_cast<std::size_t>(E); ++e) {
    table.push_back({weights[3 * e].ref, weights[3 * e + 1].ref, weights[3 * e + 2].ref});
  }
  const auto x = Values(T * D), w = Values(T * k, 0, 1);
  std::vector<std::int32_t> experts(static_cast<std::size_t>(T * k));
  for (std::size_t i = 0; i < experts.size(); ++i) {
    experts[i] = static_cast<std::int32_t>((13 * i + i / 8) % static_cast<std::size_t>(E));
  }
  std::vector<float> y(x.size());
  for (auto _ : state) {
    exec.ops->ExpertMlp({CMat(x.data(), {T, D}),
                         View<const std::int32_t, 2>(experts.data(), {T, k}),
                         CMat(w.data(), {T, k}),
                         table,
                         {true, 4.f, 25.f},
                         Mat(y.data(), {T, D})});
    benchmark::DoNotOptimize(y.data());
  }
  Count(state, static_cast<double>(T * k * 3 * D * D), 0);
}
BENCHMARK(BM_experts)->ArgNames({"tokens", "fast"})->ArgsProduct({{1, 16, 256}, {0, 1}});

void BM_situ(benchmark::State& state) {
  const std::int64_t n = 1 << 14;
  Exec exec(1);
  const auto gate = Values(n, -20, 20), up = Values(n, -30, 30);
  std::vector<float> y(static_cast<std::size_t>(n));
  for (auto _ : state) {
    exec.ops->GatedAct({CMat(gate.data(), {1, n}),
                        CMat(up.data(), {1, n}),
                        {true, 4.f, 25.f},
                        Mat(y.data(), {1, n})});
    benchmark::DoNotOptimize(y.data());
  }
  state.SetItemsProcessed(state.iterations() * n);
}
BENCHMARK(BM_situ);

}  // namespace
}  // namespace k3
