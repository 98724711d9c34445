// Typical mistakes, injected: each must push the result out of the tolerance of the golden tests.
// What each one costs in the reference: tests/reference/mutations.py.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "k3/base/array.h"
#include "k3/io/json.h"
#include "k3/io/mapped_file.h"
#include "k3/model/model.h"
#include "k3/quant/mxfp4.h"
#include "support/golden.h"

namespace k3 {
namespace {

using testing::Golden;
using testing::GoldenDir;
using testing::RelativeL2;

using testing::kLogitTolerance;
constexpr double kOpTolerance = 1e-6;  // of ops_golden_test.cc

double LogitError(const std::string& dir, std::unique_ptr<Backend> ops) {
  const Golden golden("model_k3.safetensors");
  auto model = Model::Load(dir);
  EXPECT_TRUE(model.ok()) << (model.ok() ? "" : model.message());
  if (!model.ok()) return 0;
  Exec exec(1, MathMode::kExact, std::move(ops));
  ModelState state = (*model)->NewState();
  const auto tokens = golden.Ints("tokens");
  std::vector<float> logits;
  const SequenceInput input{tokens, &state, LogitRows::kAll};
  const Status s = (*model)->Forward({&input, 1}, exec, logits);
  EXPECT_TRUE(s.ok()) << s.message();
  return RelativeL2(logits, golden.Floats("logits"));
}

template <class Mutant>
double ErrorOf() {
  return LogitError(GoldenDir() + "/tiny-k3", std::make_unique<Mutant>());
}

TEST(MustFail, TheUnchangedReferencePasses) {
  EXPECT_LT(ErrorOf<ReferenceBackend>(), kLogitTolerance);
}

// ---- mistakes in an op

/// The decay as a clamp of the softplus form.
struct ClampedDecay : ReferenceBackend {
  void KdaGate(const KdaGateArgs& a) override {
    KdaGateArgs softplus = a;
    softplus.lower_bound.reset();
    ReferenceBackend::KdaGate(softplus);
    for (std::int64_t t = 0; t < a.g.dim(0); ++t) {
      for (std::int64_t c = 0; c < a.g.dim(1); ++c) a.g(t, c) = std::max(a.g(t, c), *a.lower_bound);
    }
  }
};

/// A_log read from the padding, where it is zero.
struct PaddedALog : ReferenceBackend {
  void KdaGate(const KdaGateArgs& a) override {
    const std::vector<float> zeros(static_cast<std::size_t>(a.a_log.dim(0)));
    KdaGateArgs wrong = a;
    wrong.a_log = CVec(zeros.data(), a.a_log.shape);
    ReferenceBackend::KdaGate(wrong);
  }
};

struct NoDtBias : ReferenceBackend {
  void KdaGate(const KdaGateArgs& a) override {
    const std::vector<float> zeros(static_cast<std::size_t>(a.dt_bias.dim(0)));
    KdaGateArgs wrong = a;
    wrong.dt_bias = CVec(zeros.data(), a.dt_bias.shape);
    ReferenceBackend::KdaGate(wrong);
  }
};

/// The state is handed on as [value, key]; both are 32, so no shape complains.
struct TransposedState : ReferenceBackend {
  void KdaRecurrent(const KdaArgs& a) override {
    for (std::int64_t t = 0; t < a.q.dim(0); ++t) {
      const SequenceRange one{t, 1};
      KdaArgs step = a;
      step.sequences = {&one, 1};
      ReferenceBackend::KdaRecurrent(step);
      if (t == a.q.dim(0) / 2) Transpose(a.states[0], a.n_heads, a.key_dim());
    }
  }
  static void Transpose(float* s, std::int64_t heads, std::int64_t n) {
    for (std::int64_t h = 0; h < heads; ++h, s += n * n) {
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t j = 0; j < i; ++j) std::swap(s[i * n + j], s[j * n + i]);
      }
    }
  }
};

/// u = v - S^T k with the state before its decay.
struct UndecayedDelta : ReferenceBackend {
  void KdaRecurrent(const KdaArgs& a) override {
    const std::int64_t K = a.key_dim(), V = a.value_dim();
    for (std::int64_t t = 0; t < a.q.dim(0); ++t) {
      for (std::int64_t h = 0; h < a.n_heads; ++h) {
        float* S = a.states[0] + h * K * V;
        for (std::int64_t v = 0; v < V; ++v) {
          double u = a.v(t, h * V + v), o = 0;
          for (std::int64_t d = 0; d < K; ++d)
            u -= static_cast<double>(S[d * V + v]) * a.k(t, h * K + d);
          for (std::int64_t d = 0; d < K; ++d) {
            const double s = S[d * V + v] * std::exp(static_cast<double>(a.g(t, h * K + d))) +
                             a.k(t, h * K + d) * a.beta(t, h) * u;
            S[d * V + v] = static_cast<float>(s);
            o += s * a.q(t, h * K + d) * a.scale;
          }
          a.o(t, h * V + v) = static_cast<float>(o);
        }
      }
    }
  }
};

