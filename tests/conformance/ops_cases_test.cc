// One list of shapes and extremes: every CPU table against the float64 reference, and bit for bit
// against the other tables.
#include <algorithm>
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

std::vector<float> Normal(std::uint64_t seed, std::int64_t n, double scale = 1.0) {
  Rng rng(seed);
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) {
    const double r = std::sqrt(-2 * std::log(1 - rng.Uniform()));
    x = static_cast<float>(scale * r * std::cos(6.283185307179586 * rng.Uniform()));
  }
  return v;
}

/// Runs `op(backend)` on every backend. The reference comes first; the others must stay within
/// `tolerance` of it and give the same bits as each other.
void Compare(const std::string& what, double tolerance,
             const std::function<std::vector<float>(Backend&)>& op) {
  std::vector<float> reference, first;
  for (const auto& b : testing::Backends(true)) {
    const auto got = op(*b.make());
    if (b.name == "ref") {
      reference = got;
      continue;
    }
    EXPECT_LE(RelativeL2(got, reference), tolerance) << what << " on " << b.name;
    if (first.empty()) first = got;
    EXPECT_EQ(std::memcmp(got.data(), first.data(), 4 * got.size()), 0)
        << what << ": " << b.name << " gives other bits than scalar";
  }
}

/// One matrix in every format that fits its width.
struct Forms {
  std::vector<std::vector<std::uint8_t>> bytes;
  std::vector<WeightRef> refs;

  Forms(const std::vector<float>& w, std::int64_t N, std::int64_t K) {
    bytes.reserve(10);
    refs.push_back({WeightFormat::kF32, N, K, w.data(), nullptr});
    for (const WeightFormat f :
         {WeightFormat::kBF16, WeightFormat::kMxfp4, WeightFormat::kFp8, WeightFormat::kInt8}) {
      if (!FitsWidth(f, K)) continue;
      // One byte in front: data from a file may stand anywhere.
      auto& codes = bytes.emplace_back(static_cast<std::size_t>(CodeBytes(f, N, K)) + 1);
      auto& scales = bytes.emplace_back(static_cast<std::size_t>(ScaleBytes(f, N, K)) + 1);
      EncodeRows(f, w.data(), N, K, codes.data() + 1, scales.data() + 1);
      refs.push_back({f, N, K, codes.data() + 1, scales.data() + 1});
    }
  }
};

TEST(OpsCases, Gemm) {
  // 16 interleaved f32 sums of K products: error grows like sqrt(K / 16) half-ulps.
  for (const std::int64_t M : {1, 2, 3, 4, 5, 17}) {
    for (const std::int64_t N : {1, 2, 3, 5, 64, 67}) {
      for (const std::int64_t K : {32, 64, 96, 160, 1024}) {
        const auto x = Normal(1, M * K), w = Normal(2, N * K, 0.1);
        const Forms forms(w, N, K);
        for (const WeightRef& form : forms.refs) {
          Compare("gemm", 1e-6, [&](Backend& ops) {
            std::vector<float> y(static_cast<std::size_t>(M * N));
            ops.Gemm({CMat(x.data(), {M, K}), form, Mat(y.data(), {M, N})});
            return y;
          });
        }
      }
    }
  }
}

TEST(OpsCases, GemmOfCodesAtOddShapes) {
  // e4m3 takes any width; blocks of 128 are cut in both directions, and rows start inside one.
  for (const std::int64_t M : {1, 3, 6}) {
    for (const std::int64_t K : {1, 15, 17, 31, 33, 47, 100, 127, 129, 160, 300}) {
      const std::int64_t N = 131;
      const auto x = Normal(1, M * K), w = Normal(2, N * K, 0.1);
      const Forms forms(w, N, K);
      for (const WeightRef& form : forms.refs) {
        for (const std::int64_t first : {0, 126}) {
          const WeightRef part = form.RowSlice(first, N - first);
          Compare("gemm of codes", 1e-6, [&](Backend& ops) {
            std::vector<float> y(static_cast<std::size_t>(M * part.rows));
            ops.Gemm({CMat(x.data(), {M, K}), part, Mat(y.data(), {M, part.rows})});
            return y;
          });
        }
      }
    }
  }
}

