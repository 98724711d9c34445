// Fast mode, op by op: products in bf16 stay within their tolerance, and a row's bits do not depend
// on the rows beside it. Elementary functions of every table against float64.
#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include "k3/base/rng.h"
#include "k3/quant/encode.h"
#include "k3/quant/mxfp4.h"
#include "support/backends.h"
#include "support/golden.h"

namespace k3 {
namespace {

using testing::RelativeL2;

constexpr MathMode kFastMode = MathMode::kFast;

std::vector<float> Uniform(std::uint64_t seed, std::int64_t n, double low = -1, double high = 1) {
  Rng rng(seed);
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = static_cast<float>(low + (high - low) * rng.Uniform());
  return v;
}

std::vector<const cpu::SimdTable*> FastTables() {
  std::vector<const cpu::SimdTable*> tables;
  for (const cpu::SimdTable* t : cpu::SupportedTables()) {
    if (t->fast != nullptr) tables.push_back(t);
  }
  return tables;
}

/// The forms of the same random matrix.
struct Weights {
  std::vector<BF16> bf16;
  std::vector<std::uint8_t> codes, scales, fp8_codes, fp8_scales, int8_codes, int8_scales;
  WeightRef dense, packed, fp8, int8;

  Weights(std::int64_t N, std::int64_t K) {
    const auto w = Uniform(static_cast<std::uint64_t>(N * K), N * K, -0.1, 0.1);
    for (const float x : w) bf16.push_back(ToBF16(x));
    codes.resize(w.size() / 2), scales.resize(w.size() / 32);
    PackMxfp4(w, MxScaleRule::kNoSaturation, codes.data(), scales.data());
    dense = {WeightFormat::kBF16, N, K, bf16.data(), nullptr};
    packed = {WeightFormat::kMxfp4, N, K, codes.data(), scales.data()};
    fp8 = Encode(WeightFormat::kFp8, w, N, K, fp8_codes, fp8_scales);
    int8 = Encode(WeightFormat::kInt8, w, N, K, int8_codes, int8_scales);
  }
  Weights(const Weights&) = delete;