struct ReversedTaps : ReferenceBackend {
  void ShortConv(const ShortConvArgs& a) override {
    const std::int64_t P = a.w.dim(0), k = a.w.dim(1);
    Array<float> reversed(P * k);
    for (std::int64_t i = 0; i < P * k; ++i) reversed[i] = a.w(i / k, k - 1 - i % k);
    ShortConvArgs wrong = a;
    wrong.w = CMat(reversed.data(), {P, k});
    ReferenceBackend::ShortConv(wrong);
  }
};

/// K^-1/2 left out of the recurrence and into the output norm, where the eps makes it visible.
struct FoldedScale : ReferenceBackend {
  void KdaRecurrent(const KdaArgs& a) override {
    KdaArgs wrong = a;
    wrong.scale = 1.f;
    ReferenceBackend::KdaRecurrent(wrong);
  }
};

/// Weights taken from the biased scores that selected the experts.
struct BiasedWeights : ReferenceBackend {
  void Route(const RouteArgs& a) override {
    ReferenceBackend::Route(a);
    for (std::int64_t t = 0; t < a.weights.dim(0); ++t) {
      double sum = 0;
      auto biased = [&](std::int64_t j) {
        const std::int64_t e = a.experts(t, j);
        return 1 / (1 + std::exp(-static_cast<double>(a.logits(t, e)))) + a.bias(e);
      };
      for (std::int64_t j = 0; j < a.k; ++j) sum += biased(j);
      for (std::int64_t j = 0; j < a.k; ++j) a.weights(t, j) = static_cast<float>(biased(j) / sum);
    }
  }
};

struct IgnoredBias : ReferenceBackend {
  void Route(const RouteArgs& a) override {
    const std::vector<float> zeros(static_cast<std::size_t>(a.bias.dim(0)));
    RouteArgs wrong = a;
    wrong.bias = CVec(zeros.data(), a.bias.shape);
    ReferenceBackend::Route(wrong);
  }
};

/// High nibble first.
struct SwappedNibbles : ReferenceBackend {
  void ExpertMlp(const ExpertMlpArgs& a) override {
    std::deque<std::vector<std::uint8_t>> swapped;
    auto swap = [&](WeightRef w) {
      const auto* p = static_cast<const std::uint8_t*>(w.data);
      swapped.emplace_back(p, p + w.rows * w.cols / 2);
      for (auto& b : swapped.back()) b = static_cast<std::uint8_t>((b << 4) | (b >> 4));
      w.data = swapped.back().data();
      return w;
    };
    std::vector<ExpertWeights> table;
    for (const ExpertWeights& e : a.table) table.push_back({swap(e.w1), swap(e.w3), swap(e.w2)});
    ExpertMlpArgs wrong = a;
    wrong.table = table;
    ReferenceBackend::ExpertMlp(wrong);
  }
};

/// The mixed row h is banked instead of the raw stream p.
struct BankedMix : ReferenceBackend {
  void AttnRes(const AttnResArgs& a) override {
    std::vector<const float*> rows(a.rows.begin(), a.rows.end());
    const std::size_t banked = rows.size() - 1;
    if (banked > copies.size()) copies.push_back(last_mix);  // a row was banked since the last call
    for (std::size_t e = 0; e < banked; ++e) {
      if (!copies[e].empty()) rows[e] = copies[e].data();
    }
    AttnResArgs wrong = a;
    wrong.rows = rows;
    ReferenceBackend::AttnRes(wrong);
    last_mix.assign(a.y.data, a.y.data + a.y.size());
  }
  std::vector<std::vector<float>> copies;
  std::vector<float> last_mix;
};

/// The mix sums the normalised rows that were scored.
struct NormalisedRows : ReferenceBackend {
  void AttnRes(const AttnResArgs& a) override {
    const std::int64_t T = a.y.dim(0), H = a.y.dim(1);
    const std::vector<float> ones(static_cast<std::size_t>(H), 1.f);
    std::deque<std::vector<float>> normed;
    std::vector<const float*> rows;
    for (const float* row : a.rows) {
      normed.emplace_back(static_cast<std::size_t>(T * H));
      RmsNorm(
          {CMat(row, {T, H}), CVec(ones.data(), {H}), a.eps, Mat(normed.back().data(), {T, H})});
      rows.push_back(normed.back().data());
    }
    AttnResArgs wrong = a;
    wrong.rows = rows;
    ReferenceBackend::AttnRes(wrong);
  }
};

