// Scheduling, step by step and without threads.
#include "k3/runtime/engine_core.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "support/engine_fixtures.h"

namespace k3 {
namespace {

using test::AddTo;
using test::Finish;
using test::Handle;
using test::HashModel;
using test::MakeCore;
using test::Plain;
using test::PlainTokens;
using test::Plan;
using test::RunOn;
using test::Text;

TEST(EngineCore, DecodesGoOnWhileALongPromptIsRead) {
  HashModel model;
  EngineOptions o = Plain();
  o.prefill_tokens_per_step = 64;
  auto core = MakeCore(model, o);
  const Handle first = AddTo(*core, model, Text(10, 1, 100));
  core->Step();
  ASSERT_EQ(first.tokens().size(), 1u);
  const Handle second = AddTo(*core, model, Text(1000, 2));
  for (int i = 0; i < 15; ++i) {
    core->Step();
    EXPECT_EQ(first.tokens().size(), static_cast<std::size_t>(i) + 2) << "each step gives a token";
    EXPECT_LE(model.rows.back(), 65);
  }
  EXPECT_TRUE(second.tokens().empty());
  core->Step();
  EXPECT_EQ(second.tokens().size(), 1u) << "1000 tokens in 16 steps of 64";
}

TEST(EngineCore, AShortPromptDoesNotWaitForALongOne) {
  for (const MathMode mode : {MathMode::kExact, MathMode::kFast}) {
    HashModel model;
    model.mode = mode;
    EngineOptions o = Plain();
    o.prefill_tokens_per_step = 128;
    auto core = MakeCore(model, o);
    const Handle longer = AddTo(*core, model, Text(3000, 1));
    core->Step();
    const Handle shorter = AddTo(*core, model, Text(100, 2));
    core->Step();
    core->Step();
    EXPECT_GE(shorter.tokens().size(), 1u);
    EXPECT_TRUE(longer.tokens().empty());
    for (const std::int64_t n : model.rows) EXPECT_LE(n, 130);
  }
}

TEST(EngineCore, ManyPromptsInFastModeTakeTurns) {
  HashModel model;
  model.mode = MathMode::kFast;
  EngineOptions o = Plain();
  o.prefill_tokens_per_step = 64;
  auto core = MakeCore(model, o);
  std::vector<Handle> all;
  for (std::uint64_t i = 0; i < 8; ++i) all.push_back(AddTo(*core, model, Text(130, i, 1)));
  std::int64_t steps = 0;
  while (!core->idle() && steps < 100) core->Step(), ++steps;
  EXPECT_EQ(steps, 24) << "three pieces each, one a step";
}

TEST(EngineCore, BytesNeverExceedThePlanAndTheYoungestGivesWay) {
  HashModel model;
  const StateSize size = StateSize::Of(model.NewState());
  EngineOptions o = Plain();
  o.reserve_tokens = 16;
  o.max_draft = 4;
  o.state_bytes = 4 * size.At(128);
  auto core = MakeCore(model, o);
  std::vector<Handle> all;
  std::vector<Plan> plans;
  for (std::uint64_t i = 0; i < 12; ++i) {
    plans.push_back(Text(20 + static_cast<std::int64_t>(i), i, 230));
    plans.back().sampling.temperature = 1;
    plans.back().sampling.seed = i;
    all.push_back(AddTo(*core, model, plans.back()));
  }
  for (int i = 0; i < 20000 && !core->idle(); ++i) {
    core->Step();
    const EngineStats& s = core->stats();
    ASSERT_LE(s.state_bytes, o.state_bytes);
  }
  EXPECT_GT(core->stats().preemptions, 4u);
  EXPECT_EQ(all[0].sink->result.preemptions, 0) << "the oldest stays";
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].tokens(), PlainTokens(model, plans[i])) << i;
  }
  EXPECT_EQ(core->stats().state_bytes, 0);
  EXPECT_EQ(core->stats().parked_bytes, 0);
}

TEST(EngineCore, HigherPriorityGoesFirstAndTakesThePlaceOfALowerOne) {
  HashModel model;
  EngineOptions o = Plain();
  o.max_running = 1;
  auto core = MakeCore(model, o);
  const Handle low = AddTo(*core, model, Text(10, 1, 30));
  core->Step();
  const Handle same = AddTo(*core, model, Text(10, 2, 5));
  const Handle high = AddTo(*core, model, Text(10, 3, 5), [](EngineRequest& r) { r.priority = 1; });
  core->Step();
  EXPECT_EQ(high.tokens().size(), 1u);
  EXPECT_EQ(low.tokens().size(), 1u);
  while (!high.finished()) core->Step();
  EXPECT_TRUE(same.tokens().empty());
  Finish(*core);
  EXPECT_EQ(low.sink->result.preemptions, 1);
  EXPECT_EQ(low.tokens().size(), 30u);
  EXPECT_EQ(same.tokens().size(), 5u);
}