  static WeightRef Encode(WeightFormat f, const std::vector<float>& w, std::int64_t N,
                          std::int64_t K, std::vector<std::uint8_t>& codes,
                          std::vector<std::uint8_t>& scales) {
    codes.resize(static_cast<std::size_t>(CodeBytes(f, N, K)));
    scales.resize(static_cast<std::size_t>(ScaleBytes(f, N, K)));
    EncodeRows(f, w.data(), N, K, codes.data(), scales.data());
    return {f, N, K, codes.data(), scales.data()};
  }
  std::vector<WeightRef> all() const { return {dense, packed, fp8, int8}; }
};

std::vector<float> Multiply(Backend& ops, const std::vector<float>& x, std::int64_t M,
                            const WeightRef& w, bool keep_f32 = false) {
  std::vector<float> y(static_cast<std::size_t>(M * w.rows));
  ops.Gemm({CMat(x.data(), {M, w.cols}), w, Mat(y.data(), {M, w.rows}), keep_f32});
  return y;
}

TEST(FastMode, ProductsNearTheReferenceAndNotF32) {
  if (FastTables().empty()) GTEST_SKIP() << "no bf16 products on this processor";
  for (const cpu::SimdTable* table : FastTables()) {
    cpu::CpuBackend fast(testing::TestPool(), *table, &kFastMode);
    ReferenceBackend reference;
    for (const std::int64_t M : {1, 2, 15, 16, 17, 33, 64, 70}) {
      for (const std::int64_t N : {1, 5, 16, 17, 31, 32, 33, 100}) {
        for (const std::int64_t K : {32, 64, 160, 1024}) {
          const Weights w(N, K);
          const auto x = Uniform(3, M * K);
          for (const WeightRef& form : w.all()) {
            const auto want = Multiply(reference, x, M, form);
            // Rounding x to 8 bits: 2^-9 a product, averaged over K of them; int8 weights are
            // rounded so too. Against the size of the whole result: single elements may cancel.
            EXPECT_LT(RelativeL2(Multiply(fast, x, M, form), want), 6e-3)
                << table->name << " " << M << " " << N << " " << K;
            EXPECT_LT(RelativeL2(Multiply(fast, x, M, form, true), want), 1e-6);
          }
        }
      }
    }
  }
}

TEST(FastMode, RowDoesNotDependOnItsBatch) {
  if (FastTables().empty()) GTEST_SKIP() << "no bf16 products on this processor";
  const std::int64_t M = 100, N = 75, K = 96;
  const Weights w(N, K);
  const auto x = Uniform(5, M * K);
  for (const cpu::SimdTable* table : FastTables()) {
    cpu::CpuBackend fast(testing::TestPool(), *table, &kFastMode);
    for (const WeightRef& form : w.all()) {
      const auto all = Multiply(fast, x, M, form);
      for (const std::int64_t m : {1, 3, 16, 40, 64}) {
        for (std::int64_t t = 0; t + m <= M; t += 13) {
          const std::vector<float> some(x.begin() + t * K, x.begin() + (t + m) * K);
          const auto got = Multiply(fast, some, m, form);
          EXPECT_EQ(std::memcmp(got.data(), all.data() + t * N, 4 * got.size()), 0)
              << table->name << " rows " << t << " to " << t + m;
        }
      }
    }
  }
}

TEST(FastMode, OneRowOfMxfp4AtTheEndsOfTheRange) {
  // A single row may take another way than a batch. Sums that become subnormal, infinite or NaN
  // must not show it.
  if (FastTables().empty()) GTEST_SKIP() << "no bf16 products on this processor";
  const std::int64_t N = 49, K = 672;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(N * K / 2)),
      scales(static_cast<std::size_t>(N * K / 32));
  Rng rng(11);
  for (auto& c : codes) c = static_cast<std::uint8_t>(rng.Next());
  const WeightRef w{WeightFormat::kMxfp4, N, K, codes.data(), scales.data()};
  for (const int scale : {0, 1, 3, 10, 60, 120, 127, 200, 251, 252, 254}) {
    for (const double size : {0.0, 1e-45, 1e-38, 1e-36, 1e-30, 1e-10, 1.0, 1e20, 1e36, 3e38}) {
      for (const bool mixed : {false, true}) {
        for (auto& s : scales)
          s = static_cast<std::uint8_t>(mixed ? static_cast<int>(rng.Next() % 255u) : scale);
        auto row = Uniform(13, K);
        for (float& v : row) v = static_cast<float>(v * size);
        row[5] = scale == 60 ? HUGE_VALF : 0.f;
        if (scale == 120) row[7] = 1.f;  // beside the small ones
        auto x = Uniform(14, K);
        x.insert(x.end(), row.begin(), row.end());
        for (const cpu::SimdTable* table : FastTables()) {
          cpu::CpuBackend fast(testing::TestPool(), *table, &kFastMode);
          const auto two = Multiply(fast, x, 2, w), one = Multiply(fast, row, 1, w);
          for (std::int64_t r = 0; r < N; ++r) {
            const float a = two[static_cast<std::size_t>(N + r)],
                        b = one[static_cast<std::size_t>(r)];
            EXPECT_TRUE(std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b)))
                << table->name << " scale " << scale << (mixed ? " mixed" : "") << " size " << size
                << " row " << r << ": " << a << " beside another row, " << b << " alone";
          }
        }
      }
    }
  }
}

TEST(FastMode, FewRowsOfMxfp4AtEveryWidth) {
  // Tails of a vector of blocks, and more of them than are summed at a time.
  if (FastTables().empty()) GTEST_SKIP() << "no bf16 products on this processor";
  const std::int64_t M = 20, N = 35;
  for (const std::int64_t K : {32, 64, 96, 128, 160, 480, 512, 544, 3584, 8192, 8288, 16416}) {
    const Weights w(N, K);
    auto x = Uniform(15, M * K);
    for (std::size_t i = 0; i < x.size(); i += 7) x[i] *= 100.f;  // its neighbours lose bits
    ReferenceBackend reference;
    const auto want = Multiply(reference, x, M, w.packed);
    for (const cpu::SimdTable* table : FastTables()) {
      cpu::CpuBackend fast(testing::TestPool(), *table, &kFastMode);
      const auto all = Multiply(fast, x, M, w.packed);
      EXPECT_LT(RelativeL2(all, want), 2e-3) << table->name << " " << K;
      for (const std::int64_t m : {1, 2, 3, 4, 5}) {
        const auto some = Multiply(fast, x, m, w.packed);
        EXPECT_EQ(std::memcmp(some.data(), all.data(), 4 * some.size()), 0)
            << table->name << " " << K << ", rows " << m;
      }
    }
  }
}