struct UncappedUpBranch : ReferenceBackend {
  void ExpertMlp(const ExpertMlpArgs& a) override {
    ExpertMlpArgs wrong = a;
    wrong.act.b2.reset();
    ReferenceBackend::ExpertMlp(wrong);
  }
};

struct SwiGluForSitu : ReferenceBackend {
  void GatedAct(const GatedActArgs& a) override {
    GatedActArgs wrong = a;
    wrong.act.situ = false;
    ReferenceBackend::GatedAct(wrong);
  }
};

struct SkippedMlaGate : ReferenceBackend {
  void SigmoidGate(const SigmoidGateArgs& a) override {
    for (std::int64_t t = 0; t < a.y.dim(0); ++t) std::copy_n(a.x.row(t), a.x.dim(1), a.y.row(t));
  }
};

/// The absorbed form scaled by the width of the cached row instead of the query's.
struct RowScaledMla : ReferenceBackend {
  void Mla(const MlaArgs& a) override {
    MlaArgs wrong = a;
    wrong.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(a.row_dim())));
    ReferenceBackend::Mla(wrong);
  }
};

TEST(MustFail, MistakesInOps) {
  const std::pair<const char*, double> mistakes[] = {
      {"clamped decay", ErrorOf<ClampedDecay>()},
      {"A_log from the padding", ErrorOf<PaddedALog>()},
      {"no dt_bias", ErrorOf<NoDtBias>()},
      {"transposed state", ErrorOf<TransposedState>()},
      {"undecayed delta", ErrorOf<UndecayedDelta>()},
      {"reversed taps", ErrorOf<ReversedTaps>()},
      {"scale folded into the norm", ErrorOf<FoldedScale>()},
      {"weights from biased scores", ErrorOf<BiasedWeights>()},
      {"selection bias ignored", ErrorOf<IgnoredBias>()},
      {"nibbles swapped", ErrorOf<SwappedNibbles>()},
      {"h banked instead of p", ErrorOf<BankedMix>()},
      {"normalised rows mixed", ErrorOf<NormalisedRows>()},
      {"up branch not capped", ErrorOf<UncappedUpBranch>()},
      {"SwiGLU for SiTU", ErrorOf<SwiGluForSitu>()},
      {"MLA gate skipped", ErrorOf<SkippedMlaGate>()},
      {"MLA scaled by the row", ErrorOf<RowScaledMla>()},
  };
  for (const auto& [name, error] : mistakes) {
    EXPECT_GT(error, 10 * kLogitTolerance) << name;
    std::printf("  %-28s %.2e\n", name, error);
  }
}

// ---- mistakes in what the config says

/// tiny-k3 with one key of text_config replaced; weights are linked.
class Altered {
 public:
  Altered(const std::string& key, const nlohmann::json& value) {
    char name[] = "/tmp/k3-must-fail-XXXXXX";
    dir_ = mkdtemp(name);
    const std::string from = GoldenDir() + "/tiny-k3/";
    for (const char* f : {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                          "model-00003-of-00003.safetensors", "model.safetensors.index.json"}) {
      EXPECT_EQ(symlink((from + f).c_str(), (dir_ + "/" + f).c_str()), 0);
      files_.push_back(f);
    }
    auto config = ParseJson(*ReadTextFile(from + "config.json"), "config");
    (*config)["text_config"][key] = value;
    EXPECT_TRUE(WriteFileAtomically(dir_ + "/config.json", config->dump()).ok());
    files_.emplace_back("config.json");
  }
  ~Altered() {
    for (const auto& f : files_) unlink((dir_ + "/" + f).c_str());
    rmdir(dir_.c_str());
  }
  double Error() const { return LogitError(dir_, std::make_unique<ReferenceBackend>()); }

 private:
  std::string dir_;
  std::vector<std::string> files_;
};

TEST(MustFail, MistakesInTheConfig) {
  EXPECT_LT(Altered("rms_norm_eps", 1e-5).Error(), kLogitTolerance);  // the true value passes
  const std::pair<const char*, double> mistakes[] = {
      {"MLA norms with eps 1e-5", Altered("mla_norm_eps", 1e-5).Error()},
      {"RMS norms with eps 1e-6", Altered("rms_norm_eps", 1e-6).Error()},
      {"AttnRes blocks of 4", Altered("attn_res_block_size", 4).Error()},
      {"SiTU beta 1", Altered("activation_situ_beta", 1.0).Error()},
      {"softmax router", Altered("moe_router_activation_func", "softmax").Error()},
      {"experts in two groups", Altered("num_expert_group", 2).Error()},
  };
  for (const auto& [name, error] : mistakes) {
    EXPECT_GT(error, kLogitTolerance) << name;
    std::printf("  %-28s %.2e\n", name, error);
  }
}