TEST(EngineCore, CancelInEveryPhase) {
  HashModel model;
  EngineOptions o = Plain();
  o.max_running = 1;
  o.prefill_tokens_per_step = 16;
  auto core = MakeCore(model, o);
  const Handle decode = AddTo(*core, model, Text(10, 1, 1000));
  const Handle waiting = AddTo(*core, model, Text(10, 2));
  core->Step();
  core->Cancel(waiting.id);
  EXPECT_TRUE(waiting.finished());
  EXPECT_EQ(waiting.sink->starts, 0);
  const Handle prefill =
      AddTo(*core, model, Text(100, 3), [](EngineRequest& r) { r.priority = 1; });
  core->Step();  // preempts the first
  core->Cancel(decode.id);
  EXPECT_TRUE(decode.finished());
  EXPECT_TRUE(prefill.tokens().empty());
  core->Cancel(prefill.id);
  EXPECT_TRUE(prefill.finished());
  const Handle last = AddTo(*core, model, Text(10, 4, 1000));
  core->Step();
  core->Step();
  core->Cancel(last.id);
  core->Cancel(last.id);
  core->Cancel(12345);
  EXPECT_TRUE(core->idle());
  for (const Handle* h : {&decode, &waiting, &prefill, &last}) {
    EXPECT_EQ(h->sink->finishes, 1);
    EXPECT_EQ(h->sink->result.finish, EngineFinish::kCancelled);
  }
  const EngineStats& s = core->stats();
  for (const std::uint64_t n : s.aborted) EXPECT_EQ(n, 1u);
  EXPECT_EQ(s.state_bytes + s.parked_bytes, 0);
}

TEST(EngineCore, DeadlinesEndRequestsWhereverTheyAre) {
  HashModel model;
  EngineOptions o = Plain();
  o.max_running = 1;
  auto core = MakeCore(model, o);
  const auto late = [](EngineRequest& r) {
    r.deadline = EngineClock::now() - std::chrono::seconds(1);
  };
  const Handle running = AddTo(*core, model, Text(10, 1, 100000), [](EngineRequest& r) {
    r.deadline = EngineClock::now() + std::chrono::milliseconds(40);
  });
  const Handle waiting = AddTo(*core, model, Text(10, 2), late);
  core->Step();
  EXPECT_EQ(waiting.sink->result.finish, EngineFinish::kDeadline);
  model.on_forward = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
  Finish(*core);
  EXPECT_EQ(running.sink->result.finish, EngineFinish::kDeadline);
  EXPECT_GT(running.tokens().size(), 0u);
}

TEST(EngineCore, ScoresThatAreNotFiniteEndOneRequestOnly) {
  for (const bool cache : {false, true}) {
    HashModel model;
    EngineOptions o;
    o.prefix_cache = cache;
    o.adaptive_draft = false;
    auto core = MakeCore(model, o);
    std::vector<Plan> plans;
    std::vector<Handle> all;
    for (std::uint64_t i = 0; i < 6; ++i) {
      plans.push_back(Text(40, i, 30));
      plans[i].sampling.temperature = 0.8;
      plans[i].sampling.seed = i;
      plans[i].sampling.frequency_penalty = 0.3;
    }
    // The first poisons itself after some tokens, the second with its prompt.
    plans[0].sampling.logit_bias[HashModel::kPoison] = 100;
    plans[0].max_tokens = 400;
    plans[1].prompt[20] = HashModel::kPoison;
    for (const Plan& p : plans) all.push_back(AddTo(*core, model, p));
    Finish(*core);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(all[i].sink->result.finish, EngineFinish::kError) << i;
      EXPECT_EQ(all[i].sink->result.status.message(), "poisoned");
      EXPECT_EQ(all[i].sink->finishes, 1);
    }
    EXPECT_GT(all[0].tokens().size(), 0u);
    for (std::size_t i = 2; i < plans.size(); ++i) {
      EXPECT_EQ(all[i].tokens(), PlainTokens(model, plans[i])) << i;
      EXPECT_EQ(all[i].sink->result.finish, EngineFinish::kLength);
    }
    EXPECT_GE(core->stats().numeric_errors, 2u);
    EXPECT_FALSE(model.rows_disagree);
  }
}