TEST(FastMode, WeightsOfE4m3StayExact) {
  // x in bf16 already: only the order of f32 sums is left. int8 times its scale is rounded.
  if (FastTables().empty()) GTEST_SKIP() << "no bf16 products on this processor";
  const std::int64_t M = 5, N = 150, K = 288;
  const Weights w(N, K);
  auto x = Uniform(7, M * K);
  for (float& v : x) v = RoundToBF16(v);
  for (const cpu::SimdTable* table : FastTables()) {
    cpu::CpuBackend fast(testing::TestPool(), *table, &kFastMode);
    ReferenceBackend reference;
    for (const std::int64_t first : {0, 100}) {  // from inside a block of 128 rows too
      const WeightRef part = w.fp8.RowSlice(first, N - first);
      EXPECT_LT(RelativeL2(Multiply(fast, x, M, part), Multiply(reference, x, M, part)), 1e-6)
          << table->name;
    }
    const double error =
        RelativeL2(Multiply(fast, x, M, w.int8), Multiply(reference, x, M, w.int8));
    EXPECT_LT(error, 3e-3) << table->name;  // what rounding x costs
    EXPECT_GT(error, 1e-4) << table->name;
  }
}

TEST(FastMode, EveryScaleByteOfMxfp4) {
  if (FastTables().empty()) GTEST_SKIP() << "no bf16 products on this processor";
  std::vector<std::uint8_t> codes(16);
  for (std::size_t i = 0; i < 16; ++i) codes[i] = static_cast<std::uint8_t>(17 * i);
  for (const cpu::SimdTable* table : FastTables()) {
    cpu::CpuBackend fast(testing::TestPool(), *table, &kFastMode);
    for (int scale = 0; scale < 255; ++scale) {
      const auto byte = static_cast<std::uint8_t>(scale);
      const WeightRef w{WeightFormat::kMxfp4, 1, 32, codes.data(), &byte};
      for (std::size_t i = 0; i < 32; ++i) {
        std::vector<float> one(32);
        one[i] = 1.f;
        const float got = Multiply(fast, one, 1, w)[0];
        const float want = kE2M1[i / 2] * E8M0ToFloat(byte);
        if (scale >= 3 && scale <= 251) {
          EXPECT_EQ(got, want) << table->name << " scale " << scale << " element " << i;
        } else if (scale < 3) {
          EXPECT_EQ(got, 0.f) << table->name << " scale " << scale;
        }
      }
    }
  }
}

struct Kda {
  std::vector<float> o, state;
};

/// Two heads of 128 through KdaChunk; decays are uniform in [low, high].
Kda RunKda(Backend& ops, std::int64_t T, double low, double high) {
  const std::int64_t H = 2, D = 128;
  auto q = Uniform(1, T * H * D), k = Uniform(2, T * H * D);
  const auto v = Uniform(3, T * H * D), g = Uniform(4, T * H * D, low, high),
             beta = Uniform(5, T * H, 0, 1);
  const Mat qm(q.data(), {T, H * D}), km(k.data(), {T, H * D});
  ReferenceBackend norm;
  norm.L2Norm({qm, D, 1e-6f, qm});
  norm.L2Norm({km, D, 1e-6f, km});
  Kda run{std::vector<float>(v.size()), Uniform(6, H * D * D)};
  const SequenceRange all{0, T};
  float* states[] = {run.state.data()};
  KdaArgs a;
  a.q = qm, a.k = km, a.v = CMat(v.data(), {T, H * D}), a.g = CMat(g.data(), {T, H * D});
  a.beta = CMat(beta.data(), {T, H});
  a.n_heads = H, a.scale = 0.088f, a.lower_bound = -5.f;
  a.sequences = {&all, 1}, a.states = states, a.o = Mat(run.o.data(), {T, H * D});
  ops.KdaChunk(a);
  return run;
}

