#include "k3/serve/telemetry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "k3/serve/engine_metrics.h"

namespace k3::serve {
namespace {

TensorRef Ref(const std::vector<std::int32_t>& v, std::int64_t columns) {
  return {DType::kI32,
          {static_cast<std::int64_t>(v.size()) / columns, columns},
          reinterpret_cast<const std::byte*>(v.data())};
}
TensorRef Ref(const std::vector<float>& v, std::int64_t columns) {
  return {DType::kF32,
          {static_cast<std::int64_t>(v.size()) / columns, columns},
          reinterpret_cast<const std::byte*>(v.data())};
}

TEST(Telemetry, LoadsOfExperts) {
  Telemetry t(4);
  const std::vector<std::int32_t> chosen{0, 1, 0, 2, 0, 1};
  const std::vector<float> weights{0.5f, 0.5f, 1.f, 0.f, 0.5f, 0.5f};
  t.BeginPass();
  t.Record("layer.3.expert_idx", Ref(chosen, 2));
  t.Record("layer.3.expert_weights", Ref(weights, 2));
  const TelemetryView v = t.view();
  ASSERT_EQ(v.experts.size(), 1u);
  const ExpertLoad& e = v.experts[0];
  EXPECT_EQ(e.layer, 3);
  EXPECT_THAT(e.load, ::testing::ElementsAre(3, 2, 1, 0));
  EXPECT_EQ(e.dead(), 1);
  EXPECT_EQ(e.active_last_step, 3);
  EXPECT_DOUBLE_EQ(e.max_violation(), 1.0);  // 3 of 6 where 1.5 would be even
  EXPECT_NEAR(e.entropy_bits(), 1.459147917, 1e-9);
  EXPECT_NEAR(e.weight_entropy_bits, 2.0 / 3, 1e-9);
}

TEST(Telemetry, OldTokensLeaveTheWindow) {
  Telemetry t(2);
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(Telemetry::kWindow), 0);
  const std::vector<std::int32_t> ones(zeros.size(), 1);
  t.Record("layer.0.expert_idx", Ref(zeros, 1));
  EXPECT_EQ(t.view().experts[0].dead(), 1);
  for (int i = 0; i < 3; ++i) t.Record("layer.0.expert_idx", Ref(ones, 1));
  EXPECT_EQ(t.view().experts[0].load[0], 0);
}

TEST(Telemetry, HalfLivesOfDecays) {
  DriftOptions o;
  o.reference = 1;
  DriftMonitor drift(o);
  Telemetry t(0, &drift);
  // ln 2 / 3, 8 and for ever; a value that is not a number counts nowhere.
  const float fast = -3, slow = -0.0866434f, none = 0, nan = std::nanf("");
  t.BeginPass();
  t.Record("layer.2.log_decay", Ref(std::vector<float>{fast, slow, slow, none, slow, nan}, 3));
  const TelemetryView v = t.view();
  ASSERT_EQ(v.decay.size(), 1u);
  EXPECT_EQ(v.decay[0].layer, 2);
  EXPECT_EQ(v.decay[0].tokens, 2);
  EXPECT_NEAR(v.decay[0].quantile(0.1), std::log(2.0) / 3, 0.05);
  EXPECT_NEAR(v.decay[0].quantile(0.5), 8, 2);
  EXPECT_GT(v.decay[0].quantile(0.99), 1e4);
  EXPECT_EQ(DecaySpread{}.quantile(0.5), 0);
  EXPECT_EQ(TelemetryJson(v)["decay"][0]["half_life_tokens"].size(), 3u);
  t.BeginPass();  // the mean of the pass goes to the monitor
  ASSERT_EQ(drift.rows().size(), 1u);
  EXPECT_EQ(drift.rows()[0].signal, "decay_nats");
  EXPECT_EQ(drift.rows()[0].detector.state(), DriftDetector::State::kOk);
}

TEST(Telemetry, LooksAtFewTokensOfALongPass) {
  Telemetry t(0);
  t.Record("layer.0.log_decay", Ref(std::vector<float>(512, -1), 1));
  EXPECT_EQ(t.view().decay[0].tokens, Telemetry::kDecayTokens);
}

TEST(Telemetry, DepthWeights) {
  Telemetry t(0);
  t.Record("depth_weights.layers.1.mlp_res",
           Ref(std::vector<float>{0.25f, 0.75f, 0.75f, 0.25f}, 2));
  const TelemetryView v = t.view();
  ASSERT_EQ(v.depth.size(), 1u);
  EXPECT_EQ(v.depth[0].site, "layers.1.mlp_res");
  EXPECT_THAT(v.depth[0].mean, ::testing::ElementsAre(0.5, 0.5));
}

TEST(Telemetry, OddRecordsAreIgnored) {
  Telemetry t(2);
  const std::vector<std::int32_t> wild{-1, 2, 1, 1000000};
  t.Record("layer.0.expert_idx", Ref(wild, 2));
  EXPECT_THAT(t.view().experts[0].load, ::testing::ElementsAre(0, 1));
  t.Record("layer.99999999999999999999.expert_idx", Ref(wild, 2));
  t.Record("layer.x.expert_idx", Ref(wild, 2));
  t.Record("layer.5.expert_weights", Ref(std::vector<float>{1.f}, 1));
  t.Record("logits", Ref(std::vector<float>{1.f}, 1));
  EXPECT_EQ(t.view().experts.size(), 1u);
}

TEST(Telemetry, DeepModelsHaveFewSeries) {
  Telemetry t(2);
  for (int i = 0; i < 93; ++i) {
    t.Record("layer." + std::to_string(i) + ".expert_idx", Ref(std::vector<std::int32_t>{1}, 1));
  }
  for (const auto& f : TelemetryFamilies(t.view())) {
    EXPECT_LE(f.metric.size(), 16u) << f.name;
    if (f.name == "k3_experts_dead") {
      EXPECT_EQ(f.metric[0].gauge.value, 1);
      EXPECT_EQ(f.metric[0].label[0].value, "0..5");
    }
  }
}

}  // namespace
}  // namespace k3::serve
