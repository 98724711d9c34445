// The same request gives the same tokens however it was run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "k3/model/model.h"
#include "k3/runtime/engine_core.h"
#include "support/engine_fixtures.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using test::HashModel;
using test::MakeCore;
using test::Outcome;
using test::PlainTokens;
using test::Plan;
using test::RunOn;

EngineOptions Options() {
  EngineOptions o;
  o.prefill_tokens_per_step = 96;
  o.adaptive_draft = false;
  o.max_draft = 5;
  return o;
}

/// The models that the same tests run on.
struct Case {
  const char* name;
  bool tiny;
  MathMode math;
};

class EngineIdentity : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!GetParam().tiny) {
      auto hash = std::make_unique<HashModel>();
      hash->mode = GetParam().math;
      hash_ = hash.get();
      model_ = std::move(hash);
      return;
    }
    auto loaded = Model::Load(std::string(K3_SOURCE_DIR) + "/tests/golden/tiny-k3");
    ASSERT_TRUE(loaded.ok()) << loaded.message();
    loaded_ = std::move(*loaded);
    exec_ = std::make_unique<Exec>(2, GetParam().math);
    model_ = std::make_unique<ModelRunner>(*loaded_, *exec_);
    second_ = std::make_unique<ModelRunner>(*loaded_, *exec_);
  }
  void TearDown() override {
    if (hash_ != nullptr) {
      EXPECT_FALSE(hash_->rows_disagree);
    }
  }

  /// Requests of all kinds, and what each gives alone by the plainest means.
  void MakePlans(std::uint64_t seed, int n) {
    Rng rng(seed);
    for (int i = 0; i < n; ++i) {
      plans_.push_back(test::RandomPlan(rng, model_->vocab(), 200));
      want_.push_back(PlainTokens(*model_, plans_.back()));
    }
  }
  void Expect(const Outcome& got, const std::string& what) {
    ASSERT_EQ(got.sinks.size(), want_.size());
    for (std::size_t i = 0; i < want_.size(); ++i) {
      EXPECT_EQ(got.sinks[i]->tokens, want_[i]) << what << ", request " << i;
      EXPECT_EQ(got.sinks[i]->finishes, 1) << what;
      EXPECT_NE(got.sinks[i]->result.finish, EngineFinish::kError)
          << got.sinks[i]->result.status.message();
      EXPECT_EQ(got.sinks[i]->result.completion_tokens, static_cast<std::int64_t>(want_[i].size()));
    }
  }
  /// 20, or what K3_IDENTITY_REQUESTS says (from 20 on).
  static int Requests() {
    const char* text = std::getenv("K3_IDENTITY_REQUESTS");
    return std::max(20, text == nullptr ? 0 : std::atoi(text));
  }
  /// All 32, or on the slower models twelve in which every pair of values occurs.
  static std::vector<int> Combinations() {
    if (GetParam().tiny) return {0, 7, 11, 13, 14, 19, 21, 22, 25, 26, 28, 31};
    std::vector<int> all(32);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  Outcome Each(EngineCore& core) {
    Outcome all;
    for (const Plan& plan : plans_) {
      all.sinks.push_back(RunOn(core, {plan}, model_->vocab()).sinks[0]);
    }
    all.stats = core.stats();
    return all;
  }

  std::unique_ptr<Model> loaded_;
  std::unique_ptr<Exec> exec_;
  std::unique_ptr<TokenModel> model_, second_;
  HashModel* hash_ = nullptr;
  std::vector<Plan> plans_;
  std::vector<std::vector<TokenId>> want_;
};