TEST(FastMode, KdaChunksAtEveryDecay) {
  if (FastTables().empty()) GTEST_SKIP() << "no bf16 products on this processor";
  for (const cpu::SimdTable* table : FastTables()) {
    cpu::CpuBackend fast(testing::TestPool(), *table, &kFastMode);
    ReferenceBackend reference;
    for (const auto& [low, high] : {std::pair{-5.0, -5.0}, {-5.0, 0.0}, {-1e-3, 0.0}, {0.0, 0.0}}) {
      for (const std::int64_t T : {16, 48, 80, 100}) {
        const Kda got = RunKda(fast, T, low, high), want = RunKda(reference, T, low, high);
        // Every operand is rounded to 8 bits once a chunk; public kernels of this kind give 6e-3.
        EXPECT_LT(RelativeL2(got.o, want.o), 8e-3) << table->name << " " << low << " " << T;
        EXPECT_LT(RelativeL2(got.state, want.state), 8e-3) << table->name << " " << low << " " << T;
      }
    }
  }
}

TEST(FastMode, UnboundedDecayNeedsSegments) {
  // 16 tokens of decays down to e^-60 each. Taken apart into factors over the whole chunk, decays
  // leave the range of f32; cut into segments they do not.
  constexpr std::int64_t kT = 16, kD = 32;
  auto q = Uniform(1, kT * kD), k = Uniform(2, kT * kD);
  const auto v = Uniform(3, kT * kD), g = Uniform(4, kT * kD, -60, 0), beta = Uniform(5, kT, 0, 1),
             state = Uniform(6, kD * kD);
  ReferenceBackend reference;
  const Mat qm(q.data(), {kT, kD}), km(k.data(), {kT, kD});
  reference.L2Norm({qm, kD, 1e-6f, qm});
  reference.L2Norm({km, kD, 1e-6f, km});
  std::vector<float> want(kT * kD), want_state = state;
  const SequenceRange all{0, kT};
  float* states[] = {want_state.data()};
  KdaArgs a;
  a.q = qm, a.k = km, a.v = CMat(v.data(), {kT, kD}), a.g = CMat(g.data(), {kT, kD});
  a.beta = CMat(beta.data(), {kT, 1});
  a.n_heads = 1, a.sequences = {&all, 1}, a.states = states, a.o = Mat(want.data(), {kT, kD});
  reference.KdaRecurrent(a);
  for (const cpu::SimdTable* table : cpu::SupportedTables()) {
    for (const bool whole : {false, true}) {
      std::vector<float> o(want.size()), s = state;
      cpu::KdaHead h{};
      h.T = kT, h.K = h.V = kD, h.q = q.data(), h.k = k.data(), h.v = v.data(), h.g = g.data();
      h.beta = beta.data(), h.S = s.data(), h.o = o.data();
      h.ld_q = h.ld_k = h.ld_v = h.ld_g = h.ld_o = kD, h.ld_beta = 1;
      table->kda_chunk(h, whole);  // `whole` promises a bound that is not there
      const double error = RelativeL2(o, want);
      if (whole) {
        EXPECT_FALSE(error < 1e-2) << table->name << ": the segments would not be needed";
      } else {
        EXPECT_LT(error, 2e-6) << table->name;
        EXPECT_LT(RelativeL2(s, want_state), 2e-6) << table->name;
      }
    }
  }
}

