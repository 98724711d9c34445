// Every op of every backend against vectors from the independent float64 program.
#include <gtest/gtest.h>

#include "k3/base/array.h"
#include "k3/quant/mxfp4.h"
#include "support/backends.h"
#include "support/golden.h"

namespace k3 {
namespace {

using testing::Golden;
using testing::RelativeL2;

constexpr double kTolerance = 1e-6;  // f32 arithmetic on values near one; golden.json hints 1e-5

class OpsGolden : public ::testing::TestWithParam<testing::NamedBackend> {
 protected:
  void SetUp() override { ops = GetParam().make(); }

  /// Output buffer of the shape of golden `name`, as rows of `cols` (0: its last dimension).
  Mat Out(const std::string& name, std::int64_t cols = 0) {
    const TensorRef& t = g.Ref(name);
    if (cols == 0) cols = t.shape.back();
    buffers.emplace_back(static_cast<std::size_t>(t.elements()), -77.f);
    return Mat(buffers.back().data(), {t.elements() / cols, cols});
  }
  CMat In(const std::string& name, std::int64_t cols = 0) {
    const TensorRef& t = g.Ref(name);
    if (cols == 0) cols = t.shape.back();
    buffers.push_back(g.Floats(name));
    return CMat(buffers.back().data(), {t.elements() / cols, cols});
  }
  CVec InVec(const std::string& name) {
    buffers.push_back(g.Floats(name));
    return CVec(buffers.back().data(), {static_cast<std::int64_t>(buffers.back().size())});
  }
  void Expect(CMat got, const std::string& name, double tolerance = kTolerance) {
    const auto want = g.Floats(name);
    ASSERT_EQ(got.size(), static_cast<std::int64_t>(want.size())) << name;
    EXPECT_LT(RelativeL2(got.data, want.data(), want.size()), tolerance) << name;
  }

