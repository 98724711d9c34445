// Long runs at both ends of the decay: nothing overflows, and the error against float64 is known.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include <gtest/gtest.h>

#include "k3/base/rng.h"
#include "support/backends.h"
#include "support/golden.h"

namespace k3 {
namespace {

using testing::RelativeL2;

struct KdaRun {
  std::vector<float> o, state;
};

/// T tokens of two heads of 64; log decays uniform in [low, high]. chunk 0: token by token.
KdaRun RunKda(Backend& ops, std::int64_t T, double low, double high, std::int64_t chunk,
              std::optional<float> bound = -5.f) {
  constexpr std::int64_t H = 2, D = 64;
  Rng rng(9);
  auto uniform = [&](std::int64_t n, double a, double b) {
    std::vector<float> v(static_cast<std::size_t>(n));
    for (float& x : v) x = static_cast<float>(a + (b - a) * rng.Uniform());
    return v;
  };
  auto q = uniform(T * H * D, -1, 1), k = uniform(T * H * D, -1, 1), v = uniform(T * H * D, -1, 1);
  const auto g = uniform(T * H * D, low, high), beta = uniform(T * H, 0, 1);
  const Mat qm(q.data(), {T, H * D}), km(k.data(), {T, H * D});
  ReferenceBackend norm;  // the same inputs for everyone
  norm.L2Norm({qm, D, 1e-6f, qm});
  norm.L2Norm({km, D, 1e-6f, km});
  KdaRun run{std::vector<float>(v.size()), std::vector<float>(H * D * D)};
  const SequenceRange all{0, T};
  float* states[] = {run.state.data()};
  KdaArgs a;
  a.q = qm, a.k = km, a.v = CMat(v.data(), {T, H * D}), a.g = CMat(g.data(), {T, H * D});
  a.beta = CMat(beta.data(), {T, H});
  a.n_heads = H, a.scale = 0.125f;
  a.sequences = {&all, 1}, a.states = states, a.o = Mat(run.o.data(), {T, H * D});
  a.chunk = chunk, a.lower_bound = bound;
  if (chunk > 0) {
    ops.KdaChunk(a);
  } else {
    ops.KdaRecurrent(a);
  }
  return run;
}

TEST(WorstCase, KdaAtBothEndsOfTheDecay) {
  struct {
    const char* name;
    std::int64_t tokens;
    double low, high;
  } const cases[] = {{"decay pinned at -5", 4096, -5, -5},
                     {"decay near 0", 32768, -1e-4, 0},
                     {"decay exactly 0", 4096, 0, 0},
                     {"decay over the whole range", 4096, -5, 0}};
  std::printf("  %-28s %8s  %-10s %-10s %-10s\n", "case", "tokens", "form", "output", "state");
  const auto backends = testing::Backends(false);
  for (const auto& c : cases) {
    ReferenceBackend reference;
    const KdaRun want = RunKda(reference, c.tokens, c.low, c.high, 0);
    for (const std::int64_t chunk : {0, 16}) {
      const KdaRun got = RunKda(*backends.back().make(), c.tokens, c.low, c.high, chunk);
      const std::vector<float>* parts[] = {&got.o, &got.state};
      for (const auto* values : parts) {
        for (const float x : *values) ASSERT_TRUE(std::isfinite(x)) << c.name;
      }
      const double output = RelativeL2(got.o, want.o), state = RelativeL2(got.state, want.state);
      std::printf("  %-28s %8lld  %-10s %.1e    %.1e\n", c.name, static_cast<long long>(c.tokens),
                  chunk > 0 ? "chunk 16" : "recurrent", output, state);
      // f32 state: rounding adds up over the memory's length, and the delta rule pulls it back.
      const double tolerance = chunk > 0 ? 5e-5 : 5e-6;
      EXPECT_LT(output, tolerance) << c.name;
      EXPECT_LT(state, tolerance) << c.name;
    }
  }
}

/// One line of the table: a form's error of output and state.
struct BoundError {
  double output, state;
};

BoundError ErrorOf(const KdaRun& got, const KdaRun& want) {
  for (const float x : got.o) EXPECT_TRUE(std::isfinite(x));
  for (const float x : got.state) EXPECT_TRUE(std::isfinite(x));
  return {RelativeL2(got.o, want.o), RelativeL2(got.state, want.state)};
}

// Mild: a channel loses up to a twentieth of what the bound allows. Worst: all of it, every token;
// without a bound anything from nothing to e^-30 (in a chunk of 16 that is e^-480, far below f32).
TEST(WorstCase, KdaErrorByBound) {
  struct {
    const char* name;
    std::optional<float> bound;
    double worst_low, worst_high;
  } const cases[] = {{"-1", -1.f, -1, -1},
                     {"-2.5", -2.5f, -2.5, -2.5},
                     {"-5", -5.f, -5, -5},
                     {"-8", -8.f, -8, -8},
                     {"none", std::nullopt, -30, 0}};
  constexpr std::int64_t kTokens = 1024;
  const cpu::SimdTable& table = *cpu::SupportedTables().back();
  const bool tiles = table.fast != nullptr && table.fast->kda_chunks != nullptr;
  if (!tiles) std::printf("  SKIP bf16 tiles: %s has none, fast is f32 here\n", table.name);
  std::printf("  %-5s %-5s  %-8s %-8s  %-8s %-8s  %-8s %-8s\n", "bound", "decay", "token", "state",
              "chunk", "state", "fast", "state");
  const MathMode fast_mode = MathMode::kFast;
  cpu::CpuBackend exact(testing::TestPool(), table), fast(testing::TestPool(), table, &fast_mode);
  for (const auto& c : cases) {
    for (const bool worst : {false, true}) {
      const double low = worst ? c.worst_low : c.worst_low / 20, high = worst ? c.worst_high : 0;
      ReferenceBackend reference;
      const KdaRun want = RunKda(reference, kTokens, low, high, 0);
      const auto error = [&](Backend& ops, std::int64_t chunk) {
        return ErrorOf(RunKda(ops, kTokens, low, high, chunk, c.bound), want);
      };
      const BoundError token = error(exact, 0), chunk = error(exact, 16), bf16 = error(fast, 16);
      std::printf("  %-5s %-5s  %.1e  %.1e   %.1e  %.1e   %.1e  %.1e\n", c.name,
                  worst ? "worst" : "mild", token.output, token.state, chunk.output, chunk.state,
                  bf16.output, bf16.state);
      EXPECT_LT(std::max(token.output, token.state), 5e-6) << c.name;
      EXPECT_LT(std::max(chunk.output, chunk.state), 5e-5) << c.name;
      EXPECT_LT(std::max(bf16.output, bf16.state), 8e-3) << c.name;  // operands rounded to bf16
      // Tiles take chunks whose factors stay within e^40; other bounds run in f32 segments.
      const bool rounded = tiles && c.bound && *c.bound >= -5.f;
      EXPECT_EQ(bf16.output > 1e-4, rounded) << c.name << ": which form ran?";
    }
  }
}

}  // namespace
}  // namespace k3