TEST(OpsCases, EveryByteCode) {
  // A unit vector picks one weight: each code must come out as DecodeRow has it, NaN as NaN.
  std::vector<std::uint8_t> codes(256), bf16_scales(16);
  for (std::size_t i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
  const float scale = 0.75f, pair[] = {scale, scale};
  for (std::size_t i = 0; i < 8; ++i) {
    const BF16 b = ToBF16(scale);
    std::memcpy(&bf16_scales[2 * i], &b, 2);
  }
  const auto* pairs = reinterpret_cast<const std::uint8_t*>(pair);
  for (const WeightRef& w :
       {WeightRef{WeightFormat::kFp8, 1, 256, codes.data(), pairs},
        WeightRef{WeightFormat::kInt8, 1, 256, codes.data(), bf16_scales.data()}}) {
    std::vector<float> want(256);
    DecodeRow(w, 0, want.data());
    for (const std::int64_t rows : {1, 8}) {  // in registers, and decoded first
      for (const auto& b : testing::Backends(false)) {
        const auto ops = b.make();
        for (std::size_t i = 0; i < 256; ++i) {
          if (w.format == WeightFormat::kFp8 && (i & 127) == 127) continue;
          WeightRef some = w.RowSlice(0, 1);
          // The NaN codes would spoil the sum: look at 32 columns around i that hold none.
          std::vector<float> x(static_cast<std::size_t>(rows) * 256, 0.f);
          std::vector<std::uint8_t> masked = codes;
          if (w.format == WeightFormat::kFp8) masked[127] = masked[255] = 0;
          some.data = masked.data();
          x[(static_cast<std::size_t>(rows) - 1) * 256 + i] = 1.f;
          std::vector<float> y(static_cast<std::size_t>(rows));
          ops->Gemm({CMat(x.data(), {rows, 256}), some, Mat(y.data(), {rows, 1})});
          EXPECT_EQ(y.back(), want[i]) << b.name << " code " << i << " rows " << rows;
        }
        if (w.format == WeightFormat::kFp8) {
          std::vector<float> x(static_cast<std::size_t>(rows) * 256, 1.f);
          std::vector<float> y(static_cast<std::size_t>(rows));
          ops->Gemm({CMat(x.data(), {rows, 256}), w, Mat(y.data(), {rows, 1})});
          EXPECT_TRUE(std::isnan(y.back())) << b.name;
        }
      }
    }
  }
}

TEST(OpsCases, GemmOddWidthsUnalignedAndStrided) {
  for (const std::int64_t K : {1, 2, 7, 15, 16, 17, 31, 33, 100}) {
    const std::int64_t M = 3, N = 5, ld = K + 3;
    const auto x = Normal(1, M * ld), w = Normal(2, N * K);
    std::vector<std::byte> unaligned(w.size() * 4 + 1);
    std::memcpy(unaligned.data() + 1, w.data(), w.size() * 4);
    for (const void* data :
         {static_cast<const void*>(w.data()), static_cast<const void*>(unaligned.data() + 1)}) {
      Compare("gemm strided", 1e-6, [&](Backend& ops) {
        std::vector<float> y(static_cast<std::size_t>(M * N));
        ops.Gemm({CMat(x.data(), {M, K}, {ld, 1}),
                  {WeightFormat::kF32, N, K, data, nullptr},
                  Mat(y.data(), {M, N})});
        return y;
      });
    }
  }
}

TEST(OpsCases, GemmRowDoesNotDependOnItsBatch) {
  const std::int64_t K = 200, N = 33;
  const auto x = Normal(1, 19 * K), w = Normal(2, N * K);
  const WeightRef weight{WeightFormat::kF32, N, K, w.data(), nullptr};
  for (const auto& b : testing::Backends(false)) {
    const auto ops = b.make();
    std::vector<float> all(19 * static_cast<std::size_t>(N)), one(static_cast<std::size_t>(N));
    ops->Gemm({CMat(x.data(), {19, K}), weight, Mat(all.data(), {19, N})});
    for (std::size_t t = 0; t < 19; ++t) {
      ops->Gemm({CMat(x.data() + t * static_cast<std::size_t>(K), {1, K}), weight,
                 Mat(one.data(), {1, N})});
      EXPECT_EQ(std::memcmp(one.data(), &all[t * one.size()], 4 * one.size()), 0)
          << b.name << " row " << t;
    }
  }
}

struct KdaShape {
  std::vector<std::int64_t> lengths;
  std::int64_t H, K, V;
  double g_low, g_high;  // log decays are uniform in between
};

std::vector<float> RunKda(Backend& ops, const KdaShape& s, std::int64_t chunk, bool bounded) {
  std::int64_t T = 0;
  std::vector<SequenceRange> ranges;
  for (const std::int64_t n : s.lengths) {
    ranges.push_back({T, n});
    T += n;
  }
  auto q = Normal(1, T * s.H * s.K), k = Normal(2, T * s.H * s.K), v = Normal(3, T * s.H * s.V);
  std::vector<float> g(q.size()), beta(static_cast<std::size_t>(T * s.H));
  Rng rng(4);
  for (float& x : g) x = static_cast<float>(s.g_low + (s.g_high - s.g_low) * rng.Uniform());
  for (float& x : beta) x = static_cast<float>(rng.Uniform());
  const Mat qm(q.data(), {T, s.H * s.K}), km(k.data(), {T, s.H * s.K});
  ops.L2Norm({qm, s.K, 1e-6f, qm});
  ops.L2Norm({km, s.K, 1e-6f, km});
  auto states = Normal(5, static_cast<std::int64_t>(s.lengths.size()) * s.H * s.K * s.V, 0.3);
  std::vector<float*> pointers;
  for (std::size_t i = 0; i < s.lengths.size(); ++i)
    pointers.push_back(&states[i * static_cast<std::size_t>(s.H * s.K * s.V)]);
  std::vector<float> o(v.size());
  KdaArgs a;
  a.q = qm, a.k = km, a.v = CMat(v.data(), {T, s.H * s.V}), a.g = CMat(g.data(), {T, s.H * s.K});
  a.beta = CMat(beta.data(), {T, s.H});
  a.n_heads = s.H, a.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.K)));
  a.sequences = ranges, a.states = pointers, a.o = Mat(o.data(), {T, s.H * s.V});
  a.chunk = chunk;
  if (bounded) a.lower_bound = -5.f;
  if (chunk > 0) {
    ops.KdaChunk(a);
  } else {
    ops.KdaRecurrent(a);
  }
  o.insert(o.end(), states.begin(), states.end());
  return o;
}