// ---- mistakes that the logits of tiny-k3 cannot show; the op goldens can

TEST(MustFail, MistakesOnlyOpsShow) {
  const Golden g("modules.safetensors");
  ReferenceBackend ops;
  const auto x = g.Floats("l2_norm.x"), want = g.Floats("l2_norm.y");
  std::vector<float> y(x.size());
  const Mat out(y.data(), {5, 48});
  const std::size_t tiny_row = 3 * 48;  // its norm is near the square root of eps
  ops.L2Norm({CMat(x.data(), {5, 48}), 48, 48e-6f, out});
  EXPECT_GT(RelativeL2(&y[tiny_row], &want[tiny_row], 48), kOpTolerance) << "eps added to the mean";
  ops.L2Norm({CMat(x.data(), {5, 48}), 48, 1e-12f, out});
  EXPECT_GT(RelativeL2(&y[tiny_row], &want[tiny_row], 48), kOpTolerance) << "eps 1e-12";

  const auto logits = g.Floats("route.logits"), bias = g.Floats("route.bias");
  std::vector<std::int32_t> experts(45);
  std::vector<float> weights(45);
  RouteArgs a;
  a.logits = CMat(logits.data(), {9, 24}), a.bias = CVec(bias.data(), {24});
  a.k = 5, a.renormalize = false;
  a.experts = View<std::int32_t, 2>(experts.data(), {9, 5}),
  a.weights = Mat(weights.data(), {9, 5});
  ops.Route(a);
  EXPECT_GT(RelativeL2(weights, g.Floats("route.plain.weights")), kOpTolerance)
      << "not renormalised";
}

/// Notes what the layers hand to the ops.
struct Spy : ReferenceBackend {
  void RmsNorm(const RmsNormArgs& a) override {
    ++norms[a.eps];
    ReferenceBackend::RmsNorm(a);
  }
  void L2Norm(const L2NormArgs& a) override {
    l2_eps.insert(a.eps);
    ReferenceBackend::L2Norm(a);
  }
  void GatedRmsNorm(const GatedRmsNormArgs& a) override {
    gated_eps.insert(a.eps);
    ReferenceBackend::GatedRmsNorm(a);
  }
  void AttnRes(const AttnResArgs& a) override {
    mix_eps.insert(a.eps);
    ReferenceBackend::AttnRes(a);
  }
  void Route(const RouteArgs& a) override {
    renormalised &= a.renormalize;
    ReferenceBackend::Route(a);
  }
  std::map<float, std::int64_t> norms;
  std::set<float> l2_eps, gated_eps, mix_eps;
  bool renormalised = true;
};

TEST(MustFail, ConstantsTheLogitsHardlySee) {
  auto owned = std::make_unique<Spy>();
  const Spy& spy = *owned;
  auto model = Model::Load(GoldenDir() + "/tiny-k3");
  ASSERT_TRUE(model.ok()) << model.message();
  Exec exec(1, MathMode::kExact, std::move(owned));
  ModelState state = (*model)->NewState();
  const TokenId ids[] = {1, 2};
  std::vector<float> logits;
  const SequenceInput input{ids, &state, LogitRows::kLast};
  ASSERT_TRUE((*model)->Forward({&input, 1}, exec, logits).ok());
  EXPECT_EQ(spy.l2_eps, std::set<float>{1e-6f});  // on the sum, whatever the head's width
  EXPECT_EQ(spy.gated_eps, std::set<float>{1e-5f});
  EXPECT_EQ(spy.mix_eps, std::set<float>{1e-5f});
  EXPECT_TRUE(spy.renormalised);
  const ModelConfig& c = (*model)->config();
  const auto n_mla = std::count(c.attention.begin(), c.attention.end(), AttentionKind::kMla);
  std::int64_t n_moe = 0;
  for (std::int64_t i = 0; i < c.n_layers; ++i) n_moe += c.is_moe(i);
  // The queries' and the rows' latent norms; two norms a layer, the experts' latent norms, the
  // last.
  const std::map<float, std::int64_t> norms{{1e-6f, 2 * n_mla},
                                            {1e-5f, 2 * c.n_layers + n_moe + 1}};
  EXPECT_EQ(spy.norms, norms);
}

}  // namespace
}  // namespace k3
