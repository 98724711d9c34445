// Starting values, export, and the first sanity checks of any training run.
#include "k3/train/params.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "k3/base/rng.h"
#include "k3/base/threads.h"
#include "k3/model/quantize.h"
#include "k3/train/gradient_pass.h"
#include "k3/train/optimizer.h"
#include "support/config_fixtures.h"
#include "support/golden.h"
#include "support/train_golden.h"

namespace k3 {
namespace {

using testing::GoldenDir;
using testing::Released;
using testing::TempDir;

std::unique_ptr<Parameters> FromScratch(const nlohmann::json& j, std::uint64_t seed = 1) {
  const auto config = testing::ParseConfig(j);
  EXPECT_TRUE(config.ok()) << (config.ok() ? "" : config.message());
  auto p = Parameters::Create(*config);
  EXPECT_TRUE(p.ok());
  (*p)->Initialise({seed, 0.02});
  return std::move(*p);
}

void ForEach(const Parameters& p, const std::string& suffix,
             const std::function<void(const Parameter&, float)>& check) {
  int found = 0;
  for (const Parameter& q : p.list()) {
    if (!q.spec.name.ends_with(suffix)) continue;
    ++found;
    for (std::int64_t i = 0; i < q.size(); ++i) check(q, q.value[i]);
  }
  EXPECT_GT(found, 0) << suffix;
}

// One test per trap: a wrong start trains, badly, without an error (docs/training.md).

TEST(Init, BoundedDecayRatesStartAtZero) {
  const auto p = FromScratch(Released({}));
  ForEach(*p, ".A_log", [](const Parameter& q, float v) { EXPECT_EQ(v, 0.f) << q.spec.name; });
}

TEST(Init, UnboundedDecayRatesSpreadOverOneToSixteen) {
  const auto p = FromScratch(Released({{"decay", {{"form", "softplus"}}}}));
  ForEach(*p, ".A_log", [](const Parameter& q, float v) {
    EXPECT_GE(v, 0.f) << q.spec.name;
    EXPECT_LE(v, std::log(16.f)) << q.spec.name;
  });
}

TEST(Init, DecayStepsRememberTensToHundredsOfTokens) {
  const auto p = FromScratch(Released({}));
  double least = 1, most = 0;
  ForEach(*p, ".dt_bias", [&](const Parameter& q, float v) {
    const double dt = std::log1p(std::exp(static_cast<double>(v)));
    EXPECT_GE(dt, 0.9e-3) << q.spec.name;
    EXPECT_LE(dt, 1.1e-1) << q.spec.name;
    least = std::min(least, dt), most = std::max(most, dt);
    // The bounded gate at f = 0: zeros would give g = -2.5, a memory of under one token.
    EXPECT_GT(-5 / (1 + std::exp(-static_cast<double>(v))), -0.5) << q.spec.name;
  });
  EXPECT_GT(most / least, 5) << "log-uniform, not one value";
}

TEST(Init, DepthQueriesStartAtZero) {
  const auto p = FromScratch(Released({}));
  ForEach(*p, "_res_proj.weight",
          [](const Parameter& q, float v) { EXPECT_EQ(v, 0.f) << q.spec.name; });
}

TEST(Init, RouterBiasStartsAtZeroAndTheOptimiserLeavesIt) {
  const auto p = FromScratch(Released({}));
  ForEach(*p, "e_score_correction_bias",
          [](const Parameter& q, float v) { EXPECT_EQ(v, 0.f) << q.spec.name; });
  std::fill(p->grads(), p->grads() + p->total(), 1.f);
  GradientPass pass(*p, 1);
  Optimizer(*p, {}, {}).Step(pass.tape().context(), 1e-2, 0);
  ForEach(*p, "e_score_correction_bias",
          [](const Parameter& q, float v) { EXPECT_EQ(v, 0.f) << q.spec.name; });
}

TEST(Init, NormsMatricesGatesAndScales) {
  const auto p = FromScratch(Released({}));
  ForEach(*p, "layernorm.weight", [](const Parameter&, float v) { EXPECT_EQ(v, 1.f); });
  const Parameter* w = p->Find("model.embed_tokens.weight");
  ASSERT_NE(w, nullptr);
  const double std = testing::L2(w->value, w->size()) / std::sqrt(static_cast<double>(w->size()));
  EXPECT_NEAR(std, 0.02, 1e-3);
  nlohmann::json scaled = Released({{"residual", {{"mode", "scaled"}, {"alpha_init", 0.3}}}},
                                   {{"attn_res_block_size", nullptr}});
  ForEach(*FromScratch(scaled), "_alpha", [](const Parameter&, float v) { EXPECT_EQ(v, 0.3f); });
  nlohmann::json gated =
      Released({{"residual", {{"mode", "gated"}}}}, {{"attn_res_block_size", nullptr}});
  ForEach(*FromScratch(gated), "_res_gate.weight",
          [](const Parameter&, float v) { EXPECT_EQ(v, 0.f); });
}

TEST(Init, DependsOnSeedAndNameAlone) {
  const auto a = FromScratch(Released({})), b = FromScratch(Released({})),
             c = FromScratch(Released({}), 2);
  const auto plain = FromScratch(
      Released({{"residual", {{"mode", "plain"}}}}, {{"attn_res_block_size", nullptr}}));
  const std::string name = "model.layers.2.self_attn.q_proj.weight";
  const std::vector<float> first(a->Find(name)->value, a->Find(name)->value + 8);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), b->Find(name)->value));
  EXPECT_FALSE(std::equal(first.begin(), first.end(), c->Find(name)->value));
  EXPECT_TRUE(std::equal(first.begin(), first.end(), plain->Find(name)->value))
      << "arms share the tensors they have in common";
}