TEST(EngineCore, ThePromptAloneAndItsLogprobs) {
  HashModel model;
  EngineOptions o;
  o.prefill_tokens_per_step = 50;
  auto core = MakeCore(model, o);
  const Plan plan = Text(200, 1, 0);
  (void)RunOn(*core, {plan}, model.vocab());  // leaves snapshots
  const Handle h = AddTo(*core, model, plan, [](EngineRequest& r) {
    r.prompt_logprobs = true;
    r.top_logprobs = 2;
  });
  Finish(*core);
  EXPECT_EQ(h.sink->result.finish, EngineFinish::kLength);
  EXPECT_TRUE(h.tokens().empty());
  EXPECT_EQ(h.sink->cached, 0);
  ASSERT_EQ(h.sink->prompt_logprobs.size(), 199u);
  ModelState state = model.NewState();
  std::vector<float> logits;
  const SequenceInput input{plan.prompt, &state, LogitRows::kAll};
  ASSERT_TRUE(model.Forward({&input, 1}, logits).ok());
  for (std::size_t i = 0; i < 199; ++i) {
    const auto row = std::span(logits).subspan(i * 64, 64);
    const SampleResult& r = h.sink->prompt_logprobs[i];
    EXPECT_EQ(r.token, plan.prompt[i + 1]);
    EXPECT_EQ(r.logprob, LogSoftmaxAt(row, r.token));
    EXPECT_EQ(r.top.size(), 2u);
  }
  const std::size_t misses = static_cast<std::size_t>(CacheMiss::kLogprobs);
  EXPECT_EQ(core->stats().cache.misses[misses], 1u);
  // Preempted in the middle, every entry still comes once.
  EngineOptions one = o;
  one.max_running = 1;
  one.cache_bytes = 0;
  auto crowded = MakeCore(model, one);
  const Handle low =
      AddTo(*crowded, model, plan, [](EngineRequest& r) { r.prompt_logprobs = true; });
  crowded->Step();
  crowded->Step();
  const Handle high =
      AddTo(*crowded, model, Text(10, 5, 2), [](EngineRequest& r) { r.priority = 1; });
  Finish(*crowded);
  EXPECT_EQ(low.sink->result.preemptions, 1);
  ASSERT_EQ(low.sink->prompt_logprobs.size(), 199u);
  for (std::size_t i = 0; i < 199; ++i)
    EXPECT_EQ(low.sink->prompt_logprobs[i].token, plan.prompt[i + 1]);
  // The whole prompt is known and nothing else was wanted.
  auto again = MakeCore(model, o);
  (void)RunOn(*again, {Text(64, 9, 0), Text(64, 9, 0)}, model.vocab());
}

TEST(EngineCore, EndsOfATextAndOfTheContext) {
  HashModel model(64);
  auto core = MakeCore(model, Plain());
  const Handle grows = AddTo(*core, model, Text(10, 1, 1000000));
  const Handle full = AddTo(*core, model, Text(64, 2));
  const Handle almost = AddTo(*core, model, Text(63, 3));
  Handle stops = AddTo(*core, model, Text(10, 4));
  stops.sink->stop_after = 3;
  Finish(*core);
  EXPECT_EQ(grows.tokens().size(), 54u);
  EXPECT_EQ(grows.sink->result.finish, EngineFinish::kLength);
  EXPECT_EQ(full.tokens().size(), 0u);
  EXPECT_EQ(full.sink->result.finish, EngineFinish::kLength);
  EXPECT_EQ(almost.tokens().size(), 1u);
  EXPECT_EQ(stops.tokens().size(), 3u);
  EXPECT_EQ(stops.sink->result.finish, EngineFinish::kStop);
  EXPECT_EQ(stops.sink->result.completion_tokens, 3);

  EngineRequest r = Text(65, 1).Make(64);
  EXPECT_EQ(core->Check(r).message(), "the prompt has 65 tokens, the context holds 64");
  r.prompt = {};
  EXPECT_FALSE(core->Check(r).ok());
  r.prompt = {64};
  EXPECT_EQ(core->Check(r).message(), "token 64 at position 0: expected 0..63");
  r.prompt = {1};
  r.max_tokens = -1;
  EXPECT_FALSE(core->Check(r).ok());
  r.max_tokens = INT64_MAX;
  EXPECT_TRUE(core->Check(r).ok());
  r.sampling.top_p = 2;
  EXPECT_FALSE(core->Check(r).ok());
}

TEST(EngineCore, AFailureThatIsNobodysFaultEndsTheBatchAndTheEngineGoesOn) {
  class Broken final : public TokenModel {
   public:
    std::int64_t vocab() const override { return model.vocab(); }
    std::int64_t max_positions() const override { return model.max_positions(); }
    std::uint64_t fingerprint() const override { return 1; }
    MathMode math() const override { return MathMode::kExact; }
    ModelState NewState() const override { return model.NewState(); }
    Status Forward(std::span<const SequenceInput> batch, std::vector<float>& logits) override {
      if (fail == 1) return Error{Code::kResource, "the device is gone"};
      if (fail == 2) throw std::bad_alloc();
      return model.Forward(batch, logits);
    }
    HashModel model;
    int fail = 0;
  };
  for (const int how : {1, 2}) {
    Broken model;
    auto core = MakeCore(model, Plain());
    const Handle a = AddTo(*core, model.model, Text(10, 1)),
                 b = AddTo(*core, model.model, Text(10, 2));
    core->Step();
    model.fail = how;
    core->Step();
    for (const Handle* h : {&a, &b}) {
      EXPECT_EQ(h->sink->result.finish, EngineFinish::kError);
      EXPECT_EQ(h->sink->result.status.error().code, Code::kResource);
    }
    model.fail = 0;
    EXPECT_EQ(RunOn(*core, {Text(10, 1)}, 64).sinks[0]->tokens,
              PlainTokens(model.model, Text(10, 1)));
  }
}

}  // namespace
}  // namespace k3
