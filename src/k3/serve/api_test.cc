#include "k3/serve/api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "k3/serve/serve_test_util.h"

namespace k3::serve {
namespace {

using nlohmann::json;
using test::Fixture;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kReply =
    "sure{close}think{sep}{open}response{sep}It is 4.{close}response{sep}"
    "{close}message{sep}{end}";

void ExpectError(const test::Answer& a, int status, const std::string& param) {
  EXPECT_EQ(a.status, status) << a.body;
  const json error = a.Json().at("error");
  EXPECT_TRUE(error.at("message").is_string() && error.at("type").is_string());
  EXPECT_TRUE(error.contains("code"));
  if (param.empty()) {
    EXPECT_TRUE(error.at("param").is_null() || error.at("param").is_string());
  } else {
    EXPECT_EQ(error.at("param"), param) << a.body;
  }
}

std::string Joined(const std::vector<json>& events, const char* key, std::size_t index = 0) {
  std::string text;
  for (const json& e : events) {
    for (const json& c : e["choices"]) {
      if (c["index"] != index) continue;
      const json& delta = c.contains("delta") ? c["delta"] : c;
      if (delta.contains(key) && delta[key].is_string()) text += delta[key].get<std::string>();
    }
  }
  return text;
}

TEST(Api, ChatGivesReasoningAnswerAndUsage) {
  Fixture f;
  f.engine.script = kReply;
  f.engine.cached = 5;
  const json j = f.Chat()->Json();
  const json& choice = j["choices"][0];
  EXPECT_EQ(choice["message"]["content"], "It is 4.");
  EXPECT_EQ(choice["message"]["reasoning_content"], "sure");
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(j["model"], "tiny");
  const json& usage = j["usage"];
  EXPECT_EQ(usage["prompt_tokens_details"]["cached_tokens"], 5);
  EXPECT_EQ(usage["total_tokens"],
            usage["prompt_tokens"].get<int>() + usage["completion_tokens"].get<int>());
  EXPECT_GT(usage["completion_tokens_details"]["reasoning_tokens"], 0);
}

TEST(Api, StreamedChatEqualsTheWholeOneAndHasTheExpectedChunks) {
  Fixture f;
  f.engine.script = kReply;
  const auto a = f.Chat({{"stream", true}, {"stream_options", {{"include_usage", true}}}});
  const auto events = a->Events();
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(Joined(events, "content"), "It is 4.");
  EXPECT_EQ(Joined(events, "reasoning_content"), "sure");
  EXPECT_EQ(events[0]["choices"][0]["delta"]["role"], "assistant");
  EXPECT_FALSE(events[1]["choices"][0]["delta"].contains("role"));
  const json& last = events.back();
  EXPECT_TRUE(last["choices"].empty() && last["usage"]["total_tokens"].is_number());
  for (std::size_t i = 0; i + 1 < events.size(); ++i) EXPECT_TRUE(events[i]["usage"].is_null());
  EXPECT_EQ(events[events.size() - 2]["choices"][0]["finish_reason"], "stop");
  EXPECT_TRUE(a->body.ends_with("data: [DONE]\n\n") && a->ended);
}

TEST(Api, WithoutIncludeUsageNoChunkHasUsage) {
  Fixture f;
  f.engine.script = kReply;
  const auto a = f.Chat({{"stream", true}});
  EXPECT_THAT(a->body, Not(HasSubstr("\"usage\"")));
}

TEST(Api, StopTextsAreHeldBackAcrossTokens) {
  for (const bool stream : {false, true}) {
    Fixture f(false);
    f.engine.script = "one two three{eos}";
    const auto a = f.Chat({{"stop", "two"}, {"stream", stream}});
    const std::string text = stream
                                 ? Joined(a->Events(), "content")
                                 : a->Json()["choices"][0]["message"]["content"].get<std::string>();
    EXPECT_EQ(text, "one ");
  }
}

TEST(Api, StopAtTheFirstTokenWithLogprobs) {
  Fixture f(false);
  f.engine.script = "xyz{eos}";
  const json j =
      f.Chat({{"stop", json::array({"x"})}, {"logprobs", true}, {"top_logprobs", 2}})->Json();
  EXPECT_EQ(j["choices"][0]["message"]["content"], "");
  EXPECT_EQ(j["choices"][0]["logprobs"]["content"], json::array());
  EXPECT_EQ(j["choices"][0]["finish_reason"], "stop");
}

TEST(Api, LogprobsNameEveryToken) {
  Fixture f(false);
  f.engine.script = "ab{eos}";
  const json whole = f.Chat({{"logprobs", true}, {"top_logprobs", 2}})->Json();
  const json& list = whole["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0]["token"], "a");
  EXPECT_EQ(list[0]["bytes"], json::array({97}));
  EXPECT_EQ(list[0]["top_logprobs"].size(), 2u);
  std::size_t n = 0;
  for (const json& e : f.Chat({{"logprobs", true}, {"stream", true}})->Events()) {
    const json& l = e["choices"][0]["logprobs"];
    if (l.is_object()) n += l["content"].size();
  }
  EXPECT_EQ(n, 2u);
}

TEST(Api, ToolCallsStreamAsPieces) {
  Fixture f;
  f.engine.script =
      "{close}think{sep}{open}tools{sep}{open}call tool=\"book\" index=\"1\"{sep}"
      "{open}argument key=\"city\" type=\"string\"{sep}Oslo{close}argument{sep}"
      "{open}argument key=\"n\" type=\"number\"{sep}3{close}argument{sep}"
      "{close}call{sep}{close}tools{sep}{close}message{sep}{end}";
  const json tools = {{{"type", "function"}, {"function", {{"name", "book"}}}}};
  const json message = f.Chat({{"tools", tools}})->Json()["choices"][0]["message"];
  const json arguments =
      json::parse(message["tool_calls"][0]["function"]["arguments"].get<std::string>());
  EXPECT_EQ(arguments, json({{"city", "Oslo"}, {"n", 3}}));
  EXPECT_TRUE(message["content"].is_null());
  std::string joined;
  int ids = 0;
  const auto events = f.Chat({{"tools", tools}, {"stream", true}})->Events();
  for (const json& e : events) {
    for (const json& call : e["choices"][0]["delta"].value("tool_calls", json::array())) {
      EXPECT_EQ(call["index"], 0);
      ids += call.contains("id");
      joined += call["function"]["arguments"].get<std::string>();
    }
  }
  EXPECT_EQ(ids, 1);
  EXPECT_EQ(json::parse(joined), arguments);
  EXPECT_EQ(events.back()["choices"][0]["finish_reason"], "tool_calls");
}

TEST(Api, SeveralChoicesHaveSeedsThatFollowFromOne) {
  Fixture f;
  f.engine.script = kReply;
  const json j = f.Chat({{"n", 3}, {"seed", 99}})->Json();
  ASSERT_EQ(j["choices"].size(), 3u);
  EXPECT_EQ(j["choices"][2]["index"], 2);
  EXPECT_EQ(f.engine.requests[0].sampling.seed, 99u);
  EXPECT_NE(f.engine.requests[1].sampling.seed, f.engine.requests[2].sampling.seed);
  EXPECT_EQ(j["usage"]["prompt_tokens"], f.engine.requests[0].prompt.size());
  (void)f.Chat({{"n", 3}, {"seed", 99}});
  EXPECT_EQ(f.engine.requests[1].sampling.seed, f.engine.requests[4].sampling.seed);
  (void)f.Chat();
  (void)f.Chat();
  EXPECT_NE(f.engine.requests[6].sampling.seed, f.engine.requests[7].sampling.seed);
}

TEST(Api, FieldsOutOfRangeAreNamed) {
  Fixture f;
  const auto expect = [&f](const char* key, const json& value, const char* param = nullptr) {
    const auto a = f.Chat({{key, value}, {"logprobs", true}});
    ExpectError(*a, 400, param != nullptr ? param : key);
  };
  expect("temperature", -1);
  expect("temperature", 1e9);
  expect("temperature", "hot");
  expect("top_p", 1.5);
  expect("n", 0);
  expect("n", 100000);
  expect("n", 4294967297);
  expect("max_tokens", 0);
  expect("max_tokens", -5);
  expect("max_tokens", 1e20);
  expect("max_tokens", "5");
  expect("max_completion_tokens", 2.5);
  expect("top_logprobs", 1000000);
  expect("logit_bias", {{"999999999", 1}});
  expect("logit_bias", {{"-3", 1}});
  expect("logit_bias", {{"x", 1}});
  expect("logit_bias", {{"5", 101}});
  expect("stop", 7);
  expect("stop", "");
  expect("stop", json::array({"a", ""}));
  expect("stop", json(std::vector<std::string>(17, "a")));
  expect("presence_penalty", 3);
  expect("response_format", {{"type", "poem"}}, "response_format.type");
  expect("reasoning_effort", "huge");
  expect("functions", json::array());
  expect("stream_options", {{"include_usage", true}});
  EXPECT_TRUE(f.engine.requests.empty());
  f.engine.script = kReply;
  EXPECT_EQ(f.Chat({{"logit_bias", json::object()},
                    {"stop", nullptr},
                    {"max_tokens", nullptr},
                    {"user", "x"},
                    {"unknown", {{"a", 1}}}})
                ->status,
            200);
}

TEST(Api, BadBodies) {
  Fixture f;
  const std::string deep(1000000, '[');
  for (const std::string& body : {std::string("{:1}"), std::string(""), std::string("[]"), deep,
                                  std::string("{\"messages\":\"\xc4\xe3\"}"),
                                  std::string("{\"a\":1,\"a\":2}"), std::string("null")}) {
    const auto a = f.Call("POST", "/v1/chat/completions", body);
    EXPECT_EQ(a->status, 400);
    EXPECT_NO_THROW(EXPECT_TRUE(a->Json()["error"]["message"].is_string()));
  }
  ExpectError(*f.Post("/v1/chat/completions", {{"messages", json::array()}, {"stream", true}}), 400,
              "messages");
}

TEST(Api, PromptLongerThanTheContextNamesBothNumbers) {
  Fixture f;
  const auto a = f.Chat({{"messages", {{{"role", "user"}, {"content", std::string(5000, 'x')}}}}});
  ExpectError(*a, 400, "messages");
  EXPECT_EQ(a->Json()["error"]["code"], "context_length_exceeded");
  EXPECT_THAT(a->body, HasSubstr("4000"));
}

TEST(Api, LimitBeyondTheContextIsClampedAndTold) {
  Fixture f(false);
  f.engine.script = "abc{eos}";
  const auto a = f.Chat({{"max_tokens", 100000}});
  EXPECT_EQ(f.engine.requests[0].max_tokens, 3998);
  EXPECT_EQ(a->Header("X-K3-Max-Tokens"), "3998");
}

TEST(Api, RefusedBeforeTheStreamBeginsGivesAStatus) {
  Fixture f;
  f.engine.refuse = Error{Code::kResource, "the queue is full"};
  auto a = f.Chat({{"stream", true}});
  ExpectError(*a, 429, "");
  EXPECT_EQ(a->Header("Retry-After"), "1");
  f.engine.refuse = Error{Code::kCancelled, "draining"};
  a = f.Chat();
  ExpectError(*a, 503, "");
  EXPECT_FALSE(a->Header("Retry-After").empty());
}

TEST(Api, ErrorOfTheEngine) {
  Fixture f(false);
  f.engine.end = EngineFinish::kError;
  f.engine.error = Error{Code::kNumeric, "a score is not finite"};
  f.engine.script = "";
  ExpectError(*f.Chat(), 500, "");
  ExpectError(*f.Chat({{"stream", true}}), 500, "");
  f.engine.script = "ab";
  const auto a = f.Chat({{"stream", true}});
  EXPECT_EQ(a->status, 200);
  EXPECT_EQ(a->Events().back()["error"]["code"], "numeric_error");
}

TEST(Api, ClientThatLeavesCancelsEveryChoice) {
  Fixture f;
  f.engine.hold = true;
  const auto a = f.Chat({{"n", 2}, {"stream", true}});
  EXPECT_EQ(f.api.jobs(), 1);
  ASSERT_TRUE(a->gone);
  a->closed = true;
  auto gone = std::move(a->gone);
  gone();
  EXPECT_EQ(f.engine.cancelled, (std::vector<RequestId>{1, 2}));
  EXPECT_TRUE(f.engine.sinks.empty());
  EXPECT_EQ(f.api.jobs(), 0);
}

TEST(Api, KeysAreNeededEverywhereButForHealth) {
  ApiOptions o;
  o.keys = {"one", "two"};
  Fixture f(true, o);
  ExpectError(*f.Call("GET", "/v1/models"), 401, "");
  EXPECT_EQ(f.Call("GET", "/v1/models")->Json()["error"]["type"], "authentication_error");
  ExpectError(*f.Call("GET", "/metrics"), 401, "");
  ExpectError(*f.Call("GET", "/nothing"), 401, "");
  EXPECT_EQ(f.Call("GET", "/")->status, 200) << "the page asks for the key itself";
  EXPECT_EQ(f.Call("GET", "/ui/chat.js")->status, 200);
  ExpectError(*f.Call("GET", "/v1/models", "", {{"authorization", "Bearer twos"}}), 401, "");
  EXPECT_EQ(f.Call("GET", "/v1/models", "", {{"authorization", "Bearer two"}})->status, 200);
  EXPECT_EQ(f.Call("GET", "/v1/models", "", {{"x-api-key", "one"}})->status, 200);
  EXPECT_EQ(f.Call("GET", "/health")->status, 200);
}

TEST(Api, CorsOnlyWhenAskedFor) {
  Fixture off;
  const HeaderList origin{{"origin", "http://page"},
                          {"access-control-request-headers", "authorization"}};
  EXPECT_EQ(off.Call("OPTIONS", "/v1/chat/completions", "", origin)
                ->Header("Access-Control-Allow-Origin"),
            "");
  EXPECT_EQ(off.Call("GET", "/nothing", "", origin)->Header("Access-Control-Allow-Origin"), "");
  ApiOptions o;
  o.cors_origin = "http://page";
  o.keys = {"k"};
  Fixture on(true, o);
  const auto a = on.Call("OPTIONS", "/v1/chat/completions", "", origin);
  EXPECT_EQ(a->status, 204);
  EXPECT_EQ(a->Header("Access-Control-Allow-Origin"), "http://page");
  EXPECT_THAT(a->Header("Access-Control-Allow-Headers"), HasSubstr("Authorization"));
  EXPECT_EQ(on.Call("GET", "/v1/models", "", origin)->Header("Access-Control-Allow-Origin"),
            "http://page");
}

TEST(Api, RoutesAndMethods) {
  Fixture f;
  ExpectError(*f.Call("GET", "/v1/nothing"), 404, "");
  const auto a = f.Call("GET", "/v1/chat/completions");
  ExpectError(*a, 405, "");
  EXPECT_EQ(a->Header("Allow"), "POST");
  ExpectError(*f.Post("/v1/embeddings", {{"input", "x"}}), 404, "");
  ExpectError(*f.Call("GET", "/v1/models/other"), 404, "model");
  EXPECT_EQ(f.Call("GET", "/v1/models/tiny")->Json()["id"], "tiny");
  EXPECT_EQ(f.Call("GET", "/v1/models")->Json()["data"].size(), 1u);
  ExpectError(*f.Call("GET", "/../../etc/passwd"), 404, "");
}

TEST(Api, LoadingAndDraining) {
  Fixture f;
  f.api.SetModel(nullptr);
  ExpectError(*f.Call("GET", "/health"), 503, "");
  ExpectError(*f.Chat(), 503, "");
  EXPECT_EQ(f.Call("GET", "/metrics")->status, 200);
  f.api.SetModel(f.model);
  EXPECT_EQ(f.Call("GET", "/ready")->status, 200);
  f.api.SetDraining();
  EXPECT_EQ(f.Call("GET", "/health")->status, 200);
  ExpectError(*f.Call("GET", "/ready"), 503, "");
  ExpectError(*f.Chat(), 503, "");
}

TEST(Api, StrictModelNames) {
  ApiOptions o;
  o.strict_model = true;
  Fixture f(true, o);
  f.engine.script = kReply;
  ExpectError(*f.Chat({{"model", "gpt"}}), 404, "model");
  EXPECT_EQ(f.Chat({{"model", "tiny"}})->status, 200);
}

TEST(Api, PromptThatNoTokensCouldFitIsRefusedUnread) {
  Fixture f(false);
  auto m = std::make_shared<ServedModel>(*f.model);
  m->longest_token = 10;
  f.api.SetModel(m);
  for (const std::size_t n : {40000u, 40001u}) {  // 4000 tokens of 10 bytes, if there were such
    const std::string text(n, 'a'), unread = n > 40000 ? "has at least 4001 " : "has 400";
    const json chat{{"messages", {{{"role", "user"}, {"content", text}}}}, {"max_tokens", 1}};
    const auto a = f.Post("/v1/completions", {{"prompt", text}});
    ExpectError(*a, 400, "prompt");
    const auto b = f.Post("/v1/chat/completions", chat);
    ExpectError(*b, 400, "messages");
    for (const auto& answer : {a, b, f.Post("/v1/messages", chat)}) {
      EXPECT_THAT(answer->body, HasSubstr(unread));
    }
    EXPECT_EQ(f.Post("/tokenize", {{"content", text}})->Json()["count"], n);  // needs no room
    EXPECT_EQ(f.Post("/v1/messages/count_tokens", chat)->Json()["input_tokens"], n);
  }
}

TEST(Api, SnapshotsAreAskedForWherePromptsPart) {
  Fixture f;
  f.engine.script = kReply;
  const json system{{"role", "system"}, {"content", "Be kind."}};
  const auto prompt = [&](const char* question) {
    (void)f.Chat({{"messages", {system, {{"role", "user"}, {"content", question}}}}});
    return f.engine.requests.back();
  };
  const auto a = prompt("One?"), b = prompt("Two?");
  ASSERT_FALSE(a.snapshot_at.empty());
  const auto common =
      std::mismatch(a.prompt.begin(), a.prompt.end(), b.prompt.begin()).first - a.prompt.begin();
  EXPECT_LE(a.snapshot_at.back(), common);
  EXPECT_GT(a.snapshot_at.back(), 8);
}

TEST(Api, CompletionsTakeEveryKindOfPrompt) {
  Fixture f;
  f.engine.script = "xy{eos}";
  for (const json& prompt : {json("ab"), json({97, 98})}) {
    const json j = f.Post("/v1/completions", {{"prompt", prompt}})->Json();
    EXPECT_EQ(j["choices"][0]["text"], "xy");
    EXPECT_EQ(f.engine.requests.back().prompt, (std::vector<TokenId>{97, 98}));
  }
  for (const json& prompt : {json({"a", "b"}), json({{97}, {98}})}) {
    EXPECT_EQ(f.Post("/v1/completions", {{"prompt", prompt}, {"n", 2}})->Json()["choices"].size(),
              4u);
  }
  for (const json& prompt :
       {json(), json(""), json::array(), json({-1}), json({261}), json({1.5}), json({{97}, 5}),
        json({{}}), json(std::vector<std::string>(129, "x"))}) {
    ExpectError(*f.Post("/v1/completions", {{"prompt", prompt}}), 400, "prompt");
  }
  ExpectError(*f.Post("/v1/completions", {{"prompt", "a"}, {"best_of", 3}}), 400, "best_of");
  ExpectError(*f.Post("/v1/completions", {{"prompt", "a"}, {"suffix", "x"}}), 400, "suffix");
}

TEST(Api, EchoWithLogprobsCountsLikeAnEvaluationHarness) {
  Fixture f;
  f.engine.script = "{eos}";
  const json j = f.Post("/v1/completions", {{"prompt", {97, 98, 99}},
                                            {"max_tokens", 1},
                                            {"echo", true},
                                            {"logprobs", 1},
                                            {"temperature", 0}})
                     ->Json();
  const json& l = j["choices"][0]["logprobs"];
  EXPECT_EQ(l["tokens"].size(), 4u);  // also when the one generated token ends the text
  EXPECT_TRUE(l["token_logprobs"][0].is_null());
  EXPECT_EQ(l["token_logprobs"][1], -0.5);
  EXPECT_EQ(l["top_logprobs"][1]["b"], -0.5);
  EXPECT_EQ(l["text_offset"], json({0, 1, 2, 3}));
  EXPECT_EQ(j["choices"][0]["text"], "abc");
}

TEST(Api, TokenizeDetokenizeTemplate) {
  Fixture f;
  EXPECT_EQ(f.Post("/tokenize", {{"content", "ab"}})->Json()["tokens"], json({97, 98}));
  EXPECT_EQ(f.Post("/detokenize", {{"tokens", {97, 98}}})->Json()["content"], "ab");
  ExpectError(*f.Post("/detokenize", {{"tokens", {-1}}}), 400, "tokens");
  ExpectError(*f.Post("/detokenize", json::object()), 400, "tokens");
  const json body{{"messages", {{{"role", "user"}, {"content", "hey"}}}}};
  EXPECT_EQ(f.Post("/apply-template", body)->Json()["prompt"],
            "<|open|>message role=\"user\"<|sep|>hey<|close|>message<|sep|><|end_of_msg|>"
            "<|open|>message role=\"assistant\"<|sep|><|open|>think<|sep|>");
  const auto invalid = f.Post("/detokenize", {{"tokens", {0xC3}}});
  EXPECT_EQ(invalid->Json()["content"], "\xEF\xBF\xBD");
}

TEST(Api, PlainModelsContinueTheirMessages) {
  Fixture f(false);
  f.engine.script = "more{eos}";
  (void)f.Chat({{"messages",
                 {{{"role", "system"}, {"content", "S"}},
                  {{"role", "user"}, {"content", "Q"}},
                  {{"role", "assistant"}, {"content", "A"}},
                  {{"role", "user"}, {"content", "R"}}}}});
  EXPECT_EQ(f.engine.requests[0].prompt, test::Ids("S\nQA\nR"));
  const json tools = {{{"type", "function"}, {"function", {{"name", "book"}}}}};
  ExpectError(*f.Chat({{"tools", tools}}), 400, "tools");
}

TEST(Api, MetricsPageListsWhatHappened) {
  Fixture f;
  f.engine.script = kReply;
  (void)f.Chat();
  const std::string page = f.Call("GET", "/metrics")->body;
  EXPECT_THAT(
      page,
      HasSubstr("k3_http_requests_total{endpoint=\"/v1/chat/completions\",status=\"200\"} 1"));
  EXPECT_THAT(page, HasSubstr("k3_requests_total{outcome=\"ok\"} 1"));
  EXPECT_THAT(page, HasSubstr("k3_memory_bytes{component=\"state\"}"));
}

TEST(Api, TokenizerInfoNamesTheEnds) {
  Fixture f;
  const auto answer = f.Call("GET", "/tokenizer_info");
  ASSERT_EQ(answer->status, 200);
  const auto info = answer->Json();
  EXPECT_EQ(info["eos_token"], f.tokenizer.Bytes(test::kEos).value());
  EXPECT_TRUE(info["bos_token"].is_null());
  EXPECT_EQ(info["vocab_size"], 261);
  EXPECT_EQ(info["model_max_length"], 4000);
}

TEST(FromEngine, GivesEachCodeItsStatus) {
  struct Case {
    Code code;
    int status;
    const char* word;
    int retry_after_s;
  };
  for (const Case& c :
       {Case{Code::kInvalidArgument, 400, "", 0}, Case{Code::kUnsupported, 400, "", 0},
        Case{Code::kResource, 429, "queue_full", 1}, Case{Code::kCancelled, 503, "draining", 5},
        Case{Code::kNumeric, 500, "numeric_error", 0}, Case{Code::kIo, 500, "", 0},
        Case{Code::kCorrupt, 500, "", 0}, Case{Code::kNotFound, 500, "", 0}}) {
    const ApiError e = FromEngine({c.code, "why"});
    EXPECT_EQ(e.status, c.status);
    EXPECT_EQ(e.code, c.word);
    EXPECT_EQ(e.retry_after_s, c.retry_after_s);
    EXPECT_EQ(e.message, "why");
  }
}

}  // namespace
}  // namespace k3::serve