std::vector<TokenId> RandomTokens(std::size_t n, std::int64_t vocab, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<TokenId> ids(n);
  for (TokenId& t : ids) t = static_cast<TokenId>(rng.Next() % static_cast<std::uint64_t>(vocab));
  return ids;
}

TEST(Training, LossStartsAtLogVocabularyAndOneBatchCanBeLearntByHeart) {
  const auto p = FromScratch(Released({}));
  GradientPass pass(*p, 2);
  const auto tokens = RandomTokens(2 * 33, p->config().vocab, 3);
  const std::span<const TokenId> all(tokens);
  std::vector<TrainRow> rows;
  for (std::size_t r = 0; r < 2; ++r) {
    rows.push_back({all.subspan(33 * r, 32), all.subspan(33 * r + 1, 32)});
  }
  MuonOptions muon;
  muon.enabled = true;
  Optimizer optimizer(*p, {0.9, 0.95, 1e-8, 0.0}, muon);
  double loss = 0;
  for (int step = 0; step < 200; ++step) {
    p->ZeroGrads();
    const auto sum = pass.Run(rows, 1.0 / 64);
    ASSERT_TRUE(sum.ok()) << sum.message();
    loss = sum->nats / 64;
    if (step == 0) {
      EXPECT_NEAR(loss, std::log(static_cast<double>(p->config().vocab)), 0.1);
    }
    optimizer.Step(pass.tape().context(), 1e-2, 2e-2);
  }
  EXPECT_LT(loss, 0.05);
}

TEST(Training, EvaluationChangesNothing) {
  const auto p = FromScratch(Released({}));
  GradientPass pass(*p, 2);
  int routed = 0;
  pass.tape().on_route = [&](const RouteArgs&) { ++routed; };
  const auto tokens = RandomTokens(33, p->config().vocab, 3);
  const TrainRow row{std::span(tokens).first(32), std::span(tokens).subspan(1)};
  p->ZeroGrads();
  const auto loss = pass.Evaluate({&row, 1});
  ASSERT_TRUE(loss.ok());
  EXPECT_EQ(routed, 0);
  EXPECT_EQ(GradientNorm(*p), 0.0);
  const auto trained = pass.Run({&row, 1}, 1.0);
  ASSERT_TRUE(trained.ok());
  EXPECT_GT(routed, 0);
  EXPECT_NEAR(trained->nats, loss->nats, 1e-4);
}

