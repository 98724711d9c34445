// What went wrong in other servers of this family of models (tests/cases/COVERAGE.md), on the
// engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "k3/model/model.h"
#include "support/engine_fixtures.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using test::AddTo;
using test::Handle;
using test::HashModel;
using test::MakeCore;
using test::PlainTokens;
using test::Plan;
using test::RunOn;
using test::Text;

EngineOptions AlwaysDrafting() {
  EngineOptions o;
  o.adaptive_draft = false;
  return o;
}

std::vector<TokenId> Joined(std::vector<TokenId> first, const std::vector<TokenId>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

TEST(EngineReports, SnapshotsDraftsAndPieceSizesTogether) {
  for (const MathMode mode : {MathMode::kExact, MathMode::kFast}) {
    HashModel model;
    model.mode = mode;
    std::vector<Plan> plans, second;
    for (std::uint64_t i = 0; i < 3; ++i) {
      plans.push_back(Text(90, i / 2, 30));  // two of them begin alike
      plans[i].prompt.resize(70 + 10 * i);
      plans[i].sampling.temperature = i == 0 ? 0 : 0.8;
      plans[i].sampling.seed = i;
      second.push_back(plans[i]);
      second[i].prompt = Joined(plans[i].prompt, PlainTokens(model, plans[i]));
      second[i].prompt.push_back(5);
    }
    for (const std::int64_t piece : {1, 7, 16, 64, 96, 512}) {
      for (const int bits : {0, 1, 2, 3}) {
        EngineOptions o = AlwaysDrafting();
        o.prefix_cache = (bits & 1) != 0;
        o.speculate = (bits & 2) != 0;
        o.prefill_tokens_per_step = piece;
        auto core = MakeCore(model, o);
        for (const auto* turn : {&plans, &second, &second}) {
          const auto run = RunOn(*core, *turn, model.vocab());
          for (std::size_t i = 0; i < turn->size(); ++i) {
            EXPECT_EQ(run.sinks[i]->tokens, PlainTokens(model, (*turn)[i]))
                << "pieces of " << piece << ", features " << bits << ", request " << i;
          }
        }
      }
    }
  }
}

TEST(EngineReports, HundredLongCopiesByDraftsAreThoseWithout) {
  HashModel model;
  model.repeats = 0.9;
  std::vector<Plan> plans;
  for (std::uint64_t i = 0; i < 100; ++i) {
    plans.push_back(Text(40, i, 60));
    const auto once = plans[i].prompt;
    for (int copy = 0; copy < 5; ++copy) plans[i].prompt = Joined(plans[i].prompt, once);
  }
  auto core = MakeCore(model, AlwaysDrafting());
  const auto run = RunOn(*core, plans, model.vocab());
  for (std::size_t i = 0; i < plans.size(); ++i) {
    EXPECT_EQ(run.sinks[i]->tokens, PlainTokens(model, plans[i])) << i;
  }
  EXPECT_GT(run.stats.accepted_tokens, 500u);
  EXPECT_GT(run.stats.rollbacks, 100u);
}

/// Every byte of the states that were left behind by answers with refused drafts.
void ExpectStatesOfPlainReading(TokenModel& model, const std::vector<Plan>& plans,
                                std::int64_t most) {
  const testing::TempDir dir;
  EngineOptions o = AlwaysDrafting();
  o.max_draft = most;
  o.spill_dir = dir.path();
  auto core = MakeCore(model, o);
  const auto run = RunOn(*core, plans, model.vocab());
  EXPECT_GT(run.stats.rollbacks, 0u) << most;
  core->SpillCache();
  auto kept = PrefixCache::Create(model, {o.cache_bytes, dir.path(), o.spill_bytes});
  ASSERT_TRUE(kept.ok()) << kept.message();
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const auto all = Joined(plans[i].prompt, run.sinks[i]->tokens);
    const CacheMatch match = (*kept)->Find(all, false);
    ASSERT_EQ(match.position, static_cast<std::int64_t>(all.size()) - 1) << i;
    ModelState fresh = model.NewState();
    std::vector<float> logits;
    const SequenceInput input{std::span(all).first(all.size() - 1), &fresh, LogitRows::kNone};
    ASSERT_TRUE(model.Forward({&input, 1}, logits).ok());
    EXPECT_EQ(match.state.Serialize(), fresh.Serialize()) << i << ", drafts of " << most;
  }
}

TEST(EngineReports, RefusedDraftsLeaveTheStateOfPlainReading) {
  const auto plans = [](std::int64_t vocab, std::int64_t answer) {
    std::vector<Plan> list;
    for (std::uint64_t i = 0; i < 4; ++i) {
      Rng rng(i);
      list.push_back(Text(1, i, answer + static_cast<std::int64_t>(i)));
      list[i].prompt = test::RandomTokens(rng, 40, vocab - 1);
      list[i].prompt = Joined(list[i].prompt, list[i].prompt);
      list[i].sampling.temperature = i % 2 == 0 ? 0 : 0.7;
      list[i].sampling.seed = i;
    }
    return list;
  };
  HashModel hash;
  hash.repeats = 0.7;
  for (std::int64_t most = 1; most <= 8; ++most) {
    ExpectStatesOfPlainReading(hash, plans(hash.vocab(), 100), most);
  }
  auto loaded = Model::Load(std::string(K3_SOURCE_DIR) + "/tests/golden/tiny-k3");
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  Exec exec(2);
  ModelRunner tiny(**loaded, exec);
  auto few = plans(tiny.vocab(), 40);
  for (Plan& plan : few) {  // of few words, so that there is something to guess
    plan.sampling.temperature = 0.8;
    for (const TokenId t : {5, 6, 7}) plan.sampling.logit_bias[t] = 20;
  }
  for (const std::int64_t most : {1, 4}) ExpectStatesOfPlainReading(tiny, few, most);
}