TEST(FastMode, LatentAttentionOverPages) {
  if (FastTables().empty()) GTEST_SKIP() << "no bf16 products on this processor";
  const std::int64_t N = 2, dn = 64, dr = 32, dv = 64, R = 96, page = 64;
  const Weights w(N * (dn + dv), R);
  for (const cpu::SimdTable* table : FastTables()) {
    cpu::CpuBackend fast(testing::TestPool(), *table, &kFastMode);
    ReferenceBackend reference;
    for (const std::int64_t count : {64, 128, 192}) {
      for (const std::int64_t past : {0, 64, 256}) {
        const std::int64_t rows = past + count;
        const auto q = Uniform(1, count * N * (dn + dr), -3, 3);
        const auto cache = Uniform(2, rows * (R + dr));
        std::vector<const float*> pages;
        for (std::int64_t i = 0; i < rows; i += page) pages.push_back(cache.data() + i * (R + dr));
        const MlaSequence seq{0, count, pages, rows};
        std::vector<float> got(static_cast<std::size_t>(count * N * dv)), want(got.size());
        MlaArgs a;
        a.q = CMat(q.data(), {count, N * (dn + dr)});
        a.kv_b = w.dense;
        a.n_heads = N, a.nope_dim = dn, a.rope_dim = dr, a.v_dim = dv, a.page_rows = page;
        a.scale = 0.1f;
        a.sequences = {&seq, 1};
        a.form = MlaForm::kPlain;
        a.o = Mat(got.data(), {count, N * dv});
        fast.Mla(a);
        a.o = Mat(want.data(), {count, N * dv});
        reference.Mla(a);
        // Rounded scores move a weight by its size times their error; values are averaged.
        EXPECT_LT(RelativeL2(got, want), 1e-2) << table->name << " " << count << " " << past;
      }
    }
  }
}

/// Largest error of f over (low, high) in units of the last place of f32.
double UlpError(void (*f)(const float*, std::int64_t, float*), double (*exact)(double), double low,
                double high) {
  constexpr std::int64_t kN = 200'003;
  const auto x = Uniform(11, kN, low, high);
  std::vector<float> y(x.size());
  f(x.data(), kN, y.data());
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double want = exact(static_cast<double>(x[i]));
    const double ulp = std::ldexp(1.0, std::max(std::ilogb(want), -126) - 23);
    worst = std::max(worst, std::abs(static_cast<double>(y[i]) - want) / ulp);
  }
  return worst;
}

TEST(FastMode, ElementaryFunctionsAgainstFloat64) {
  for (const cpu::SimdTable* t : cpu::SupportedTables()) {
    EXPECT_LT(UlpError(t->exp, [](double x) { return std::exp(x); }, -87, 88), 1.5) << t->name;
    EXPECT_LT(UlpError(t->exp, [](double x) { return std::exp(x); }, -1, 0), 1.5) << t->name;
    const auto sigmoid = [](double x) { return 1.0 / (1.0 + std::exp(-x)); };
    EXPECT_LT(UlpError(t->sigmoid, sigmoid, -80, 80), 3.0) << t->name;
    EXPECT_LT(UlpError(t->sigmoid, sigmoid, -2, 2), 3.0) << t->name;
    const auto tanh = [](double x) { return std::tanh(x); };
    EXPECT_LT(UlpError(t->tanh, tanh, -10, 10), 3.0) << t->name;
    EXPECT_LT(UlpError(t->tanh, tanh, -0.6, 0.6), 3.0) << t->name;
    EXPECT_LT(UlpError(t->tanh, tanh, -1e-3, 1e-3), 3.0) << t->name;
    const float edge[] = {-HUGE_VALF, -200.f, 0.f, -0.f, std::nanf("")};
    float y[5];
    t->exp(edge, 5, y);
    EXPECT_TRUE(y[0] == 0.f && y[1] == 0.f && y[2] == 1.f && y[3] == 1.f && std::isnan(y[4]));
    const float wide[] = {-HUGE_VALF, HUGE_VALF, -3e38f, 3e38f, std::nanf("")};
    t->sigmoid(wide, 5, y);
    EXPECT_TRUE(y[0] == 0.f && y[1] == 1.f && y[2] == 0.f && y[3] == 1.f && std::isnan(y[4]));
    t->tanh(wide, 5, y);
    EXPECT_TRUE(y[0] == -1.f && y[1] == 1.f && y[2] == -1.f && y[3] == 1.f && std::isnan(y[4]));
  }
}

}  // namespace
}  // namespace k3
