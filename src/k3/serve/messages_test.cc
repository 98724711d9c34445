#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "k3/serve/serve_test_util.h"

namespace k3::serve {
namespace {

using nlohmann::json;
using test::Fixture;

constexpr const char* kThoughtAndCall =
    "hm{close}think{sep}{open}response{sep}Let me look.{close}response{sep}"
    "{open}tools{sep}{open}call tool=\"look\" index=\"1\"{sep}"
    "{open}argument key=\"at\" type=\"string\"{sep}moon{close}argument{sep}{close}call{sep}"
    "{open}call tool=\"wait\" index=\"2\"{sep}{close}call{sep}"
    "{close}tools{sep}{close}message{sep}{end}";

json Body(json more = json::object()) {
  json body{{"max_tokens", 1000}, {"messages", {{{"role", "user"}, {"content", "hi"}}}}};
  body.update(more);
  return body;
}

json Thinking() {
  return {{"thinking", {{"type", "enabled"}, {"budget_tokens", 100}}},
          {"tools", {{{"name", "look"}, {"input_schema", json::object()}}, {{"name", "wait"}}}}};
}

TEST(Messages, ContentBlocksInOrder) {
  Fixture f;
  f.engine.script = kThoughtAndCall;
  f.engine.cached = 3;
  const json j = f.Post("/v1/messages", Body(Thinking()))->Json();
  ASSERT_EQ(j["content"].size(), 4u) << j;
  EXPECT_EQ(j["content"][0]["thinking"], "hm");
  EXPECT_EQ(j["content"][1]["text"], "Let me look.");
  EXPECT_EQ(j["content"][2]["input"], json({{"at", "moon"}}));
  EXPECT_EQ(j["content"][3]["name"], "wait");
  EXPECT_EQ(j["stop_reason"], "tool_use");
  EXPECT_EQ(j["usage"]["cache_read_input_tokens"], 3);
  EXPECT_EQ(j["usage"]["input_tokens"].get<std::size_t>() + 3, f.engine.requests[0].prompt.size());
}

/// Checks the order of events and gives the content blocks back, joined.
std::vector<json> Follow(const std::vector<json>& events) {
  std::vector<json> blocks;
  bool open = false, started = false, delta = false, stopped = false, signature = false;
  for (const json& e : events) {
    const std::string type = e["type"];
    EXPECT_FALSE(stopped);
    if (type == "message_start") {
      EXPECT_FALSE(started);
      started = true;
    } else if (type == "content_block_start") {
      EXPECT_TRUE(started && !open && !delta);
      EXPECT_EQ(e["index"], blocks.size());
      blocks.push_back(e["content_block"]);
      blocks.back()["joined"] = "";
      open = true;
      signature = false;
    } else if (type == "content_block_delta") {
      EXPECT_TRUE(open);
      EXPECT_EQ(e["index"], blocks.size() - 1);
      const std::string kind = e["delta"]["type"], block = blocks.back()["type"];
      const char* key = kind == "thinking_delta"    ? "thinking"
                        : kind == "text_delta"      ? "text"
                        : kind == "signature_delta" ? "signature"
                                                    : "partial_json";
      EXPECT_EQ(block, kind == "text_delta"         ? "text"
                       : kind == "input_json_delta" ? "tool_use"
                                                    : "thinking");
      signature |= kind == "signature_delta";
      if (kind != "signature_delta") {
        EXPECT_FALSE(signature);
        blocks.back()["joined"] =
            blocks.back()["joined"].get<std::string>() + e["delta"][key].get<std::string>();
      }
    } else if (type == "content_block_stop") {
      EXPECT_TRUE(open);
      EXPECT_EQ(signature, blocks.back()["type"] == "thinking");
      open = false;
    } else if (type == "message_delta") {
      EXPECT_TRUE(!open && !delta);
      delta = true;
      EXPECT_TRUE(e["delta"].contains("stop_reason") && e.contains("usage"));
    } else if (type == "message_stop") {
      EXPECT_TRUE(delta);
      stopped = true;
    } else {
      EXPECT_EQ(type, "ping");
    }
  }
  EXPECT_TRUE(stopped);
  return blocks;
}

TEST(Messages, StreamHasTheOrderOfEventsAndTheSameContent) {
  Fixture f;
  f.engine.script = kThoughtAndCall;
  json body = Body(Thinking());
  body["stream"] = true;
  const auto blocks = Follow(f.Post("/v1/messages", body)->Events());
  ASSERT_EQ(blocks.size(), 4u);
  EXPECT_EQ(blocks[0]["joined"], "hm");
  EXPECT_EQ(blocks[1]["joined"], "Let me look.");
  EXPECT_EQ(json::parse(blocks[2]["joined"].get<std::string>()), json({{"at", "moon"}}));
  EXPECT_EQ(blocks[3]["name"], "wait");
}

TEST(Messages, EmptyReplyIsACompleteStream) {
  Fixture f;
  f.engine.script = "{end}";
  EXPECT_TRUE(Follow(f.Post("/v1/messages", Body({{"stream", true}}))->Events()).empty());
}

TEST(Messages, StopSequenceIsNamed) {
  Fixture f;
  f.engine.script = "one two{end}";
  const json j = f.Post("/v1/messages", Body({{"stop_sequences", {"tw"}}}))->Json();
  EXPECT_EQ(j["stop_reason"], "stop_sequence");
  EXPECT_EQ(j["stop_sequence"], "tw");
  EXPECT_EQ(j["content"][0]["text"], "one ");
}

TEST(Messages, LimitIsMaxTokens) {
  Fixture f;
  f.engine.script = "one two";
  f.engine.end = EngineFinish::kLength;
  EXPECT_EQ(f.Post("/v1/messages", Body())->Json()["stop_reason"], "max_tokens");
}

TEST(Messages, HistoryWithToolsBecomesTheFormatOfTheModel) {
  Fixture f;
  f.engine.script = "{end}";
  const json messages = {
      {{"role", "user"}, {"content", {{{"type", "text"}, {"text", "Look."}}}}},
      {{"role", "assistant"},
       {"content",
        {{{"type", "thinking"}, {"thinking", "hm"}, {"signature", "s"}},
         {{"type", "tool_use"},
          {"id", "toolu_1"},
          {"name", "look"},
          {"input", {{"at", "moon"}}}}}}},
      {{"role", "user"},
       {"content",
        {{{"type", "tool_result"}, {"tool_use_id", "toolu_1"}, {"content", "round"}},
         {{"type", "text"}, {"text", "And?"}}}}}};
  const auto a = f.Post("/v1/messages", Body({{"messages", messages}, {"system", "S"}}));
  ASSERT_EQ(a->status, 200) << a->body;
  const std::string prompt = f.tokenizer.Decode(f.engine.requests[0].prompt);
  const auto system = prompt.find("role=\"system\""), call = prompt.find("call tool=\"look\""),
             result = prompt.find("round"), question = prompt.find("And?");
  EXPECT_TRUE(system < call && call < result && result < question && question != prompt.npos)
      << prompt;
}

TEST(Messages, TextThatDiffersForEveryRequestIsDropped) {
  Fixture f;
  f.engine.script = "{end}";
  for (const char* nonce : {"1", "2"}) {
    const json system = {
        {{"type", "text"}, {"text", std::string("x-anthropic-billing-header: ") + nonce}},
        {{"type", "text"}, {"text", "Be kind."}}};
    ASSERT_EQ(f.Post("/v1/messages", Body({{"system", system}}))->status, 200);
  }
  EXPECT_EQ(f.engine.requests[0].prompt, f.engine.requests[1].prompt);
}

TEST(Messages, CountTokensIsThePromptsLength) {
  Fixture f;
  f.engine.script = "{end}";
  const json j =
      f.Post("/v1/messages/count_tokens", {{"messages", {{{"role", "user"}, {"content", "hi"}}}}})
          ->Json();
  (void)f.Post("/v1/messages", Body());
  EXPECT_EQ(j["input_tokens"], f.engine.requests[0].prompt.size());
}

TEST(Messages, ErrorsHaveTheShapeOfTheDialect) {
  Fixture f;
  const auto expect = [&f](const json& body, const char* param) {
    const auto a = f.Post("/v1/messages", body);
    EXPECT_EQ(a->status, 400) << a->body;
    EXPECT_EQ(a->Json()["type"], "error");
    EXPECT_EQ(a->Json()["error"]["type"], "invalid_request_error");
    EXPECT_EQ(a->Json()["error"]["param"], param) << a->body;
  };
  expect({{"messages", {{{"role", "user"}, {"content", "hi"}}}}}, "max_tokens");
  expect(Body({{"messages", json::array()}}), "messages");
  expect(Body({{"messages", {{{"role", "system"}, {"content", "hi"}}}}}), "messages[0].role");
  expect(Body({{"messages", {nullptr}}}), "messages[0]");
  expect(Body({{"messages", {{{"role", "user"}, {"content", json::array()}}}}}),
         "messages[0].content");
  expect(Body({{"messages", {{{"role", "user"}, {"content", {{{"type", "image"}}}}}}}}),
         "messages[0].content[0].type");
  expect(Body({{"tool_choice", {{"type", "any"}}}}), "tool_choice");
  expect(Body({{"system", 5}}), "system");
  f.engine.refuse = Error{Code::kResource, "full"};
  EXPECT_EQ(f.Post("/v1/messages", Body({{"stream", true}}))->status, 429);
}

}  // namespace
}  // namespace k3::serve
