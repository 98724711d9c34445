// The engine with its thread.
#include "k3/runtime/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "k3/runtime/prefix_cache.h"
#include "support/engine_fixtures.h"

namespace k3 {
namespace {

using std::chrono::milliseconds;
using test::CollectSink;
using test::HashModel;
using test::PlainTokens;
using test::Plan;

/// Counts down to the last OnFinish.
class Latch {
 public:
  explicit Latch(int n) : left_(n) {}
  void Down() {
    const std::lock_guard lock(mutex_);
    --left_;
    cv_.notify_all();
  }
  bool Wait(milliseconds time = milliseconds(20000)) {
    std::unique_lock lock(mutex_);
    return cv_.wait_for(lock, time, [&] { return left_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable cv_;
  int left_;
};

std::unique_ptr<Engine> Start(TokenModel& model, const EngineOptions& options = {}) {
  auto made = Engine::Create(model, options);
  EXPECT_TRUE(made.ok()) << made.message();
  return made.ok() ? std::move(*made) : nullptr;
}

std::shared_ptr<CollectSink> Sink(Latch& latch) {
  auto sink = std::make_shared<CollectSink>();
  sink->on_finish = [&latch] { latch.Down(); };
  return sink;
}

Plan Text(std::int64_t n, std::uint64_t seed, std::int64_t max_tokens = 16) {
  Plan p = test::Text(n, seed, max_tokens);
  p.sampling.temperature = 0.7;
  p.sampling.seed = seed;
  return p;
}

TEST(Engine, ItsCacheCanBeUsedUntilItEnds) {
  HashModel model, other;
  const Plan plan = Text(40, 3);
  const auto warm = [&](Engine& engine) {
    Latch latch(1);
    auto sink = Sink(latch);
    EXPECT_TRUE(engine.Submit(plan.Make(model.vocab()), sink).ok());
    EXPECT_TRUE(latch.Wait());
    return sink;
  };
  std::vector<SavedSnapshot> saved;
  std::vector<TokenId> want;
  {
    const auto engine = Start(model);
    want = warm(*engine)->tokens;
    Latch taken(1);
    engine->UseCache([&](PrefixCache* cache) {
      ASSERT_NE(cache, nullptr);
      saved = cache->Along(plan.prompt, 10, 1 << 20);
      EXPECT_EQ(cache->Along(plan.prompt, 0, 1 << 20).size(), 0u);
      taken.Down();
    });
    ASSERT_TRUE(taken.Wait());
    engine->Drain(milliseconds(0));
    bool told = false;
    engine->UseCache([&](PrefixCache* cache) { told = cache == nullptr; });
    EXPECT_TRUE(told);
  }
  ASSERT_EQ(saved.size(), 1u);
  EXPECT_EQ(saved[0].tokens, plan.prompt);
  const auto engine = Start(other);
  engine->UseCache([&](PrefixCache* cache) {
    for (SavedSnapshot& s : saved) cache->Insert(s.tokens, std::move(s.snapshot));
  });
  const auto sink = warm(*engine);
  EXPECT_EQ(sink->cached, 40);
  EXPECT_EQ(sink->tokens, want);
}

TEST(Engine, SixtyFourSecretsNeverCross) {
  HashModel model;
  const StateSize size = StateSize::Of(model.NewState());
  EngineOptions o;
  o.state_bytes = 20 * size.At(320);  // so that some give way
  o.max_running = 24;
  o.cache_bytes = 40 * size.At(320);
  o.adaptive_draft = false;
  std::vector<Plan> plans;
  std::vector<std::vector<TokenId>> want;
  for (std::uint64_t i = 0; i < 64; ++i) {
    plans.push_back(Text(100 + static_cast<std::int64_t>(i), i % 8, 60));  // eight beginnings
    plans[i].prompt.push_back(static_cast<TokenId>(i % 60));               // and a secret
    plans[i].prompt.push_back(static_cast<TokenId>(i / 60));
    plans[i].priority = static_cast<int>(i % 3);
    want.push_back(PlainTokens(model, plans[i]));
  }
  Latch latch(64);
  auto engine = Start(model, o);
  std::vector<std::shared_ptr<CollectSink>> sinks(64);
  std::vector<std::thread> clients;
  for (std::size_t c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      for (std::size_t i = c; i < 64; i += 4) {
        sinks[i] = Sink(latch);
        EXPECT_TRUE(engine->Submit(plans[i].Make(64), sinks[i]).ok());
        (void)engine->stats();
      }
    });
  }
  for (auto& c : clients) c.join();
  ASSERT_TRUE(latch.Wait());
  engine->Drain(milliseconds(1000));
  for (std::size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(sinks[i]->tokens, want[i]) << i;
    EXPECT_EQ(sinks[i]->finishes, 1);
    const EngineResult& r = sinks[i]->result;
    EXPECT_LE(r.cached_tokens, r.prompt_tokens);
    EXPECT_EQ(r.prompt_tokens, static_cast<std::int64_t>(plans[i].prompt.size()));
  }
  EXPECT_FALSE(model.rows_disagree);
  const EngineStats s = engine->stats();
  EXPECT_EQ(s.submitted, 64u);
  EXPECT_EQ(s.running + s.waiting + s.preempted, 0);
  EXPECT_EQ(s.state_bytes + s.parked_bytes, 0);
  EXPECT_EQ(s.queue.total(), 64u);
  EXPECT_EQ(s.ttft.total(), 64u);
  EXPECT_EQ(s.decode_tokens - 64, s.inter_token.total());
}

/// A model that waits in its next pass until it is let go.
struct Gate {
  explicit Gate(HashModel& model) {
    model.on_forward = [this] {
      std::unique_lock lock(mutex);
      ++passes;
      cv.notify_all();
      cv.wait(lock, [this] { return open; });
    };
  }
  void AwaitPass() {
    std::unique_lock lock(mutex);
    cv.wait(lock, [this] { return passes > 0; });
  }
  void Open() {
    const std::lock_guard lock(mutex);
    open = true;
    cv.notify_all();
  }
  std::mutex mutex;
  std::condition_variable cv;
  int passes = 0;
  bool open = false;
};

TEST(Engine, AFullQueueRefusesAndRecovers) {
  HashModel model;
  EngineOptions o;
  o.max_running = 1;
  o.max_waiting = 2;
  Gate gate(model);
  auto engine = Start(model, o);
  Latch latch(3);
  ASSERT_TRUE(engine->Submit(Text(10, 1).Make(64), Sink(latch)).ok());
  gate.AwaitPass();  // it runs, so the queue is empty
  int refused = 0, accepted = 0;
  for (std::uint64_t i = 0; i < 4; ++i) {
    const auto id = engine->Submit(Text(10, i).Make(64), Sink(latch));
    if (id.ok()) {
      ++accepted;
      continue;
    }
    ++refused;
    EXPECT_EQ(id.error().code, Code::kResource);
    EXPECT_EQ(id.message(), "2 requests are waiting, the queue holds 2");
  }
  EXPECT_EQ(refused, 2);
  EXPECT_EQ(accepted, 2);
  gate.Open();
  engine->Drain(milliseconds(20000));
  const EngineStats s = engine->stats();
  EXPECT_EQ(s.refused_full, static_cast<std::uint64_t>(refused));
  EXPECT_EQ(s.finished[static_cast<std::size_t>(EngineFinish::kLength)],
            static_cast<std::uint64_t>(accepted) + 1);
}

TEST(Engine, RefusesAtOnceWhatCanNeverRun) {
  HashModel model(100);
  EngineOptions o;
  o.state_bytes = StateSize::Of(model.NewState()).At(64);
  auto engine = Start(model, o);
  Latch latch(1);
  const auto refused = [&](EngineRequest r) {
    const auto id = engine->Submit(std::move(r), Sink(latch));
    EXPECT_FALSE(id.ok());
    EXPECT_EQ(id.error().code, Code::kInvalidArgument);
    return id.message();
  };
  EXPECT_EQ(refused(Text(101, 1).Make(64)), "the prompt has 101 tokens, the context holds 100");
  EXPECT_NE(refused(Text(60, 1).Make(64)).find("the state of 76 tokens"), std::string::npos);
  EXPECT_EQ(engine->stats().refused_invalid, 2u);
  EXPECT_EQ(engine->context(), 100);
  EXPECT_EQ(engine->capacity(64), 1);
  EXPECT_EQ(engine->capacity(1), 1);

  class OtherVocabulary final : public TokenModel {
   public:
    std::int64_t vocab() const override { return 7; }
    std::int64_t max_positions() const override { return 9; }
    std::uint64_t fingerprint() const override { return 1; }
    MathMode math() const override { return MathMode::kExact; }
    ModelState NewState() const override { return {}; }
    Status Forward(std::span<const SequenceInput>, std::vector<float>&) override { return {}; }
  } other;
  EXPECT_EQ(Engine::Create(model, {}, &other).message(),
            "the draft model's vocabulary has 7 tokens, the model's 64");
  for (const auto& change : std::vector<std::function<void(EngineOptions&)>>{
           [](EngineOptions& e) { e.max_running = 0; }, [](EngineOptions& e) { e.context = -1; },
           [](EngineOptions& e) { e.state_bytes = 1; },
           [](EngineOptions& e) { e.cache_bytes = -1; },
           [](EngineOptions& e) { e.prefill_tokens_per_step = 0; },
           [](EngineOptions& e) { e.spill_dir = "/nonexistent/folder"; }}) {
    EngineOptions bad;
    change(bad);
    EXPECT_FALSE(Engine::Create(model, bad).ok());
  }
}

TEST(Engine, CancelFollowsWithinAStepAndTouchesNobodyElse) {
  HashModel model(1 << 20);
  std::atomic<int> passes{0};
  model.on_forward = [&] {
    ++passes;
    std::this_thread::sleep_for(milliseconds(1));
  };
  auto engine = Start(model);
  Latch first(1), other(1);
  auto sink = Sink(first);
  const auto id = engine->Submit(Text(10, 1, 1000000).Make(64), sink);
  const Plan plan = Text(10, 2, 100);
  auto kept = Sink(other);
  ASSERT_TRUE(engine->Submit(plan.Make(64), kept).ok());
  while (passes < 5) std::this_thread::yield();
  engine->Cancel(*id);
  ASSERT_TRUE(first.Wait());
  EXPECT_EQ(sink->result.finish, EngineFinish::kCancelled);
  ASSERT_TRUE(other.Wait());
  EXPECT_EQ(kept->tokens, PlainTokens(model, plan));
}

TEST(Engine, CancelFromTheSinkItself) {
  HashModel model;
  Latch latch(1);
  auto engine = Start(model);
  auto sink = Sink(latch);
  std::atomic<RequestId> id{0};
  sink->on_token = [&](CollectSink& s) {
    if (s.tokens.size() == 3) engine->Cancel(id);
    return true;
  };
  EngineRequest r = Text(10, 1, 4000).Make(64);
  r.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  // The id may arrive after the third token: then the deadline would end it.
  const auto got = engine->Submit(std::move(r), sink);
  id = *got;
  engine->Cancel(*got);
  ASSERT_TRUE(latch.Wait());
  EXPECT_EQ(sink->result.finish, EngineFinish::kCancelled);
}

TEST(Engine, DrainFinishesWhatWasAcceptedAndRefusesTheRest) {
  HashModel model;
  EngineOptions o;
  o.max_running = 2;
  auto engine = Start(model, o);
  Latch latch(10);
  std::vector<std::shared_ptr<CollectSink>> sinks;
  for (std::uint64_t i = 0; i < 10; ++i) {
    sinks.push_back(Sink(latch));
    ASSERT_TRUE(engine->Submit(Text(20, i, 30).Make(64), sinks.back()).ok());
  }
  engine->Drain(milliseconds(20000));
  for (const auto& s : sinks) EXPECT_EQ(s->result.finish, EngineFinish::kLength);
  const auto late = engine->Submit(Text(5, 1).Make(64), Sink(latch));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code, Code::kCancelled);
  EXPECT_EQ(late.message(), "the engine is shutting down");
  EXPECT_TRUE(engine->stats().draining);
  engine->Drain(milliseconds(0));
}

TEST(Engine, DrainWithoutTimeEndsEverythingOnce) {
  HashModel model(1 << 20);
  std::atomic<int> passes{0};
  model.on_forward = [&] {
    ++passes;
    std::this_thread::sleep_for(milliseconds(1));
  };
  EngineOptions o;
  o.max_running = 2;
  Latch latch(6);
  std::vector<std::shared_ptr<CollectSink>> sinks;
  {
    auto engine = Start(model, o);
    for (std::uint64_t i = 0; i < 6; ++i) {
      sinks.push_back(Sink(latch));
      ASSERT_TRUE(engine->Submit(Text(20, i, 1000000).Make(64), sinks.back()).ok());
    }
    while (passes < 3) std::this_thread::yield();
    engine->Drain(milliseconds(5));
  }
  ASSERT_TRUE(latch.Wait(milliseconds(0)));
  for (const auto& s : sinks) {
    EXPECT_EQ(s->finishes, 1);
    EXPECT_EQ(s->result.finish, EngineFinish::kShutdown);
  }
}

TEST(Engine, BytesStayFlatAndBudgetsHoldOverManyRequests) {
  HashModel model;
  const StateSize size = StateSize::Of(model.NewState());
  EngineOptions o;
  o.state_bytes = 6 * size.At(400);
  o.cache_bytes = 8 * size.At(400);
  o.max_waiting = 1000;
  auto engine = Start(model, o);
  Rng rng(9);
  Latch latch(500);
  std::vector<std::shared_ptr<CollectSink>> sinks;
  for (int i = 0; i < 500; ++i) {
    Plan p = test::RandomPlan(rng, 64, 300);
    p.priority = static_cast<int>(rng.Next() % 2);
    if (!sinks.empty() && rng.Next() % 2 == 0) p.prompt.resize(p.prompt.size() / 2 + 1);
    sinks.push_back(Sink(latch));
    const auto id = engine->Submit(p.Make(64), sinks.back());
    ASSERT_TRUE(id.ok()) << id.message();
    if (rng.Next() % 5 == 0) engine->Cancel(*id);
    const EngineStats s = engine->stats();
    ASSERT_LE(s.cache.bytes, o.cache_bytes);
    ASSERT_LE(s.cache.bytes + s.parked_bytes, o.cache_bytes);
    ASSERT_LE(s.state_bytes, o.state_bytes);
  }
  ASSERT_TRUE(latch.Wait());
  engine->Drain(milliseconds(1000));
  const EngineStats s = engine->stats();
  EXPECT_EQ(s.state_bytes + s.parked_bytes, 0);
  EXPECT_LE(s.cache.bytes, o.cache_bytes);
  EXPECT_GT(s.cache.evicted, 0u);
  std::uint64_t ends = 0;
  for (const std::uint64_t n : s.finished) ends += n;
  EXPECT_EQ(ends, 500u);
  for (const auto& sink : sinks) EXPECT_EQ(sink->finishes, 1);
}

}  // namespace
}  // namespace k3
