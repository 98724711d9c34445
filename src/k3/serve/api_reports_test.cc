// What went wrong in other servers of this family of models (tests/cases/COVERAGE.md), on the API.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <regex>

#include "k3/serve/serve_test_util.h"
#include "k3/serve/token_text.h"
#include "k3/tokenizer/utf8.h"

namespace k3::serve {
namespace {

using nlohmann::json;
using test::Fixture;
using ::testing::HasSubstr;

constexpr const char* kTwoCalls =
    "{close}think{sep}{open}tools{sep}"
    "{open}call tool=\"book\" index=\"1\"{sep}{open}argument key=\"city\" type=\"string\"{sep}"
    "Oslo{close}argument{sep}{close}call{sep}"
    "{open}call tool=\"wait\" index=\"2\"{sep}{close}call{sep}{close}tools{sep}"
    "{close}message{sep}{end}";

json TwoTools() {
  json list = json::array();
  for (const char* name : {"book", "wait"}) {
    list.push_back({{"type", "function"}, {"function", {{"name", name}}}});
  }
  return list;
}

std::string DeltaText(const std::vector<json>& events, const char* key) {
  std::string text;
  for (const json& e : events) {
    for (const json& c : e["choices"]) {
      if (c["delta"].contains(key)) text += c["delta"][key].get<std::string>();
    }
  }
  return text;
}

TEST(ApiReports, ThoughtsCutOffByTheLimitAreNoAnswer) {
  Fixture f;
  f.engine.script = "well, let me think";
  f.engine.end = EngineFinish::kLength;
  const json choice = f.Chat({{"max_tokens", 9}})->Json()["choices"][0];
  EXPECT_TRUE(choice["message"]["content"].is_null());
  EXPECT_EQ(choice["message"]["reasoning_content"], "well, let");
  EXPECT_EQ(choice["finish_reason"], "length");
  const auto events = f.Chat({{"max_tokens", 9}, {"stream", true}})->Events();
  EXPECT_EQ(DeltaText(events, "content"), "");
  EXPECT_EQ(DeltaText(events, "reasoning_content"), "well, let");
  EXPECT_EQ(events.back()["choices"][0]["finish_reason"], "length");
}

TEST(ApiReports, LogprobsThatAreNotFiniteAreNumbers) {
  const Tokenizer tokenizer = test::ChatTokenizer();
  const double low = -std::numeric_limits<double>::infinity();
  const json list =
      json::parse(Dump(ChatLogprobs({{97, low, {{97, low}, {98, std::nan("")}}}}, tokenizer)));
  EXPECT_EQ(list[0]["logprob"], -9999.0);
  for (const json& top : list[0]["top_logprobs"]) EXPECT_EQ(top["logprob"], -9999.0);
}

/// Clients rewrite ids; only that a result's is its call's means anything.
TEST(ApiReports, IdsOfCallsAreNamesAndClientsMayChooseOthers) {
  Fixture f;
  f.engine.script = kTwoCalls;
  const json message = f.Chat({{"tools", TwoTools()}})->Json()["choices"][0]["message"];
  ASSERT_EQ(message["tool_calls"].size(), 2u);
  for (const json& call : message["tool_calls"]) {
    EXPECT_TRUE(std::regex_match(call["id"].get<std::string>(), std::regex("[A-Za-z0-9_-]+")));
  }
  EXPECT_NE(message["tool_calls"][0]["id"], message["tool_calls"][1]["id"]);
  const auto prompt = [&](std::string first, std::string second) {
    json history = message;
    history["tool_calls"][0]["id"] = first;
    history["tool_calls"][1]["id"] = second;
    const json messages{{{"role", "user"}, {"content", "hi"}},
                        history,
                        {{"role", "tool"}, {"tool_call_id", second}, {"content", "waited"}},
                        {{"role", "tool"}, {"tool_call_id", first}, {"content", "booked"}}};
    const auto a = f.Chat({{"messages", messages}, {"tools", TwoTools()}});
    EXPECT_EQ(a->status, 200) << a->body;
    return f.tokenizer.Decode(f.engine.requests.back().prompt);
  };
  const std::string own =
      prompt(message["tool_calls"][0]["id"].get<std::string>(), message["tool_calls"][1]["id"]);
  EXPECT_EQ(own, prompt("functions_Bash_0", "functions_Bash_1"));
  EXPECT_EQ(own, prompt("functions.Bash:9", "7"));
  EXPECT_LT(own.find("booked"), own.find("waited")) << "in the order of the calls";
}

TEST(ApiReports, HistoryMayLackItsReasoning) {
  Fixture f;
  f.engine.script = "{end}";
  const auto length = [&f](const json& reasoning) {
    json answer{{"role", "assistant"}, {"content", "4"}};
    if (reasoning.is_string()) answer["reasoning_content"] = reasoning;
    const json messages{{{"role", "user"}, {"content", "2 + 2?"}},
                        answer,
                        {{"role", "user"}, {"content", "3 + 3?"}}};
    const auto a = f.Chat({{"messages", messages}});
    EXPECT_EQ(a->status, 200) << a->body;
    return a->Json()["usage"]["prompt_tokens"].get<std::size_t>();
  };
  EXPECT_EQ(length("easy"), length(json()) + 4);
  EXPECT_EQ(length(""), length(json()));
}

/// Every two bytes of which the first is no ASCII, with a letter after them.
TEST(ApiReports, AnyBytesAreStreamedAsWholeCharacters) {
  Fixture f(false);
  auto m = std::make_shared<ServedModel>(*f.model);
  m->context = 1 << 20;
  f.api.SetModel(m);
  for (unsigned first = 0x80; first < 0x100; ++first) {
    f.engine.script.clear();
    for (unsigned second = 0; second < 0x100; ++second) {
      f.engine.script += {static_cast<char>(first), static_cast<char>(second), 'a'};
    }
    const auto whole = f.Chat({{"max_tokens", 2000}});
    const auto stream = f.Chat({{"max_tokens", 2000}, {"stream", true}});
    EXPECT_EQ(utf8::ValidPrefix(stream->body), stream->body.size()) << first;
    const std::string text = whole->Json()["choices"][0]["message"]["content"];
    EXPECT_EQ(DeltaText(stream->Events(), "content"), text) << first;
    EXPECT_GE(text.size(), 512u) << first;
  }
}

TEST(ApiReports, TooLongPromptsAndTooManyLogprobsAreToldByNumber) {
  Fixture f;
  const json messages{{{"role", "user"}, {"content", std::string(5000, 'x')}}};
  const json prompt = f.Post("/tokenize", {{"messages", messages}})->Json();
  const auto a = f.Chat({{"messages", messages}});
  EXPECT_EQ(a->status, 400);
  EXPECT_THAT(a->body, HasSubstr(prompt["count"].dump() + " tokens"));
  EXPECT_THAT(a->body, HasSubstr("4000"));
  for (const int n : {-1, 21, 1000000}) {
    const auto b = f.Chat({{"logprobs", true}, {"top_logprobs", n}});
    EXPECT_EQ(b->status, 400);
    EXPECT_EQ(b->Json()["error"]["param"], "top_logprobs");
    EXPECT_THAT(b->body, HasSubstr("20"));
  }
}

TEST(ApiReports, ChoicesTogetherCountNoMoreThanThereIs) {
  Fixture f;
  f.engine.script = kTwoCalls;
  for (const std::int64_t cached : {0, 5, 1000000}) {
    f.engine.cached = cached;
    for (const int n : {1, 3}) {
      const json u = f.Chat({{"n", n}, {"tools", TwoTools()}})->Json()["usage"];
      const auto count = [&u](const char* key) { return u[key].get<std::int64_t>(); };
      EXPECT_EQ(count("total_tokens"), count("prompt_tokens") + count("completion_tokens"));
      EXPECT_LE(u["prompt_tokens_details"]["cached_tokens"], u["prompt_tokens"]);
      EXPECT_EQ(u["prompt_tokens_details"]["cached_tokens"], u["cached_tokens"]);
    }
  }
}

}  // namespace
}  // namespace k3::serve