TEST_P(EngineIdentity, ColdWarmBatchedPreemptedDraftedAndSpilled) {
  MakePlans(11, Requests());
  EngineOptions plain = Options();
  plain.prefix_cache = false;
  plain.speculate = false;
  auto cold = MakeCore(*model_, plain);
  Expect(Each(*cold), "cold, one by one");
  auto batched = MakeCore(*model_, plain);
  Expect(RunOn(*batched, plans_, model_->vocab()), "all at once");

  auto warm = MakeCore(*model_, Options());
  Expect(Each(*warm), "first time with everything on");
  const Outcome again = Each(*warm);
  Expect(again, "second time, from snapshots");
  EXPECT_GE(again.stats.cache.hits, 15u);
  EXPECT_GT(again.stats.accepted_tokens, 0u);
  EXPECT_GT(again.stats.rollbacks, 0u);

  EngineOptions tight = Options();
  tight.max_running = 2;
  auto crowded = MakeCore(*model_, tight);
  const Outcome preempted = RunOn(*crowded, plans_, model_->vocab(), 3);
  Expect(preempted, "preempted, states kept");
  EXPECT_GE(preempted.stats.preemptions, 10u);
  EXPECT_EQ(preempted.stats.preemptions_dropped, 0u);
  tight.cache_bytes = 0;
  auto poor = MakeCore(*model_, tight);
  const Outcome dropped = RunOn(*poor, plans_, model_->vocab(), 3);
  Expect(dropped, "preempted, states dropped");
  EXPECT_GE(dropped.stats.preemptions_dropped, 10u);

  // A draft model that is often right: the model itself, or one that differs now and then.
  HashModel similar;
  similar.repeats = 1;
  TokenModel* draft = hash_ != nullptr ? static_cast<TokenModel*>(&similar) : second_.get();
  auto guessed = MakeCore(*model_, Options(), draft);
  const Outcome by_model = RunOn(*guessed, plans_, model_->vocab());
  Expect(by_model, "drafted by a model");
  EXPECT_GT(by_model.stats.accepted_tokens, batched->stats().accepted_tokens);
  EXPECT_GT(by_model.stats.accepted_tokens, 40u);
  tight.max_running = 3;
  auto both = MakeCore(*model_, tight, draft);
  Expect(RunOn(*both, plans_, model_->vocab(), 3), "drafted by a model and preempted");
  EXPECT_FALSE(similar.rows_disagree);

  const testing::TempDir dir;
  EngineOptions spilling = Options();
  spilling.spill_dir = dir.path();
  {
    auto before = MakeCore(*model_, spilling);
    Expect(Each(*before), "before a restart");
    before->SpillCache();
    EXPECT_GT(before->stats().cache.spilled, 0u);
  }
  auto after = MakeCore(*model_, spilling);
  const Outcome restored = Each(*after);
  Expect(restored, "after a restart");
  EXPECT_GT(restored.stats.cache.spill_hits, 0u);
}

/// Everything that a request is told, on any number of threads.
TEST(EngineThreads, DrawsAreTheSameOnAnyNumberOfThreads) {
  Rng rng(11);
  std::vector<Plan> plans;
  for (int i = 0; i < 40; ++i) {
    plans.push_back(test::RandomPlan(rng, HashModel::kVocab, 120));
    plans.back().top_logprobs = i % 3 - 1;
    plans.back().prompt_logprobs = i % 3 > 0;
  }
  Outcome want;
  for (const int threads : {0, 1, 4}) {
    ThreadPool pool(std::max(1, threads));
    HashModel model;
    model.threads = threads > 0 ? &pool : nullptr;
    auto core = MakeCore(model, Options());
    const Outcome got = RunOn(*core, plans, model.vocab());
    if (threads == 0) {
      want = got;
      continue;
    }
    const auto same = [](const std::vector<SampleResult>& a, const std::vector<SampleResult>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
        return x.token == y.token && x.logprob == y.logprob && x.top.size() == y.top.size() &&
               std::equal(x.top.begin(), x.top.end(), y.top.begin(),
                          [](auto& s, auto& t) { return s.id == t.id && s.logprob == t.logprob; });
      });
    };
    for (std::size_t i = 0; i < plans.size(); ++i) {
      EXPECT_EQ(got.sinks[i]->tokens, want.sinks[i]->tokens) << threads << " threads, " << i;
      EXPECT_TRUE(same(got.sinks[i]->results, want.sinks[i]->results)) << i;
      EXPECT_TRUE(same(got.sinks[i]->prompt_logprobs, want.sinks[i]->prompt_logprobs)) << i;
      EXPECT_EQ(got.sinks[i]->result.finish, want.sinks[i]->result.finish) << i;
    }
  }
}

