// The rows of tests/cases/kv that concern the engine, on the tiny model.
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "k3/io/json.h"
#include "k3/io/mapped_file.h"
#include "k3/model/model.h"
#include "k3/tokenizer/tokenizer.h"
#include "support/engine_fixtures.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using test::CollectSink;
using test::MakeCore;
using test::Plan;
using test::RunOn;

class KvCases : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string folder = std::string(K3_SOURCE_DIR) + "/tests/golden/tiny-k3";
    auto loaded = Model::Load(folder);
    ASSERT_TRUE(loaded.ok()) << loaded.message();
    loaded_ = std::move(*loaded);
    model_ = std::make_unique<ModelRunner>(*loaded_, exec_);
    auto tokenizer = Tokenizer::Load(folder);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.message();
    tokenizer_ = std::make_unique<Tokenizer>(std::move(*tokenizer));
  }
  nlohmann::json Case(const std::string& name) {
    const std::string path = std::string(K3_SOURCE_DIR) + "/tests/cases/kv/" + name;
    const auto text = ReadTextFile(path);
    EXPECT_TRUE(text.ok()) << text.message();
    auto json = ParseJson(text.value(), path);
    EXPECT_TRUE(json.ok()) << json.message();
    return json.value();
  }
  Plan Greedy(std::vector<TokenId> prompt, std::int64_t max_tokens = 24) {
    Plan p;
    p.prompt = std::move(prompt);
    p.max_tokens = max_tokens;
    p.sampling.temperature = 0;
    return p;
  }
  std::vector<TokenId> Ids(const std::string& text) const { return tokenizer_->Encode(text); }
  /// What a core that never saw anything says.
  std::vector<TokenId> Fresh(const Plan& plan) {
    EngineOptions o;
    o.prefix_cache = o.speculate = false;
    return RunOn(*MakeCore(*model_, o), {plan}, model_->vocab()).sinks[0]->tokens;
  }
  std::shared_ptr<CollectSink> Ask(EngineCore& core, const Plan& plan) {
    return RunOn(core, {plan}, model_->vocab()).sinks[0];
  }

  Exec exec_{2};
  std::unique_ptr<Model> loaded_;
  std::unique_ptr<ModelRunner> model_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(KvCases, Kv01And07TwoTurns) {
  const nlohmann::json c = Case("two_turns.json");
  for (const bool drafts : {false, true}) {
    EngineOptions o;
    o.speculate = drafts;
    o.adaptive_draft = false;
    auto core = MakeCore(*model_, o);
    Plan plan = Greedy(Ids(c["turns"][0][0]["content"].get<std::string>()));
    const auto first = Ask(*core, plan);
    EXPECT_EQ(first->tokens, Fresh(plan));
    const auto known = static_cast<std::int64_t>(plan.prompt.size() + first->tokens.size()) - 1;
    plan.prompt.insert(plan.prompt.end(), first->tokens.begin(), first->tokens.end());
    for (const TokenId t : Ids(c["turns"][2][0]["content"].get<std::string>()))
      plan.prompt.push_back(t);
    const auto second = Ask(*core, plan);
    EXPECT_EQ(second->tokens, Fresh(plan));
    EXPECT_EQ(second->cached, known) << "all but the last token of the first answer";
  }
}

TEST_F(KvCases, Kv02EditedInTheMiddle) {
  const nlohmann::json c = Case("edited_middle.json");
  auto core = MakeCore(*model_, EngineOptions());
  for (const auto& a : c["prompts"]) {
    for (const auto& b : c["prompts"]) {
      for (const auto* text : {&a, &b}) {
        const Plan plan = Greedy(Ids(text->get<std::string>()), 12);
        EXPECT_EQ(Ask(*core, plan)->tokens, Fresh(plan)) << *text;
      }
    }
  }
}