const KdaShape kKdaShapes[] = {
    {{}, 2, 8, 8, -5, 0},
    {{0}, 2, 8, 8, -5, 0},
    {{1}, 1, 4, 3, -5, 0},
    {{15, 16, 17}, 3, 32, 32, -5, 0},
    {{33, 0, 1, 64}, 2, 64, 64, -3, 0},
    {{40}, 1, 128, 128, -5, -4.9},
    {{100}, 2, 16, 48, -1e-3, 0},
    {{70}, 1, 20, 100, -5, 0},
    {{20}, 1, 144, 72, -5, 0},  // wider than the panel that long runs copy
    {{17}, 1, 272, 16, -5, 0},  // wider than any chunk
};

TEST(OpsCases, KdaRecurrent) {
  for (const KdaShape& s : kKdaShapes) {
    Compare("kda recurrent", 2e-6, [&](Backend& ops) { return RunKda(ops, s, 0, true); });
  }
}

TEST(OpsCases, KdaChunkBoundedAndNot) {
  for (const KdaShape& s : kKdaShapes) {
    for (const bool bounded : {true, false}) {
      Compare("kda chunk", 2e-5, [&](Backend& ops) { return RunKda(ops, s, 16, bounded); });
    }
  }
  // Decays far below any bound: the pairwise form must hold where exp(-G) would overflow.
  Compare("kda chunk, unbounded decay", 2e-5,
          [&](Backend& ops) { return RunKda(ops, {{48}, 2, 16, 16, -60, 0}, 16, false); });
}

struct MlaShape {
  std::int64_t count, past, R;
  float scale;
  WeightFormat format;
};