TEST(Training, TargetsAreChecked) {
  const auto p = FromScratch(Released({}));
  GradientPass pass(*p, 1);
  const std::vector<TokenId> inputs{1, 2}, outside{1, static_cast<TokenId>(p->config().vocab)},
      one{1}, left_out{-1, 2};
  const TrainRow bad{inputs, outside}, uneven{inputs, one}, partial{inputs, left_out};
  EXPECT_THAT(pass.Run({&bad, 1}, 1).message(), ::testing::HasSubstr("target 512"));
  EXPECT_FALSE(pass.Run({&uneven, 1}, 1).ok());
  const auto r = pass.Run({&partial, 1}, 1);
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->counted, 1);
}

std::string ConfigText(const std::string& name) {
  return testing::ReadBytes(GoldenDir() + "/" + name + "/config.json");
}

TEST(Export, ALoadedFolderIsWrittenBackAndRuns) {
  for (const std::string name : {"tiny-k3", "variants/scaled", "variants/gqa_rope"}) {
    TempDir dir;
    auto p = Parameters::Load(GoldenDir() + "/" + name);
    ASSERT_TRUE(p.ok()) << p.message();
    ExportOptions options;
    options.config_json = ConfigText(name);
    options.tokenizer_dir = GoldenDir() + "/" + name;
    const Status s = (*p)->Export(dir / "model", options);
    ASSERT_TRUE(s.ok()) << s.message();
    const Status again = (*p)->Export(dir / "model", options);  // replaces
    ASSERT_TRUE(again.ok()) << again.message();
    EXPECT_EQ(dir.count(), 1) << "nothing half-written stays";

    auto model = Model::Load(dir / "model");
    ASSERT_TRUE(model.ok()) << model.message();
    EXPECT_THAT((*model)->warnings(), ::testing::IsEmpty());
    auto original = Model::Load(GoldenDir() + "/" + name);
    ASSERT_TRUE(original.ok());
    Exec exec(1);
    const std::vector<TokenId> tokens{1, 5, 9, 200};
    std::vector<float> want, got;
    ModelState a = (*original)->NewState(), b = (*model)->NewState();
    const SequenceInput in_a{tokens, &a, LogitRows::kAll}, in_b{tokens, &b, LogitRows::kAll};
    ASSERT_TRUE((*original)->Forward({&in_a, 1}, exec, want).ok());
    ASSERT_TRUE((*model)->Forward({&in_b, 1}, exec, got).ok());
    // bf16 and packed experts come back bit for bit; only a checkpoint with f32 matrices may move.
    EXPECT_LT(testing::RelativeL2(got, want), 1e-6) << name;
  }
}

TEST(Parameters, LoadDecodesEveryFormat) {
  auto plain = Parameters::Load(GoldenDir() + "/tiny-linear");
  ASSERT_TRUE(plain.ok()) << plain.message();
  for (const WeightFormat f : {WeightFormat::kFp8, WeightFormat::kInt8, WeightFormat::kMxfp4}) {
    const TempDir dir;
    QuantizeOptions options;
    options.trunk = options.head = f;
    ThreadPool pool(1);
    const auto made =
        Quantize(GoldenDir() + "/tiny-linear", dir / "q", options, {&pool, nullptr, {}});
    ASSERT_TRUE(made.ok()) << made.message();
    auto p = Parameters::Load(dir / "q");
    ASSERT_TRUE(p.ok()) << p.message();
    for (const QuantizedMatrix& m : made->matrices) {
      const Parameter *a = (*plain)->Find(m.name), *b = (*p)->Find(m.name);
      ASSERT_TRUE(a != nullptr && b != nullptr) << m.name;
      RoundingError error;
      error.Add(a->value, b->value, a->size());
      EXPECT_NEAR(error.relative_l2(), m.error.relative_l2(), 1e-9) << m.name;
    }
  }
}

