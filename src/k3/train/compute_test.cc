// Rounded arithmetic in training: bf16 products, MXFP4 experts, and what is exported.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "k3/base/rng.h"
#include "k3/model/model.h"
#include "k3/train/bf16_ops.h"
#include "k3/train/gradient_pass.h"
#include "k3/train/optimizer.h"
#include "support/golden.h"
#include "support/temp_dir.h"
#include "support/train_golden.h"
#include "support/train_run.h"

namespace k3 {
namespace {

using testing::ByName;
using testing::Golden;
using testing::GoldenDir;
using testing::PackableConfig;
using testing::RelativeL2;
using testing::TempDir;

std::unique_ptr<Parameters> LoadVariant(const std::string& name, const ComputeOptions& compute) {
  auto p = Parameters::Load(GoldenDir() + "/variants/" + name, compute);
  EXPECT_TRUE(p.ok()) << p.message();
  return std::move(*p);
}

std::unique_ptr<Parameters> Packable(const ComputeOptions& compute, double std = 0.02) {
  const auto config = ParseModelConfig(PackableConfig(), "test");
  EXPECT_TRUE(config.ok());
  auto p = Parameters::Create(*config, compute);
  EXPECT_TRUE(p.ok()) << p.message();
  (*p)->Initialise({1, std});
  return std::move(*p);
}

using Routes = std::vector<std::int32_t>;

/// Loss and gradients of the golden's row, and which experts its tokens took.
double Gradients(Parameters& p, const std::string& name, Routes& routes, bool round_back = true) {
  const auto tokens = Golden("variants/" + name + ".safetensors").Ints("tokens");
  const std::span<const TokenId> all(tokens);
  const TrainRow row{all.first(all.size() - 1), all.subspan(1)};
  const double n = static_cast<double>(row.inputs.size());
  GradientPass pass(p, 2);
  pass.tape().RoundBf16(p.compute().bf16 && round_back);
  pass.tape().on_route = [&](const RouteArgs& a) {
    for (std::int64_t t = 0; t < a.experts.dim(0); ++t) {
      routes.insert(routes.end(), a.experts.row(t), a.experts.row(t) + a.experts.dim(1));
      std::sort(routes.end() - a.experts.dim(1), routes.end());
    }
  };
  p.ZeroGrads();
  const auto sum = pass.Run({&row, 1}, 1.0 / n);
  EXPECT_TRUE(sum.ok());
  return sum->nats / n;
}

class Bf16Variants : public ::testing::TestWithParam<const char*> {};

/// Relative difference of all gradients together.
double Difference(const Parameters& a, const Parameters& b) {
  double all = 0, difference = 0;
  const auto theirs = ByName(b);
  for (const auto& [key, p] : ByName(a)) {
    for (std::int64_t i = 0; i < p->size(); ++i) {
      const double want = theirs.at(key)->grad[i], off = p->grad[i] - want;
      all += want * want, difference += off * off;
    }
  }
  return std::sqrt(difference / all);
}

/// How far the gradients of f32 move when every matrix is off by up to a rounding of bf16: what the
/// model, with weights far larger than trained ones, makes of differences of that size.
double Sensitivity(const std::string& name, const Parameters& exact) {
  double most = 0;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    const auto moved = LoadVariant(name, {});
    Rng rng(seed);
    for (Parameter& q : moved->list()) {
      for (std::int64_t i = 0; IsRoundedInBf16(q.spec) && i < q.size(); ++i) {
        q.value[i] *= 1.f + static_cast<float>((rng.Uniform() - 0.5) * 0x1p-7);
      }
    }
    moved->Refresh();
    Routes ignored;
    Gradients(*moved, name, ignored);
    most = std::max(most, Difference(*moved, exact));
  }
  return most;
}

/// Tolerances are of all gradients together. A token that takes another expert than in f32 has
/// another gradient, whatever the arithmetic.
TEST_P(Bf16Variants, GradientsStayCloseToTheGolden) {
  const std::string name = GetParam();
  const auto exact = LoadVariant(name, {}), rounded = LoadVariant(name, {true, false});
  const auto forward_only = LoadVariant(name, {true, false});
  Routes wanted, routes, again;
  const double loss = Gradients(*exact, name, wanted);
  EXPECT_NEAR(Gradients(*rounded, name, routes), loss, 5e-2);
  Gradients(*forward_only, name, again, false);
  const double sensitivity = Sensitivity(name, *exact);
  // Past 0.5 even an ill-conditioned model would say that something else is wrong.
  const double most = routes == wanted ? std::min(0.02 + sensitivity, 0.5) : 0.5;
  EXPECT_LT(Difference(*rounded, *exact), most);
  EXPECT_GT(Difference(*rounded, *exact), 5e-4) << "nothing was rounded";
  EXPECT_LT(Difference(*rounded, *forward_only), 0.02) << "the way back alone";
  EXPECT_GT(Difference(*rounded, *forward_only), 5e-4) << "the way back is rounded too";
}

INSTANTIATE_TEST_SUITE_P(All, Bf16Variants, ::testing::ValuesIn(testing::kVariants),
                         [](const auto& p) { return std::string(p.param); });

TEST(Bf16Ops, RoundsWhatEntersProductsAndNothingElse) {
  Rng rng(3);
  auto random = [&](std::size_t n) {
    std::vector<float> v(n);
    for (float& x : v) x = static_cast<float>(4 * rng.Uniform() - 2);
    return v;
  };
  constexpr std::int64_t T = 5, D = 32, I = 64;
  const auto x = random(T * D), w = random(I * D);
  auto rounded = x;
  for (float& v : rounded) v = RoundToBF16(v);
  Exec plain(1), bf16(1);
  bf16.ops = MakeBf16Ops(std::move(bf16.ops));
  std::vector<float> a(T * I), b(a.size());
  auto gemm = [&](Exec& exec, const std::vector<float>& from, std::vector<float>& to, bool keep) {
    exec.ops->Gemm({CMat(from.data(), {T, D}),
                    {WeightFormat::kF32, I, D, w.data()},
                    Mat(to.data(), {T, I}),
                    keep});
  };
  gemm(bf16, x, a, false), gemm(plain, rounded, b, false);
  EXPECT_EQ(a, b);
  gemm(bf16, x, a, true), gemm(plain, x, b, true);
  EXPECT_EQ(a, b) << "the router keeps f32";
}

TEST(Bf16Ops, ExpertsEqualTheirEquation) {
  Rng rng(4);
  auto random = [&](std::int64_t n) {
    std::vector<float> v(static_cast<std::size_t>(n));
    for (float& x : v) x = RoundToBF16(static_cast<float>(2 * rng.Uniform() - 1));
    return v;
  };
  constexpr std::int64_t T = 6, D = 8, I = 16, E = 3;
  const auto x = random(T * D), w1 = random(E * I * D), w3 = random(E * I * D);
  const auto w2 = random(E * D * I);
  std::vector<ExpertWeights> table;
  for (std::int64_t e = 0; e < E; ++e) {
    auto matrix = [&](const std::vector<float>& w, std::int64_t rows, std::int64_t cols) {
      return WeightRef{WeightFormat::kF32, rows, cols, w.data() + e * rows * cols};
    };
    table.push_back({matrix(w1, I, D), matrix(w3, I, D), matrix(w2, D, I)});
  }
  const std::vector<std::int32_t> experts{0, 1, 1, 0, 2, 1, 2, 0, 1, 2, 0, 2};
  const auto weights = random(T * 2);
  ExpertMlpArgs a;
  a.x = CMat(x.data(), {T, D});
  a.experts = View<const std::int32_t, 2>(experts.data(), {T, 2});
  a.weights = CMat(weights.data(), {T, 2});
  a.table = table;
  std::vector<float> exact(T * D), rounded(T * D, 9.f);
  Exec plain(1), bf16(1);
  bf16.ops = MakeBf16Ops(std::move(bf16.ops));
  a.y = Mat(exact.data(), {T, D});
  plain.ops->ExpertMlp(a);
  a.y = Mat(rounded.data(), {T, D});
  bf16.ops->ExpertMlp(a);
  const double off = RelativeL2(rounded.data(), exact.data(), exact.size());
  EXPECT_LT(off, 4e-3);  // one rounding, of the activation
  EXPECT_GT(off, 1e-5);
}

TEST(Rounding, TheModelReadsRoundedCopiesAndMastersStay) {
  const auto p = Packable({true, true});
  p->RoundExperts(true);
  std::int64_t copied = 0, packed = 0;
  for (const Parameter& q : p->list()) {
    if (q.used == q.value) {
      EXPECT_TRUE(!IsRoundedInBf16(q.spec)) << q.spec.name;
      continue;
    }
    copied += q.size();
    packed += PacksAsMxfp4(q.spec);
    std::int64_t changed = 0;
    for (std::int64_t i = 0; i < q.size(); ++i) {
      EXPECT_EQ(q.used[i], RoundToBF16(q.used[i])) << q.spec.name;
      changed += q.used[i] != q.value[i];
    }
    EXPECT_GT(changed, 0) << q.spec.name;
  }
  EXPECT_EQ(copied, Parameters::CopiedFloats(p->config(), p->compute()));
  EXPECT_GT(packed, 0);
  for (const char* island : {"gate.weight", "layernorm.weight", "A_log", "_res_proj.weight"}) {
    for (const Parameter& q : p->list()) {
      EXPECT_TRUE(!q.spec.name.ends_with(island) || q.used == q.value) << q.spec.name;
    }
  }
}

double LossOf(const Model& model, const std::vector<TokenId>& tokens) {
  Exec exec(1);
  ModelState state = model.NewState();
  const SequenceInput row{std::span(tokens).first(tokens.size() - 1), &state, LogitRows::kAll};
  std::vector<float> logits;
  EXPECT_TRUE(model.Forward({&row, 1}, exec, logits).ok());
  const std::size_t vocab = logits.size() / row.tokens.size();
  double nats = 0;
  for (std::size_t t = 0; t + 1 < tokens.size(); ++t) {
    const float* z = logits.data() + t * vocab;
    double sum = 0;
    for (std::size_t v = 0; v < vocab; ++v) sum += std::exp(z[v]);
    nats += std::log(sum) - z[tokens[t + 1]];
  }
  return nats / static_cast<double>(tokens.size() - 1);
}

/// A model that learned a row well, trained with or without rounded experts; returns the losses
/// before and after export.
std::pair<double, double> TrainAndExport(bool rounding, const std::string& dir) {
  const auto tokens = Golden("variants/released.safetensors").Ints("tokens");
  const auto p = Packable({false, true}, 0.1);
  const std::span<const TokenId> all(tokens);
  const TrainRow row{all.first(all.size() - 1), all.subspan(1)};
  const double n = static_cast<double>(row.inputs.size());
  GradientPass pass(*p, 2);
  Optimizer optimizer(*p, {}, {});
  p->RoundExperts(rounding);
  for (int step = 0; step < 60; ++step) {
    p->ZeroGrads();
    EXPECT_TRUE(pass.Run({&row, 1}, 1 / n).ok());
    optimizer.Step(pass.tape().context(), 3e-3, 0);
  }
  // What is left beside the experts is exported as bf16; taking it there first leaves them alone.
  for (Parameter& q : p->list()) {
    if (PacksAsMxfp4(q.spec) || q.spec.f32) continue;
    for (std::int64_t i = 0; i < q.size(); ++i) q.value[i] = RoundToBF16(q.value[i]);
  }
  p->Refresh();
  const double before = LossOf(p->model(), tokens);
  EXPECT_TRUE(p->Export(dir, {PackableConfig(), "", true}).ok());
  auto exported = Model::Load(dir);
  EXPECT_TRUE(exported.ok());
  return {before, LossOf(**exported, tokens)};
}

TEST(Mxfp4Training, TheLossAfterExportIsTheLossBefore) {
  TempDir dir;
  const auto [with, with_packed] = TrainAndExport(true, dir / "with");
  const auto [without, without_packed] = TrainAndExport(false, dir / "without");
  EXPECT_EQ(with, with_packed) << "the same forward pass, bit for bit";
  RecordProperty("gap_without", std::to_string(without_packed - without));
  EXPECT_GT(std::abs(without_packed - without), 1e-4) << "what training without rounding leaves";
  EXPECT_LT(with, 1.0) << "masters learn through the rounding";
}

TEST(Mxfp4Training, RoundingCanBeSwitched) {
  const auto p = Packable({false, true});
  const Parameter* w = nullptr;
  for (const Parameter& q : p->list()) w = PacksAsMxfp4(q.spec) ? &q : w;
  ASSERT_NE(w, nullptr);
  const std::vector<float> plain(w->used, w->used + w->size());
  EXPECT_TRUE(std::equal(plain.begin(), plain.end(), w->value));
  p->RoundExperts(true);
  EXPECT_FALSE(std::equal(plain.begin(), plain.end(), w->used));
  p->RoundExperts(false);
  EXPECT_TRUE(std::equal(plain.begin(), plain.end(), w->used));
}

}  // namespace
}  // namespace k3