TEST_F(KvCases, Kv03And04SavedAndRestored) {
  const nlohmann::json c = Case("save_restore.json");
  const testing::TempDir dir;
  EngineOptions o;
  o.spill_dir = dir.path();
  const Plan prefix = Greedy(Ids(c["prefix"].get<std::string>()), 8);
  Plan longer = prefix, other = prefix;
  for (const TokenId t : Ids(c["suffix"].get<std::string>())) longer.prompt.push_back(t);
  for (const TokenId t : {5, 6, 7}) other.prompt.push_back(t);
  const auto length = static_cast<std::int64_t>(prefix.prompt.size());
  {
    auto core = MakeCore(*model_, o);
    (void)Ask(*core, prefix);
    core->SpillCache();
  }
  auto core = MakeCore(*model_, o);
  for (const Plan& plan : {longer, other}) {
    const auto sink = Ask(*core, plan);
    EXPECT_EQ(sink->cached, length);
    EXPECT_EQ(sink->tokens, Fresh(plan));
  }
  // A file that is gone costs time, not truth.
  auto again = MakeCore(*model_, o);
  for (const auto& e : std::filesystem::directory_iterator(dir.path())) {
    std::filesystem::remove(e.path());
  }
  const auto sink = Ask(*again, longer);
  EXPECT_EQ(sink->cached, 0);
  EXPECT_EQ(sink->tokens, Fresh(longer));
  EXPECT_GT(again->stats().cache.damaged, 0u);
}

TEST_F(KvCases, Kv05CancelThenAsk) {
  const nlohmann::json c = Case("cancel_then_ask.json");
  const Plan first = Greedy(Ids(c["first"]["messages"][0]["content"].get<std::string>()), 4000);
  const Plan second = Greedy(Ids(c["second"]["messages"][0]["content"].get<std::string>()));
  const auto want = Fresh(second);
  EngineOptions o;
  o.prefill_tokens_per_step = 8;
  auto core = MakeCore(*model_, o);
  for (int steps = 0; steps < 10; ++steps) {
    auto sink = std::make_shared<CollectSink>();
    auto s = core->NewSequence(first.Make(model_->vocab()), sink);
    s->id = 900000 + static_cast<RequestId>(steps);
    core->Add(std::move(s));
    for (int i = 0; i < steps; ++i) core->Step();
    core->Cancel(900000 + static_cast<RequestId>(steps));
    EXPECT_EQ(sink->result.finish, EngineFinish::kCancelled);
    EXPECT_EQ(Ask(*core, second)->tokens, want) << "cancelled after " << steps << " steps";
  }
}

TEST_F(KvCases, Kv06FillTheContext) {
  EngineOptions o;
  o.context = 64;
  auto core = MakeCore(*model_, o);
  const auto grows = Ask(*core, Greedy(Ids("Say something short."), 500));
  EXPECT_EQ(grows->result.finish, EngineFinish::kLength);
  EXPECT_EQ(grows->result.prompt_tokens + grows->result.completion_tokens, 64);
  std::vector<TokenId> words(65, 40);
  EXPECT_EQ(core->Check(Greedy(words).Make(model_->vocab())).message(),
            "the prompt has 65 tokens, the context holds 64");
  words.resize(64);
  EXPECT_EQ(Ask(*core, Greedy(words))->tokens.size(), 0u);
  words.resize(63);
  EXPECT_EQ(Ask(*core, Greedy(words))->tokens.size(), 1u);
  EXPECT_EQ(Ask(*core, Greedy(Ids("Say something short."), 4))->tokens.size(), 4u);
}

TEST_F(KvCases, Kv08SharedStart) {
  const nlohmann::json c = Case("shared_start.json");
  auto core = MakeCore(*model_, EngineOptions());
  const auto shared = Ids(c["shared"].get<std::string>());
  const auto start = static_cast<std::int64_t>(shared.size());
  bool first = true;
  for (const auto& end : c["ends"]) {
    Plan plan = Greedy(shared, 12);
    for (const TokenId t : Ids(end.get<std::string>())) plan.prompt.push_back(t);
    plan.snapshot_at = {start};
    const auto sink = Ask(*core, plan);
    EXPECT_EQ(sink->tokens, Fresh(plan)) << end;
    EXPECT_GE(sink->cached, first ? 0 : start);
    first = false;
  }
  // Where nobody said where texts part, the first that does shows it and the next one profits: the
  // second after "Question: ", the third at the end of the shared text.
  auto blind = MakeCore(*model_, EngineOptions());
  std::vector<std::int64_t> cached;
  for (const auto& end : c["ends"]) {
    Plan plan = Greedy(shared, 12);
    for (const TokenId t : Ids(end.get<std::string>())) plan.prompt.push_back(t);
    cached.push_back(Ask(*blind, plan)->cached);
  }
  EXPECT_EQ(cached[0], 0);
  EXPECT_GE(3 * cached[1], 2 * start);
  EXPECT_GE(cached[3], start);
  EXPECT_GT(cached[4], start);
}

}  // namespace
}  // namespace k3