void CompareMla(const MlaShape& s, MlaForm form, double tolerance) {
  const std::int64_t N = 3, dn = 16, dr = 8, dv = 24, page = 64, rows = s.past + s.count;
  const auto q = Normal(1, s.count * N * (dn + dr)), kv_b = Normal(2, N * (dn + dv) * s.R, 0.2);
  const auto cache = Normal(3, (rows + page) * (s.R + dr));
  std::vector<const float*> pages;
  for (std::int64_t i = 0; i < rows; i += page) pages.push_back(cache.data() + i * (s.R + dr));
  const MlaSequence seq{0, s.count, pages, rows};
  const Forms forms(kv_b, N * (dn + dv), s.R);
  MlaArgs a;
  for (const WeightRef& w : forms.refs) {
    if (w.format == s.format) a.kv_b = w;
  }
  a.q = CMat(q.data(), {s.count, N * (dn + dr)});
  a.n_heads = N, a.nope_dim = dn, a.rope_dim = dr, a.v_dim = dv, a.page_rows = page;
  a.scale = s.scale;
  a.sequences = {&seq, 1};
  a.form = form;
  Compare("mla", tolerance, [&](Backend& ops) {
    std::vector<float> o(static_cast<std::size_t>(s.count * N * dv));
    a.o = Mat(o.data(), {s.count, N * dv});
    ops.Mla(a);
    return o;
  });
}

TEST(OpsCases, MlaBothForms) {
  for (const std::int64_t count : {1, 2, 63, 64, 65, 130}) {
    for (const std::int64_t past : {0, 1, 64, 100}) {
      for (const MlaForm form : {MlaForm::kAbsorbed, MlaForm::kPlain}) {
        CompareMla({count, past, 40, 0.2f, WeightFormat::kF32}, form, 2e-6);
      }
    }
  }
}

TEST(OpsCases, MlaReadsBf16WeightsInPlace) {
  // Up to four queries; 168 columns are eight vectors at once, two more and half of one.
  for (const std::int64_t count : {1, 3, 4, 5}) {
    CompareMla({count, 70, 168, 0.1f, WeightFormat::kBF16}, MlaForm::kAbsorbed, 2e-6);
  }
}

TEST(OpsCases, MlaScoresFarApart) {
  // Scores of hundreds, the largest anywhere in a page: only relative to it does exp stay finite.
  // f32 scores are off by up to 1e-4 there, and so are weights.
  for (const std::int64_t past : {0, 30, 61, 64, 77, 127}) {
    for (const MlaForm form : {MlaForm::kAbsorbed, MlaForm::kPlain}) {
      CompareMla({9, past, 40, 20.f, WeightFormat::kF32}, form, 1e-3);
    }
  }
}

TEST(OpsCases, GqaAndRope) {
  for (const std::int64_t count : {1, 3, 65, 130}) {
    for (const std::int64_t past : {0, 1, 64, 100}) {
      for (const std::int64_t G : {1, 2, 6}) {
        const std::int64_t N = 6, D = 20, page = 64, rows = past + count;
        const auto q = Normal(1, count * N * D), keys = Normal(2, (rows + page) * G * D),
                   values = Normal(3, (rows + page) * G * D);
        std::vector<const float*> key_pages, value_pages;
        for (std::int64_t i = 0; i < rows; i += page) {
          key_pages.push_back(keys.data() + i * G * D);
          value_pages.push_back(values.data() + i * G * D);
        }
        const GqaSequence seq{0, count, key_pages, value_pages, rows};
        std::vector<std::int64_t> positions;
        for (std::int64_t t = 0; t < count; ++t)
          positions.push_back(1'000'000 * (past % 2) + past + t);
        Compare("gqa", 2e-6, [&](Backend& ops) {
          std::vector<float> rotated = q, o(q.size());
          const Mat qm(rotated.data(), {count, N * D});
          ops.Rope({qm, D, 10000.0, positions});
          ops.Gqa({qm, N, G, page, {&seq, 1}, Mat(o.data(), {count, N * D})});
          o.insert(o.end(), rotated.begin(), rotated.end());
          return o;
        });
      }
    }
  }
}