TEST(EngineReports, NearlyFullBudgetsChangeNothing) {
  HashModel model;
  const StateSize size = StateSize::Of(model.NewState());
  EngineOptions o = AlwaysDrafting();
  o.reserve_tokens = 16;
  o.prefill_tokens_per_step = 64;
  o.state_bytes = 4 * size.At(256);
  o.cache_bytes = 3 * size.At(256);
  auto core = MakeCore(model, o);
  std::vector<Plan> plans;
  std::vector<Handle> all;
  for (std::uint64_t i = 0; i < 24; ++i) {
    plans.push_back(Text(60 + 5 * static_cast<std::int64_t>(i), i % 6, 80));
    plans[i].sampling.temperature = 0.8;
    plans[i].sampling.seed = i;
    all.push_back(AddTo(*core, model, plans[i]));
  }
  int full = 0, steps = 0;
  for (; steps < 20000 && !core->idle(); ++steps) {
    core->Step();
    const EngineStats& s = core->stats();
    ASSERT_LE(s.state_bytes, s.state_limit);
    ASSERT_LE(s.cache.bytes + s.parked_bytes, o.cache_bytes);
    full += 10 * s.state_planned >= 9 * s.state_limit ? 1 : 0;
  }
  EXPECT_GT(full, 50);
  EXPECT_GT(core->stats().preemptions, 3u);
  EXPECT_GT(core->stats().cache.evicted, 10u);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    EXPECT_EQ(all[i].tokens(), PlainTokens(model, plans[i])) << i;
  }
}

/// What a turn may read: what is new. In fast mode also the last answer, and back to the grid; of
/// short texts the turn before.
void ExpectTurnsReadWhatIsNew(MathMode mode, std::int64_t first, std::int64_t question) {
  HashModel model(1 << 16);
  model.mode = mode;
  EngineOptions o;
  o.speculate = false;
  auto core = MakeCore(model, o);
  Plan plan = Text(first, 1, 30);
  const std::int64_t again = mode == MathMode::kExact ? 1
                             : first >= 512           ? 30 + 64
                                                      : question + 2 * 30 + 2 * 64;
  for (std::uint64_t turn = 1; turn <= 10; ++turn) {
    const auto sink = RunOn(*core, {plan}, model.vocab()).sinks[0];
    const auto length = static_cast<std::int64_t>(plan.prompt.size());
    if (turn > 1) {
      EXPECT_LE(length - sink->cached, question + again) << turn;
    }
    if (turn == 2) {
      EXPECT_EQ(sink->tokens, PlainTokens(model, plan));
    }
    auto history = Joined(plan.prompt, sink->tokens);
    if (turn == 10) {
      // The last question asked otherwise: all before it is known.
      Plan edited = plan;
      edited.prompt.resize(edited.prompt.size() - static_cast<std::size_t>(question));
      edited.prompt = Joined(edited.prompt, Text(question, 99).prompt);
      const auto other = RunOn(*core, {edited}, model.vocab()).sinks[0];
      EXPECT_LE(length - other->cached, question + again);
    }
    plan.prompt = Joined(std::move(history), Text(question, 10 + turn).prompt);
  }
}

TEST(EngineReports, TenTurnsReadOnlyWhatIsNew) {
  for (const MathMode mode : {MathMode::kExact, MathMode::kFast}) {
    ExpectTurnsReadWhatIsNew(mode, 20000, 200);
    ExpectTurnsReadWhatIsNew(mode, 10, 5);  // short ones too
  }
}

TEST(EngineReports, AShortSharedBeginningIsReused) {
  for (const MathMode mode : {MathMode::kExact, MathMode::kFast}) {
    HashModel model;
    model.mode = mode;
    auto core = MakeCore(model, EngineOptions());
    const auto shared = Text(300, 1).prompt;
    for (std::uint64_t i = 0; i < 3; ++i) {
      Plan plan = Text(20, 50 + i, 4);
      plan.prompt = Joined(shared, plan.prompt);
      plan.snapshot_at = {300};
      const auto sink = RunOn(*core, {plan}, model.vocab()).sinks[0];
      // Fast mode cuts on a grid of 64 tokens.
      EXPECT_GE(sink->cached, i == 0 ? 0 : mode == MathMode::kExact ? 300 : 256);
    }
  }
}

TEST(EngineReports, BiasForcesAndForbidsWithDraftsToo) {
  HashModel model;
  model.repeats = 1;
  for (const bool drafts : {false, true}) {
    for (const double temperature : {0.0, 1.0}) {
      for (const std::int64_t top_k : {0, 1, 5}) {
        Plan forced = Text(60, 1, 50);
        forced.sampling.temperature = temperature;
        forced.sampling.top_k = top_k;
        Plan banned = forced;
        forced.sampling.logit_bias = {{7, 100}};
        for (TokenId t = 0; t < 30; ++t) banned.sampling.logit_bias[t] = -100;
        EngineOptions o = AlwaysDrafting();
        o.speculate = drafts;
        auto core = MakeCore(model, o);
        const auto run = RunOn(*core, {forced, banned}, model.vocab());
        EXPECT_EQ(run.sinks[0]->tokens, std::vector<TokenId>(50, 7));
        ASSERT_EQ(run.sinks[1]->tokens.size(), 50u);
        for (const TokenId t : run.sinks[1]->tokens) EXPECT_GE(t, 30);
        EXPECT_EQ(run.stats.accepted_tokens > 0, drafts);
      }
    }
  }
}

}  // namespace
}  // namespace k3