TEST(Export, AnUnwritableFolderIsAnError) {
  auto p = Parameters::Load(GoldenDir() + "/tiny-k3");
  ASSERT_TRUE(p.ok());
  const Status s = (*p)->Export("/proc/nowhere/model", {ConfigText("tiny-k3"), "", true});
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.message(), ::testing::HasSubstr("/proc/nowhere"));
}

TEST(Optimiser, NewtonSchulzOrthogonalisesBothOrientations) {
  const auto p = FromScratch(Released({}));
  GradientPass pass(*p, 1);
  for (const auto& [rows, cols] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{8, 24}, {24, 8}, {16, 16}, {2, 50}}) {
    Rng rng(5);
    std::vector<float> u(static_cast<std::size_t>(rows * cols));
    for (float& x : u) x = static_cast<float>(rng.Uniform() - 0.5);
    NewtonSchulz(pass.tape().context(), u.data(), rows, cols);
    // Five steps bring every singular value into about (0.7, 1.2), so the norm is near sqrt(r).
    const double r = static_cast<double>(std::min(rows, cols));
    const double norm = testing::L2(u.data(), rows * cols);
    EXPECT_GT(norm, 0.68 * std::sqrt(r)) << rows;
    EXPECT_LT(norm, 1.25 * std::sqrt(r)) << rows;
  }
  std::vector<float> zero(12);
  NewtonSchulz(pass.tape().context(), zero.data(), 3, 4);
  for (const float x : zero) EXPECT_EQ(x, 0.f);
}

TEST(Optimiser, MuonTakesMatricesOfLayersByHeadAndExpert) {
  const auto p = FromScratch(Released({}));
  MuonOptions muon;
  muon.enabled = true;
  const Optimizer o(*p, {}, muon);
  auto uses = [&](const std::string& name) { return o.uses_muon(*p->Find(name)); };
  EXPECT_TRUE(uses("model.layers.2.block_sparse_moe.experts.0.w1.weight"));
  EXPECT_TRUE(uses("model.layers.0.self_attn.o_proj.weight"));
  EXPECT_FALSE(uses("model.embed_tokens.weight"));
  EXPECT_FALSE(uses("model.layers.2.block_sparse_moe.gate.weight"));
  EXPECT_FALSE(uses("model.layers.0.self_attn.q_conv1d.weight"));
  EXPECT_FALSE(uses("model.layers.0.mlp_res_proj.weight"));
  EXPECT_FALSE(uses("model.norm.weight"));
  const Parameter& q = *p->Find("model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(o.block_rows(q), p->config().kda.head_dim);
}

TEST(Optimiser, Schedules) {
  Schedule s{ScheduleKind::kCosine, 10, 110, 0, 0.1};
  EXPECT_DOUBLE_EQ(s.At(0), 0.1);
  EXPECT_DOUBLE_EQ(s.At(9), 1.0);
  EXPECT_DOUBLE_EQ(s.At(10), 1.0);
  EXPECT_NEAR(s.At(60), 0.55, 1e-12);
  EXPECT_NEAR(s.At(110), 0.1, 1e-12);
  EXPECT_NEAR(s.At(1000), 0.1, 1e-12);
  s = {ScheduleKind::kWarmupStableDecay, 10, 110, 20, 0.0};
  EXPECT_DOUBLE_EQ(s.At(89), 1.0);
  EXPECT_NEAR(s.At(100), 0.5, 1e-12);
  EXPECT_NEAR(s.At(110), 0.0, 1e-12);
  EXPECT_FALSE((Schedule{ScheduleKind::kCosine, 10, 5, 0, 0.1}).Check().ok());
}

}  // namespace
}  // namespace k3
