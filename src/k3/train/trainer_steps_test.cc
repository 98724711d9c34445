// What one step of a run does with its settings: rates, accumulation, interruption, the teacher.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "k3/train/teacher.h"
#include "k3/train/trainer.h"
#include "support/golden.h"
#include "support/temp_dir.h"
#include "support/train_run.h"

namespace k3 {
namespace {

using testing::GoldenDir;
using testing::RunToEnd;
using testing::SmallRun;
using testing::TempDir;
using testing::Weights;
using testing::WriteTrainData;

TEST(TrainerSteps, WarmUpHoldsBackBothOptimisers) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "out");
  c.steps = 1, c.lr = 1, c.muon.lr = 1, c.balance.method = BalanceMethod::kNone;
  c.schedule = {ScheduleKind::kConstant, 1'000'000, 1'000'000, 0, 0};
  auto t = Trainer::Open(c);
  ASSERT_TRUE(t.ok()) << t.message();
  const std::vector<float> before = Weights(**t);
  ASSERT_TRUE(
      (*t)->Run({0, nullptr, [](const StepReport& r) { EXPECT_NEAR(r.lr, 1e-6, 1e-12); }}).ok());
  const std::vector<float> after = Weights(**t);
  double most = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(after[i]) - before[i]));
  }
  EXPECT_GT(most, 0);
  EXPECT_LT(most, 1e-4) << "rates of a millionth";
}

TEST(TrainerSteps, AccumulationHasTheGradientsOfOneBatch) {
  TempDir dir;
  WriteTrainData(dir / "data");
  auto first = [&](std::int64_t batch, std::int64_t accumulate, const std::string& out) {
    TrainConfig c = SmallRun(dir, out);
    c.steps = 1, c.batch = batch, c.accumulate = accumulate;
    auto t = Trainer::Open(c);
    EXPECT_TRUE(t.ok()) << (t.ok() ? "" : t.message());
    StepReport seen;
    EXPECT_TRUE((*t)->Run({0, nullptr, [&](const StepReport& r) { seen = r; }}).ok());
    return seen;
  };
  const StepReport one = first(4, 1, "one"), four = first(1, 4, "four");
  EXPECT_NEAR(four.loss, one.loss, 1e-5);
  EXPECT_NEAR(four.grad_norm, one.grad_norm, 1e-4 * one.grad_norm);
  EXPECT_EQ(four.tokens, one.tokens);
}

TEST(TrainerSteps, AStepThatIsStoppedHalfWayLeavesNoTrace) {
  TempDir dir;
  WriteTrainData(dir / "data");
  auto config = [&](const std::string& out) {
    TrainConfig c = SmallRun(dir, out);
    c.steps = 3, c.schedule.total = 3, c.accumulate = 48;
    c.balance.method = BalanceMethod::kSlidingQuantile, c.balance.within_batch = true;
    return c;
  };
  const std::vector<float> want = RunToEnd(config("whole"));
  const TrainConfig c = config("parts");
  std::atomic<bool> stop{false}, begun{false};
  double step_s = 0;
  {
    auto t = Trainer::Open(c);
    ASSERT_TRUE(t.ok()) << t.message();
    // Somewhere inside the third step; wherever it falls, the end must be the same.
    std::thread stopper([&] {
      while (!begun) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::this_thread::sleep_for(std::chrono::duration<double>(0.3 * step_s));
      stop = true;
    });
    const auto done = (*t)->Run({0, &stop, [&](const StepReport& r) {
                                   step_s = 96 * 16 / r.tokens_per_s;
                                   begun = r.step >= 2;
                                 }});
    begun = true;
    stopper.join();
    ASSERT_TRUE(done.ok()) << done.message();
  }
  EXPECT_EQ(RunToEnd(c), want);
}

TEST(TrainerSteps, TheBalancersScheduleFollowsTheRun) {
  TempDir dir;
  WriteTrainData(dir / "data");
  TrainConfig c = SmallRun(dir, "flat");
  c.balance.method = BalanceMethod::kSlidingQuantile, c.balance.decay = 0.1;
  const std::vector<float> flat = RunToEnd(c);
  c.out = dir / "rising", c.balance.decay_end = 1.0;
  EXPECT_NE(RunToEnd(c), flat);
}

/// Gradient norm and divergence of a pass with a teacher.
std::pair<double, double> Taught(const std::string& teacher, double weight, double temperature) {
  auto params = Parameters::Load(GoldenDir() + "/variants/released");
  EXPECT_TRUE(params.ok()) << (params.ok() ? "" : params.message());
  GradientPass pass(**params, 1);
  auto t = Teacher::Load({GoldenDir() + "/variants/" + teacher, weight, temperature}, "/none",
                         (*params)->config().vocab, 1, MathMode::kExact);
  EXPECT_TRUE(t.ok()) << (t.ok() ? "" : t.message());
  pass.Distil(t->get());
  const std::vector<TokenId> ids{1, 7, 30, 4, 99, 12};
  const TrainRow row{std::span(ids).first(5), std::span(ids).subspan(1)};
  const auto sum = pass.Run({&row, 1}, 0.2);
  EXPECT_TRUE(sum.ok());
  return {GradientNorm(**params), sum->divergence};
}

TEST(TrainerSteps, WeightAndTemperatureOfATeacherReachTheLoss) {
  // Of itself a model has nothing to learn, whatever the text says.
  EXPECT_LT(Taught("released", 1, 1).first, 1e-4);
  EXPECT_GT(Taught("released", 0.25, 1).first, 1e-2);
  EXPECT_NEAR(Taught("released", 0.25, 1).first, 1.5 * Taught("released", 0.5, 1).first, 1e-4);
  const double warm = Taught("plain", 1, 4).second, plain = Taught("plain", 1, 1).second;
  EXPECT_GT(plain, 0);
  EXPECT_GT(std::abs(warm - plain), 1e-3 * plain);
}

}  // namespace
}  // namespace k3