TEST(OpsCases, ExpertsWithoutTokensAndAllOnOne) {
  const std::int64_t T = 9, D = 64, I = 32, E = 7, k = 3;
  std::vector<std::vector<float>> matrices;
  std::vector<ExpertWeights> table;
  for (std::int64_t e = 0; e < E; ++e) {
    auto make = [&](std::int64_t rows, std::int64_t cols) {
      matrices.push_back(Normal(static_cast<std::uint64_t>(matrices.size()), rows * cols, 0.2));
      return WeightRef{WeightFormat::kF32, rows, cols, matrices.back().data(), nullptr};
    };
    table.push_back({make(I, D), make(I, D), make(D, I)});
  }
  const auto x = Normal(77, T * D), w = Normal(78, T * k);
  for (const int pattern : {0, 1}) {
    std::vector<std::int32_t> experts(static_cast<std::size_t>(T * k));
    for (std::int64_t i = 0; i < T * k; ++i) {
      experts[static_cast<std::size_t>(i)] =
          static_cast<std::int32_t>(pattern == 0 ? i % k : (5 * i + i / k) % E);
    }
    Compare("experts", 2e-6, [&](Backend& ops) {
      std::vector<float> y(x.size());
      ops.ExpertMlp({CMat(x.data(), {T, D}),
                     View<const std::int32_t, 2>(experts.data(), {T, k}),
                     CMat(w.data(), {T, k}),
                     table,
                     {true, 4.f, 25.f},
                     Mat(y.data(), {T, D})});
      return y;
    });
  }
}

TEST(OpsCases, RouteWithNanNeverRepeatsAnExpert) {
  const float nan = std::nanf("");
  const std::vector<float> logits{nan, 1.f, nan, nan, -2.f, nan}, bias(6);
  for (const auto& b : testing::Backends(true)) {
    std::vector<std::int32_t> experts(4);
    std::vector<float> weights(4);
    RouteArgs a;
    a.logits = CMat(logits.data(), {1, 6}), a.bias = CVec(bias.data(), {6});
    a.k = 4;
    a.experts = View<std::int32_t, 2>(experts.data(), {1, 4}),
    a.weights = Mat(weights.data(), {1, 4});
    b.make()->Route(a);
    EXPECT_EQ(experts, (std::vector<std::int32_t>{1, 4, 0, 2})) << b.name;
  }
}

TEST(OpsCases, PointwiseOps) {
  const std::int64_t T = 7, D = 37;
  const auto a = Normal(1, T * D, 5.0), b = Normal(2, T * D), gate = Normal(3, T * D, 3.0);
  const CMat am(a.data(), {T, D}), bm(b.data(), {T, D}), gm(gate.data(), {T, D});
  const auto w = Normal(4, D);
  const CVec wv(w.data(), {D});
  auto run = [&](const std::string& what, const std::function<void(Backend&, Mat)>& op) {
    Compare(what, 1e-6, [&](Backend& ops) {
      std::vector<float> y(a.size());
      op(ops, Mat(y.data(), {T, D}));
      return y;
    });
  };
  run("rms norm", [&](Backend& o, Mat y) { o.RmsNorm({am, wv, 1e-5f, y}); });
  run("gated rms norm", [&](Backend& o, Mat y) { o.GatedRmsNorm({am, gm, wv, 1e-5f, y}); });
  run("l2 norm", [&](Backend& o, Mat y) { o.L2Norm({am, D, 1e-6f, y}); });
  run("situ", [&](Backend& o, Mat y) { o.GatedAct({am, bm, {true, 4.f, 25.f}, y}); });
  run("swiglu", [&](Backend& o, Mat y) { o.GatedAct({am, bm, {}, y}); });
  run("sigmoid", [&](Backend& o, Mat y) { o.Sigmoid({am, y}); });
  run("sigmoid gate", [&](Backend& o, Mat y) { o.SigmoidGate({am, gm, y}); });
  run("add", [&](Backend& o, Mat y) { o.Residual({am, bm, 1.f, {}, y}); });
  run("scaled add", [&](Backend& o, Mat y) { o.Residual({am, bm, 0.3f, {}, y}); });
  run("gated add", [&](Backend& o, Mat y) { o.Residual({am, bm, 1.f, gm, y}); });
  run("gated add, one number a token",
      [&](Backend& o, Mat y) { o.Residual({am, bm, 1.f, CMat(gate.data(), {T, 1}, {D, 1}), y}); });
  for (const PointwiseFn fn : {PointwiseFn::kSilu, PointwiseFn::kTanh, PointwiseFn::kRelu}) {
    run("pointwise", [&](Backend& o, Mat y) { o.Pointwise({am, fn, y}); });
  }
}