  Golden g{"modules.safetensors"};
  std::unique_ptr<Backend> ops;
  std::deque<std::vector<float>> buffers;
};

TEST_P(OpsGolden, Norms) {
  const Mat y = Out("rms_norm.y");
  ops->RmsNorm({In("rms_norm.x"), InVec("rms_norm.w"), 1e-5f, y});
  Expect(y, "rms_norm.y");
  // Row 3 has norms near eps: on its own it shows an eps in the wrong place.
  const auto want = g.Floats("rms_norm.y");
  EXPECT_LT(RelativeL2(y.row(3), want.data() + 3 * 48, 48), kTolerance);

  const Mat l2 = Out("l2_norm.y");
  ops->L2Norm({In("l2_norm.x"), 48, 1e-6f, l2});
  Expect(l2, "l2_norm.y");
  const auto want_l2 = g.Floats("l2_norm.y");
  EXPECT_LT(RelativeL2(l2.row(3), want_l2.data() + 3 * 48, 48), kTolerance);
}

TEST_P(OpsGolden, ShortConv) {
  const Mat y = Out("short_conv.y");
  auto history = g.Floats("short_conv.history");
  float* histories[] = {history.data()};
  const SequenceRange all{0, 7};
  ops->ShortConv({In("short_conv.x"), In("short_conv.w", 4), {&all, 1}, histories, y});
  Expect(y, "short_conv.y");
  EXPECT_EQ(history, g.Floats("short_conv.new_history"));
}

TEST_P(OpsGolden, KdaGate) {
  for (const bool bounded : {true, false}) {
    const std::string name = bounded ? "kda_gate.bounded" : "kda_gate.softplus";
    const Mat out = Out(name, 24);
    const std::vector<float> zero(24);
    KdaGateArgs args;
    args.f = In("kda_gate.z", 24);
    args.dt_bias = CVec(zero.data(), {24});
    args.a_log = InVec("kda_gate.a_log");
    if (bounded) args.lower_bound = -5.f;
    args.g = out;
    ops->KdaGate(args);
    Expect(out, name);
  }
}

TEST_P(OpsGolden, Kda) {
  for (const std::string tag : {"kda_bounded", "kda_softplus"}) {
    for (const std::int64_t chunk : {0, 1, 5, 16, 37, 64}) {  // 0: token by token
      KdaArgs a;
      a.q = In(tag + ".q", 64), a.k = In(tag + ".k", 64), a.v = In(tag + ".v", 64);
      a.g = In(tag + ".g", 64), a.beta = In(tag + ".beta");
      a.n_heads = 2;
      a.scale = static_cast<float>(1 / std::sqrt(32.0));
      const SequenceRange all{0, 37};
      a.sequences = {&all, 1};
      auto state = g.Floats(tag + ".state0");
      float* states[] = {state.data()};
      a.states = states;
      a.o = Out(tag + ".o", 64);
      if (chunk > 0) {
        a.chunk = chunk;
        if (tag == "kda_bounded") a.lower_bound = -5.f;
        ops->KdaChunk(a);
      } else {
        ops->KdaRecurrent(a);
      }
      // An f32 chunk rounds exponents of up to 80, hence the wider tolerance.
      const double tolerance = chunk > 0 ? 2e-5 : 2e-6;
      Expect(a.o, tag + ".o", tolerance);
      EXPECT_LT(RelativeL2(state, g.Floats(tag + ".state1")), tolerance) << tag << " " << chunk;
    }
  }
}

TEST_P(OpsGolden, AttnRes) {
  const auto rows = g.Floats("attn_res.rows");  // [6, 4, 48]
  std::vector<std::vector<float>> by_row(4, std::vector<float>(6 * 48));
  for (std::size_t i = 0; i < rows.size(); ++i) by_row[i / 48 % 4][i / 192 * 48 + i % 48] = rows[i];
  auto w = g.Floats("attn_res.norm_w");
  const auto proj = g.Floats("attn_res.proj_w");
  for (std::size_t i = 0; i < w.size(); ++i) w[i] *= proj[i];
  const float* pointers[] = {by_row[0].data(), by_row[1].data(), by_row[2].data(),
                             by_row[3].data()};
  const Mat pi = Out("attn_res.pi");
  const Mat aliased(by_row[3].data(), {6, 48});  // the output site writes over its own input
  ops->AttnRes({pointers, CVec(w.data(), {48}), 1e-5f, {}, aliased, pi});
  Expect(aliased, "attn_res.mix");
  Expect(pi, "attn_res.pi");
}

TEST_P(OpsGolden, Situ) {
  for (const bool capped : {true, false}) {
    const std::string name = capped ? "situ.y" : "situ.y_no_linear_beta";
    const Mat y = Out(name);
    GatedActivation act{true, 4.f, std::nullopt};
    if (capped) act.b2 = 25.f;
    ops->GatedAct({In("situ.gate"), In("situ.up"), act, y});
    Expect(y, name);
  }
}

TEST_P(OpsGolden, Route) {
  for (const std::string tag : {"plain", "grouped", "scaled"}) {
    std::vector<std::int32_t> experts(9 * 5);
    RouteArgs a;
    a.logits = In("route.logits");
    a.bias = InVec("route.bias");
    a.k = 5;
    if (tag == "grouped") a.n_group = 4, a.topk_group = 2;
    if (tag == "scaled") a.scale = 2.446f;
    a.experts = View<std::int32_t, 2>(experts.data(), {9, 5});
    a.weights = Out("route." + tag + ".weights");
    ops->Route(a);
    EXPECT_EQ(experts, g.Ints("route." + tag + ".idx")) << tag;
    Expect(a.weights, "route." + tag + ".weights");
  }
}

TEST_P(OpsGolden, Mxfp4GemmDecodesExactly) {
  // A product with unit vectors reads the matrix back, which decoding must not round.
  for (const std::string tag : {"all_bytes", "packed"}) {
    const std::string scales = tag == "packed" ? "mxfp4.scale" : "mxfp4.all_scale";
    const std::string values = tag == "packed" ? "mxfp4.unpacked" : "mxfp4.all_values";
    const TensorRef &codes = g.Ref("mxfp4." + tag), &scale = g.Ref(scales);
    const std::int64_t rows = codes.shape[0], cols = 2 * codes.shape[1];
    const WeightRef w{WeightFormat::kMxfp4, rows, cols, codes.data,
                      reinterpret_cast<const std::uint8_t*>(scale.data)};
    std::vector<float> unit(static_cast<std::size_t>(cols * cols)),
        out(static_cast<std::size_t>(cols * rows));
    for (std::int64_t i = 0; i < cols; ++i) unit[static_cast<std::size_t>(i * cols + i)] = 1.f;
    ops->Gemm({CMat(unit.data(), {cols, cols}), w, Mat(out.data(), {cols, rows})});
    const auto want = g.Floats(values);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        EXPECT_EQ(out[static_cast<std::size_t>(c * rows + r)],
                  want[static_cast<std::size_t>(r * cols + c)]);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, OpsGolden, ::testing::ValuesIn(testing::Backends(true)),
                         [](const auto& p) { return p.param.name; });

TEST(Mxfp4Golden, PackingEqualsTheReferenceBytes) {
  const Golden g("modules.safetensors");
  const auto w = g.Floats("mxfp4.w");
  for (const auto& [rule, suffix] :
       {std::pair(MxScaleRule::kNoSaturation, ""), std::pair(MxScaleRule::kOcp, "_ocp")}) {
    std::vector<std::uint8_t> codes(w.size() / 2), scales(w.size() / 32);
    PackMxfp4(w, rule, codes.data(), scales.data());
    const auto bytes = [&](const std::string& n) {
      const auto* p = reinterpret_cast<const std::uint8_t*>(g.Ref(n).data);
      return std::vector<std::uint8_t>(p, p + g.Ref(n).elements());
    };
    EXPECT_EQ(codes, bytes(std::string("mxfp4.packed") + suffix));
    EXPECT_EQ(scales, bytes(std::string("mxfp4.scale") + suffix));
  }
}

}  // namespace
}  // namespace k3