TEST(EngineThreads, OneBadRowEndsOnlyItsOwnRequest) {
  ThreadPool pool(3);
  HashModel model;
  model.threads = &pool;
  model.tolerant = true;  // the pass succeeds, a row is not finite
  std::vector<Plan> plans;
  for (std::uint64_t i = 0; i < 6; ++i) plans.push_back(test::Text(20, i));
  auto clean = MakeCore(model, Options());
  const Outcome want = RunOn(*clean, plans, model.vocab());
  model.bad_row = 2;
  auto core = MakeCore(model, Options());
  const Outcome got = RunOn(*core, plans, model.vocab());
  int failed = 0;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (got.sinks[i]->result.finish == EngineFinish::kError) {
      ++failed;
    } else {
      EXPECT_EQ(got.sinks[i]->tokens, want.sinks[i]->tokens) << i;
    }
  }
  EXPECT_EQ(failed, 1);
}

TEST_P(EngineIdentity, PairsOfFeatures) {
  // Every pair of {snapshots, drafts, preemption, penalties, constraint}, on and off, over a
  // conversation whose second request continues the first.
  Rng rng(5);
  const auto base = test::RandomTokens(rng, 90, model_->vocab() - 1);
  const std::int64_t answer = GetParam().tiny ? 16 : 40;
  for (const int bits : Combinations()) {
    EngineOptions o = Options();
    o.prefix_cache = (bits & 1) != 0;
    o.speculate = (bits & 2) != 0;
    const int stagger = (bits & 4) != 0 ? 4 : 0;
    if (stagger > 0) o.max_running = 1;
    plans_.clear();
    want_.clear();
    for (std::uint64_t i = 0; i < 4; ++i) {
      Plan p;
      p.prompt = base;
      p.prompt.resize(60 + 10 * i);
      p.sampling.logit_bias = {{7, 4.0}};
      p.max_tokens = answer;
      p.sampling.seed = i;
      p.sampling.temperature = i % 2 == 0 ? 0 : 0.7;
      if ((bits & 8) != 0) p.sampling.repetition_penalty = 1.3, p.sampling.presence_penalty = 0.4;
      if ((bits & 16) != 0) p.constrained = 30;
      plans_.push_back(p);
      want_.push_back(PlainTokens(*model_, p));
    }
    auto core = MakeCore(*model_, o);
    Expect(RunOn(*core, plans_, model_->vocab(), stagger), "features " + std::to_string(bits));
    for (std::size_t i = 0; i < plans_.size(); ++i) {
      Plan& p = plans_[i];
      p.prompt.insert(p.prompt.end(), want_[i].begin(), want_[i].end());
      p.prompt.push_back(3);
      want_[i] = PlainTokens(*model_, p);
    }
    const Outcome second = RunOn(*core, plans_, model_->vocab(), stagger);
    Expect(second, "second turn, features " + std::to_string(bits));
    if ((bits & 4) != 0) {
      EXPECT_GT(second.stats.preemptions, 0u) << bits;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EngineIdentity,
                         ::testing::Values(Case{"hash_exact", false, MathMode::kExact},
                                           Case{"hash_fast", false, MathMode::kFast},
                                           Case{"tiny_exact", true, MathMode::kExact},
                                           Case{"tiny_fast", true, MathMode::kFast}),
                         [](const auto& c) { return std::string(c.param.name); });

}  // namespace
}  // namespace k3
