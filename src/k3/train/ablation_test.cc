// Plans of ablations and the verdicts over their runs.
#include "k3/train/ablation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "support/golden.h"
#include "support/temp_dir.h"
#include "support/train_run.h"

namespace k3 {
namespace {

using testing::GoldenDir;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::ReadBytes;
using testing::TempDir;
using testing::WriteBytes;

std::string BaseToml() {
  return "[model]\nconfig = \"" + GoldenDir() +
         "/variants/released/config.json\"\n[data]\ndir = \"data\"\n[train]\nout = \"x\"\n"
         "steps = 4\nbatch = 2\nsequence = 16\nthreads = 1\n[balance]\nmethod = \"quantile\"\n";
}

std::string PlanToml(const std::string& rest) {
  return "base = \"base.toml\"\nout = \"runs\"\nseeds = [1, 2]\n" + rest;
}

struct Folder {
  TempDir dir;
  Folder() { WriteBytes(dir / "base.toml", BaseToml()); }
  Result<AblationPlan> Read(const std::string& rest) const {
    WriteBytes(dir / "plan.toml", PlanToml(rest));
    return ReadAblationPlan(dir / "plan.toml");
  }
};

TEST(AblationPlan, ArmsPairsAndAllAreCompleteRuns) {
  const Folder f;
  const auto plan = f.Read(
      "pairs = [[\"sign\", \"soft\"]]\nall_on = true\n"
      "[arms.sign.balance]\nmethod = \"sign\"\nstep = 0.01\n"
      "[arms.soft.config.k3_variant.decay]\nform = \"softplus\"\n"
      "[arms.short.train]\nsequence = 8\n");
  ASSERT_TRUE(plan.ok()) << plan.message();
  std::vector<std::string> names;
  for (const auto& arm : plan->arms) names.push_back(arm.name);
  EXPECT_EQ(names, (std::vector<std::string>{"base", "sign", "soft", "short", "sign+soft", "all"}));
  auto config = [&](std::size_t i) {
    const auto c = ParseTrainConfig(RunToml(plan->arms[i], 7), "runs/x/seed-7/run.toml");
    EXPECT_TRUE(c.ok()) << c.message();
    return *c;
  };
  EXPECT_EQ(config(0).balance.method, BalanceMethod::kQuantile);
  EXPECT_EQ(config(0).seed, 7u);
  EXPECT_EQ(config(1).balance.method, BalanceMethod::kSign);
  EXPECT_EQ(config(3).sequence, 8);
  EXPECT_EQ(config(5).balance.method, BalanceMethod::kSign);
  EXPECT_EQ(config(5).sequence, 8);
  EXPECT_THAT(plan->arms[0].config_json, Not(HasSubstr("softplus")));
  EXPECT_THAT(plan->arms[4].config_json, HasSubstr("softplus"));
}

TEST(AblationPlan, AKeyThatNoModelReadsIsRefused) {
  const Folder f;
  auto read = [&](const std::string& rest) { return f.Read(rest); };
  EXPECT_THAT(read("[arms.a.config]\nnum_expertz = 4\n").message(),
              HasSubstr("arms.a.config.num_expertz is not read"));
  EXPECT_THAT(read("[arms.a.config.linear_attn_config]\ngate_lower_bond = -1.0\n").message(),
              HasSubstr("arms.a.config.linear_attn_config.gate_lower_bond is not read"));
  for (const char* good :
       {"[arms.a.config]\nnum_experts_per_token = 1\n", "[arms.a.config]\nrms_norm_eps = 1e-6\n",
        "[arms.a.config.linear_attn_config]\ngate_lower_bound = -1.0\n",
        "[arms.a.config.k3_variant.decay]\nform = \"softplus\"\n"}) {
    const auto plan = read(good);
    EXPECT_TRUE(plan.ok()) << good << (plan.ok() ? "" : plan.message());
  }
}

TEST(AblationPlan, WrongPlansAreRefusedByName) {
  const Folder f;
  const std::string arm = "[arms.a.train]\nclip = 2.0\n";
  auto says = [&](const std::string& rest, const char* words) {
    const auto plan = f.Read(rest);
    ASSERT_FALSE(plan.ok()) << rest;
    EXPECT_THAT(plan.message(), HasSubstr(words)) << rest;
  };
  says("", "missing table arms");
  says("x = 1\n" + arm, "unknown key x");
  says("pairs = [[\"a\", \"b\"]]\n" + arm, "b is no arm");
  says("pairs = [[\"a\", \"a\"]]\n" + arm, "stands twice");
  says("pairs = [[\"a\"]]\n" + arm, "at least two");
  says("question = 3\n" + arm, "bad value question");
  says("all_on = \"yes\"\n" + arm, "bad value all_on");
  says("[arms.a.train]\nseed = 3\n", "arms.a.train.seed: the plan decides this");
  says("[arms.a.optimizer]\nlr = inf\n", "arms.a.optimizer.lr is inf");
  says("pairs = [[\"a\", \"b\"]]\n" + arm + "[arms.b.train]\nclip = 3.0\n",
       "a and b cannot be on together: both change train.clip");
  says("all_on = true\n" + arm + "[arms.b.train]\nclip = 3.0\n", "both change train.clip");
  says("threshold = -1\n" + arm, "bad value threshold");
  says("[arms.\"../x\".train]\nclip = 2.0\n", "bad name of an arm");
  says("[arms.base.train]\nclip = 2.0\n", "bad name of an arm");
  says("[arms.a.other]\nx = 1\n", "unknown key arms.a.other");
  says("[arms.a.train]\nstpes = 1\n", "unknown key train.stpes");
  says("[arms.a]\nremove = [\"nothing\"]\n", "nothing is no key");
  says("[arms.a.config]\nnum_experts_per_token = 99\n", "arm a");
  WriteBytes(f.dir / "plan.toml", "base = \"base.toml\"\nout = \"r\"\nseeds = [1, 1]\n" + arm);
  EXPECT_THAT(ReadAblationPlan(f.dir / "plan.toml").message(), HasSubstr("bad value seeds"));
}

TEST(AblationRuns, MissingDataIsFoundBeforeTheFirstRun) {
  const Folder f;
  const auto plan = f.Read("[arms.a.train]\nclip = 2.0\n");
  ASSERT_TRUE(plan.ok()) << plan.message();
  const auto runs = RunAblation(*plan, {});
  ASSERT_FALSE(runs.ok());
  EXPECT_THAT(runs.message(), HasSubstr("arm base: "));
  EXPECT_THAT(runs.message(), HasSubstr("data/train.tokens"));
  EXPECT_FALSE(std::filesystem::exists(f.dir / "runs")) << "nothing was started";
  const auto other = f.Read("[arms.a.data]\ndir = \"elsewhere\"\n");
  TokenFileBuilder b;
  b.AddDocument(std::vector<TokenId>(100, 7), 0, 5);
  std::filesystem::create_directories(f.dir / "data");
  ASSERT_TRUE(b.Write(f.dir / "data/train.tokens", 512).ok());
  EXPECT_THAT(RunAblation(*other, {}).message(), HasSubstr("arm a: "));
  EXPECT_FALSE(std::filesystem::exists(f.dir / "runs"));
}

TEST(AblationRuns, ARunOnOtherDataOrWithAnotherTextIsDoneAgain) {
  const Folder f;
  testing::WriteTrainData(f.dir / "data");
  const auto plan = f.Read("[arms.a.train]\nclip = 2.0\n");
  ASSERT_TRUE(plan.ok()) << plan.message();
  int steps = 0;
  AblationLimits limits;
  limits.on_step = [&](const AblationRun&, const StepReport&) { ++steps; };
  auto run = [&](const AblationPlan& what) {
    steps = 0;
    const auto runs = RunAblation(what, limits);
    EXPECT_TRUE(runs.ok()) << (runs.ok() ? "" : runs.message());
    return steps;
  };
  EXPECT_EQ(run(*plan), 16) << "two arms, two seeds, four steps";
  EXPECT_EQ(run(*plan), 0);
  const auto other = f.Read("[arms.a.train]\nclip = 3.0\n");
  EXPECT_EQ(run(*other), 8) << "one arm changed";
  TokenFileBuilder b;
  for (int i = 0; i < 20; ++i) b.AddDocument(std::vector<TokenId>(50, 7), 0, 50);
  ASSERT_TRUE(b.Write(f.dir / "data/train.tokens", 512).ok());
  EXPECT_EQ(run(*other), 16) << "all read other data now";
  std::filesystem::remove_all(f.dir / "data");
  EXPECT_EQ(run(*other), 0) << "results outlive their data";
}

TEST(AblationRuns, WhatAnotherOneIsDoingStaysWhole) {
  const Folder f;
  testing::WriteTrainData(f.dir / "data");
  const auto plan = f.Read("[arms.a.train]\nclip = 2.0\n");
  ASSERT_TRUE(plan.ok()) << plan.message();
  AblationLimits limits;
  int refused = 0;
  limits.on_step = [&](const AblationRun&, const StepReport& r) {
    if (r.step != 2) return;
    const auto second = RunAblation(*plan, {});
    ASSERT_FALSE(second.ok());
    EXPECT_THAT(second.message(), HasSubstr("another ablation is using this folder"));
    ++refused;
  };
  const auto runs = RunAblation(*plan, limits);
  ASSERT_TRUE(runs.ok()) << runs.message();
  EXPECT_EQ(refused, 4);
  for (const AblationRun& r : *runs) EXPECT_EQ(r.error, "") << r.dir;

  // A single run of the plan, by hand: not a result, and nothing of it is removed.
  std::filesystem::remove_all(f.dir / "runs/a/seed-2/result.json");
  const auto config = ReadTrainConfig(f.dir / "runs/a/seed-2/run.toml");
  ASSERT_TRUE(config.ok()) << config.message();
  const auto by_hand = Trainer::Open(*config);
  ASSERT_TRUE(by_hand.ok()) << by_hand.message();
  const auto again = RunAblation(*plan, {});
  ASSERT_FALSE(again.ok());
  EXPECT_THAT(again.message(), HasSubstr("another run is using this folder"));
  EXPECT_FALSE(std::filesystem::exists(f.dir / "runs/a/seed-2/result.json"));
  EXPECT_TRUE(std::filesystem::exists(f.dir / "runs/a/seed-2/checkpoints"));
}

TEST(AblationRuns, WhatTheLogOfARunTells) {
  const Folder f;
  testing::WriteTrainData(f.dir / "data");
  const auto plan = f.Read("[arms.a.train]\nclip = 2.0\n");
  ASSERT_TRUE(plan.ok()) << plan.message();
  ASSERT_TRUE(RunAblation(*plan, {}).ok());
  std::string log;  // MaxVio falls, rises again and falls for good after step 3
  const double violations[] = {0.9, 0.2, 0.7, 0.4};
  for (int i = 0; i < 4; ++i) {
    log += fmt::format(
        "{{\"step\":{},\"loss\":{},\"tokens_per_s\":{},\"balance\":[{{\"max_violation\":{},"
        "\"dead\":0.25}}]}}\n",
        i + 1, 5 - i, 100 * (i + 1), violations[i]);
  }
  WriteBytes(f.dir / "runs/a/seed-1/log.jsonl", log);
  const auto runs = RunAblation(*plan, {});
  ASSERT_TRUE(runs.ok()) << runs.message();
  const auto a = std::find_if(runs->begin(), runs->end(),
                              [](const AblationRun& r) { return r.arm == "a" && r.seed == 1; });
  ASSERT_NE(a, runs->end());
  EXPECT_EQ(a->settled_at, 4);
  EXPECT_DOUBLE_EQ(a->loss, 2.0) << "the last tenth, where nothing is kept for validation";
  EXPECT_NEAR(a->max_violation, 0.55, 1e-12) << "of the second half";
  EXPECT_DOUBLE_EQ(a->dead, 0.25);
  EXPECT_DOUBLE_EQ(a->tokens_per_s, 300);
}

AblationRun Ended(const char* arm, std::int64_t seed, double loss, const char* error = "") {
  AblationRun r;
  r.arm = arm, r.seed = seed, r.loss = loss, r.error = error;
  return r;
}

TEST(AblationEffect, SaysNoDifferenceBeyondNoiseWhereThatIsTheTruth) {
  AblationPlan plan;
  plan.threshold = 0.05;
  std::vector<AblationRun> runs{Ended("base", 1, 3.0), Ended("base", 2, 3.2),
                                Ended("base", 3, 3.1)};
  auto verdict = [&](std::vector<double> losses) {
    std::vector<AblationRun> all = runs;
    for (std::size_t i = 0; i < losses.size(); ++i) {
      all.push_back(Ended("a", static_cast<std::int64_t>(i + 1), losses[i]));
    }
    return EffectOf(plan, all, "a").verdict;
  };
  // Paired by seed: what a seed does to both does not count.
  EXPECT_EQ(verdict({2.9, 3.1, 3.0}), "better");
  EXPECT_EQ(verdict({3.1, 3.3, 3.2}), "worse");
  EXPECT_EQ(verdict({2.98, 3.18, 3.08}), "no difference beyond noise") << "below the threshold";
  EXPECT_EQ(verdict({2.6, 3.4, 2.98}), "no difference beyond noise") << "below the spread";
  // Differences 0.05 to 0.15: their mean is above twice the standard error, below twice the spread.
  EXPECT_EQ(verdict({3.05, 3.3, 3.25}), "worse");
  // Exceeding twice a standard error of nearly nothing is not enough.
  EXPECT_EQ(verdict({3.049, 3.249, 3.149}), "no difference beyond noise");
  EXPECT_EQ(verdict({2.0}), "one seed: no verdict");
  EXPECT_EQ(verdict({}), "no pair of runs to compare");
  runs.push_back(Ended("b", 1, 0, "it broke"));
  const AblationEffect b = EffectOf(plan, runs, "b");
  EXPECT_EQ(b.failed, 1);
  EXPECT_EQ(b.verdict, "every run failed");
  const AblationEffect base = EffectOf(plan, runs, "base");
  EXPECT_NEAR(base.mean, 3.1, 1e-12);
  EXPECT_NEAR(base.spread, 0.1, 1e-12);
}

}  // namespace
}  // namespace k3
