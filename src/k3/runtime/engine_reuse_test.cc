// What the engine does not compute twice, or ahead of time.
#include <gtest/gtest.h>

#include <vector>

#include "support/engine_fixtures.h"

namespace k3 {
namespace {

using test::AddTo;
using test::Finish;
using test::Handle;
using test::HashModel;
using test::MakeCore;
using test::PlainTokens;
using test::Plan;
using test::RunOn;
using test::Text;

TEST(EngineReuse, APromptThatManyShareIsReadOnce) {
  for (const MathMode mode : {MathMode::kExact, MathMode::kFast}) {
    HashModel model;
    model.mode = mode;
    EngineOptions o;
    o.speculate = false;
    o.prefill_tokens_per_step = 128;
    auto core = MakeCore(model, o);
    std::vector<Handle> all;
    Plan same = Text(500, 1, 4);
    same.sampling.temperature = 1;
    for (std::uint64_t i = 0; i < 8; ++i) {
      same.sampling.seed = i;
      all.push_back(AddTo(*core, model, same));
    }
    Plan parts = same;  // shares 400 tokens, then goes on alone
    parts.prompt.resize(400);
    for (int i = 0; i < 50; ++i) parts.prompt.push_back(i);
    all.push_back(AddTo(*core, model, parts));
    Finish(*core);
    const std::int64_t decoded = 9 * 3;
    const std::int64_t alone = mode == MathMode::kExact ? 50 : 450 - 384;
    EXPECT_EQ(model.tokens_read, 500 + alone + decoded);
    for (std::uint64_t i = 0; i < 8; ++i) {
      same.sampling.seed = i;
      EXPECT_EQ(all[i].tokens(), PlainTokens(model, same));
      EXPECT_EQ(all[i].sink->cached, i == 0 ? 0 : 500);
    }
    EXPECT_EQ(all[8].tokens(), PlainTokens(model, parts));
  }
}

TEST(EngineReuse, QuestionsOverOneLongTextReadItOnce) {
  std::int64_t read[2];
  for (const bool cache : {false, true}) {
    HashModel model;
    EngineOptions o;
    o.prefix_cache = cache;
    auto core = MakeCore(model, o);
    std::vector<Plan> plans;
    for (std::uint64_t i = 0; i < 32; ++i) {
      plans.push_back(Text(2000, 1, 4));
      const Plan question = Text(20, 100 + i);
      plans[i].prompt.insert(plans[i].prompt.end(), question.prompt.begin(), question.prompt.end());
    }
    const auto all = RunOn(*core, plans, model.vocab());
    for (std::size_t i = 0; i < plans.size(); ++i) {
      EXPECT_EQ(all.sinks[i]->tokens, PlainTokens(model, plans[i]));
    }
    read[cache ? 1 : 0] = static_cast<std::int64_t>(all.stats.prefill_tokens);
  }
  EXPECT_GE(read[0], 16 * read[1]);
}

TEST(EngineReuse, DraftsSavePassesWhereTheTextRepeats) {
  std::uint64_t steps[2];
  Plan plan = Text(200, 1, 200);
  plan.prompt.clear();
  for (int i = 0; i < 200; ++i) plan.prompt.push_back(i % 60);
  for (const bool drafts : {false, true}) {
    HashModel model;
    model.repeats = 0.95;
    EngineOptions o;
    o.speculate = drafts;
    o.adaptive_draft = false;
    auto core = MakeCore(model, o);
    const auto run = RunOn(*core, {plan}, model.vocab());
    EXPECT_EQ(run.sinks[0]->tokens, PlainTokens(model, plan));
    EXPECT_EQ(run.sinks[0]->result.accepted, static_cast<std::int64_t>(run.stats.accepted_tokens));
    steps[drafts ? 1 : 0] = run.stats.steps;
    plan.sampling.temperature = 0.5;
  }
  EXPECT_GE(steps[0], 2 * steps[1]);
}

TEST(EngineReuse, RejectedAtEveryPlaceOfADraft) {
  // Four sequences in one batch whose drafts fail at different places, over and over.
  HashModel model;
  model.repeats = 0.7;
  for (std::int64_t most = 1; most <= 8; ++most) {
    EngineOptions o;
    o.adaptive_draft = false;
    o.max_draft = most;
    auto core = MakeCore(model, o);
    std::vector<Plan> plans;
    for (std::uint64_t i = 0; i < 4; ++i) {
      plans.push_back(Text(60, i, 150));
      plans[i].sampling.temperature = 0.6;
      plans[i].sampling.seed = i;
      plans[i].sampling.frequency_penalty = 0.1;
    }
    const auto all = RunOn(*core, plans, model.vocab());
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(all.sinks[i]->tokens, PlainTokens(model, plans[i])) << most;
    }
    EXPECT_GT(all.stats.rollbacks, 3u);
    EXPECT_FALSE(model.rows_disagree);
  }
}

TEST(EngineReuse, ADraftModelThatFailsIsLeftAlone) {
  HashModel model, draft;
  Plan plan = Text(40, 1, 60);
  plan.sampling.temperature = 1;
  for (const bool bad : {false, true}) {
    int passes = 0;
    draft.on_forward = [&] { ++passes; };
    plan.prompt[3] = bad ? HashModel::kPoison : 7;
    plan.sampling.logit_bias[HashModel::kPoison] = -100;
    HashModel blind;  // does not mind the poison
    blind.tolerant = true;
    auto core = MakeCore(blind, EngineOptions(), &draft);
    const auto run = RunOn(*core, {plan}, model.vocab());
    EXPECT_EQ(run.sinks[0]->tokens, PlainTokens(blind, plan));
    EXPECT_EQ(passes == 1, bad);
  }
  HashModel small(50);  // no room for the text: no drafts, no harm
  auto core = MakeCore(model, EngineOptions(), &small);
  plan.prompt[3] = 7;
  EXPECT_EQ(RunOn(*core, {plan}, 64).sinks[0]->tokens, PlainTokens(model, plan));
}

TEST(EngineReuse, WaitingForAPrefixEndsWhenItsReaderIsCancelled) {
  HashModel model;
  EngineOptions o;
  o.prefill_tokens_per_step = 64;
  auto core = MakeCore(model, o);
  const Plan same = Text(1000, 1, 4);
  const Handle reader = AddTo(*core, model, same);
  core->Step();
  const Handle waits = AddTo(*core, model, same);
  core->Step();
  EXPECT_EQ(waits.sink->starts, 0);
  core->Cancel(reader.id);
  core->Step();
  EXPECT_EQ(waits.sink->starts, 1);
  Finish(*core);
  EXPECT_EQ(waits.tokens(), PlainTokens(model, same));
}

}  // namespace
}  // namespace k3