TEST(OpsCases, ShortConvCutAnywhere) {
  struct Shape {
    std::int64_t P, k;
  };
  // Channels are cut for threads and vectors; four taps have a loop of their own.
  for (const auto& [P, k] : {Shape{19, 4}, {451, 4}, {35, 3}, {35, 6}, {19, 1}}) {
    const std::int64_t T = 11;
    const auto x = Normal(1, T * P), w = Normal(2, P * k), history = Normal(3, (k - 1) * P);
    for (std::int64_t cut = 0; cut <= T; ++cut) {
      Compare("short conv", 1e-6, [&, P = P, k = k](Backend& ops) {
        std::vector<float> y(x.size()), h = history;
        float* pointers[] = {h.data()};
        for (const SequenceRange range : {SequenceRange{0, cut}, SequenceRange{cut, T - cut}}) {
          ops.ShortConv({CMat(x.data(), {T, P}),
                         CMat(w.data(), {P, k}),
                         {&range, 1},
                         pointers,
                         Mat(y.data(), {T, P})});
        }
        y.insert(y.end(), h.begin(), h.end());
        return y;
      });
    }
  }
}

void CompareAttnRes(double query_scale, double tolerance) {
  const std::int64_t T = 5, H = 33;
  const auto rows = Normal(1, 4 * T * H), w = Normal(2, H, query_scale);
  std::vector<const float*> pointers;
  for (std::size_t e = 0; e < 4; ++e)
    pointers.push_back(&rows[e * static_cast<std::size_t>(T * H)]);
  for (const std::optional<float> gamma : {std::optional<float>(), std::optional<float>(0.3f)}) {
    Compare("attn res", tolerance, [&](Backend& ops) {
      std::vector<float> y(static_cast<std::size_t>(T * H)), pi(static_cast<std::size_t>(T * 4));
      ops.AttnRes({pointers, CVec(w.data(), {H}), 1e-5f, gamma, Mat(y.data(), {T, H}),
                   Mat(pi.data(), {T, 4})});
      y.insert(y.end(), pi.begin(), pi.end());
      return y;
    });
  }
}

TEST(OpsCases, AttnResWithGamma) { CompareAttnRes(1.0, 1e-6); }

// What a first site leaves for later ones does not change a bit of them.
TEST(OpsCases, AttnResKeepsSquares) {
  const std::int64_t T = 5, H = 33;
  const auto rows = Normal(1, 4 * T * H), first = Normal(2, H), second = Normal(3, H);
  std::vector<const float*> pointers;
  for (std::size_t e = 0; e < 4; ++e)
    pointers.push_back(&rows[e * static_cast<std::size_t>(T * H)]);
  cpu::CpuBackend ops(testing::TestPool(), *cpu::ChooseTable().value());
  auto mix = [&](const std::vector<float>& w, std::span<float* const> squares, std::size_t known) {
    std::vector<float> y(static_cast<std::size_t>(T * H));
    AttnResArgs args{pointers, CVec(w.data(), {H}), 1e-5f, {}, Mat(y.data(), {T, H}), {}};
    args.squares = squares, args.known = known;
    ops.AttnRes(args);
    return y;
  };
  std::vector<float> sums(static_cast<std::size_t>(3 * T), -1.f);
  float* const squares[] = {&sums[0], &sums[5], &sums[10]};
  EXPECT_EQ(mix(first, squares, 0), mix(first, {}, 0));
  EXPECT_TRUE(std::all_of(sums.begin(), sums.end(), [](float x) { return x > 0; }));
  EXPECT_EQ(mix(second, squares, 3), mix(second, {}, 0));
  sums[7] *= 4;  // read, not summed again
  EXPECT_NE(mix(second, squares, 3), mix(second, {}, 0));
}

// Scores of thousands: exp of them is infinite also in float64.
TEST(OpsCases, AttnResScoresFarApart) { CompareAttnRes(500.0, 1e-3); }

}  // namespace
}  // namespace k3
