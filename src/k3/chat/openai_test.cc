#include "k3/chat/openai.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace k3::chat {
namespace {

using nlohmann::json;

std::string ParamOf(const std::string& messages) {
  std::vector<Message> out;
  const auto error = ParseMessages(json::parse(messages), out);
  if (error.has_value()) {
    EXPECT_EQ(error->message.find('\n'), std::string::npos);
    EXPECT_FALSE(error->message.empty());
  }
  return error.has_value() ? error->param : "ok";
}

TEST(ParseMessages, ErrorsNameThePlace) {
  const std::string user = R"({"role":"user","content":"q"},)";
  const std::pair<const char*, const char*> rows[] = {
      {"5", "messages"},
      {"{}", "messages"},
      {"[]", "messages"},
      {"[null]", "messages[0]"},
      {R"([{"content":"x"}])", "messages[0].role"},
      {R"([{"role":7,"content":"x"}])", "messages[0].role"},
      {R"([{"role":"oracle","content":"x"}])", "messages[0].role"},
      {R"([{"role":"user"}])", "messages[0].content"},
      {R"([{"role":"user","content":null}])", "messages[0].content"},
      {R"([{"role":"user","content":5}])", "messages[0].content"},
      {R"([{"role":"user","content":[]}])", "messages[0].content"},
      {R"([{"role":"user","content":["x"]}])", "messages[0].content[0]"},
      {R"([{"role":"user","content":[{"type":"smell"}]}])", "messages[0].content[0].type"},
      {R"([{"role":"user","content":[{"type":"image_url"}]}])", "messages[0].content[0].type"},
      {R"([{"role":"user","content":[{"type":"text"}]}])", "messages[0].content[0].text"},
      {R"([{"role":"user","content":"x","name":1}])", "messages[0].name"},
      {R"([{"role":"user","content":"x","tool_calls":[]}])", "messages[0].tool_calls"},
      {R"([{"role":"assistant","content":null}])", "ok"},
      {R"([{"role":"assistant","reasoning_content":1}])", "messages[0].reasoning_content"},
      {R"([{"role":"assistant","tool_calls":{}}])", "messages[0].tool_calls"},
      {R"([{"role":"assistant","tool_calls":[1]}])", "messages[0].tool_calls[0]"},
      {R"([{"role":"assistant","tool_calls":[{"id":"a"}]}])", "messages[0].tool_calls[0].function"},
      {R"([{"role":"assistant","tool_calls":[{"function":{"name":"f"}}]}])",
       "messages[0].tool_calls[0].id"},
      {R"([{"role":"assistant","tool_calls":[{"id":"a","function":{"name":""}}]}])",
       "messages[0].tool_calls[0].function.name"},
      {R"([{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"[]"}}]}])",
       "messages[0].tool_calls[0].function.arguments"},
      {R"([{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{"}}]}])",
       "ok"},
      {R"([{"role":"tool","tool_call_id":"a","content":"x"}])", "messages[0].tool_call_id"},
      {R"([{"role":"tool","content":"x"}])", "messages[0].tool_call_id"},
  };
  for (const auto& [messages, param] : rows) EXPECT_EQ(ParamOf(messages), param) << messages;
  EXPECT_EQ(ParamOf("[" + user + R"({"role":"user","content":[]}])"), "messages[1].content");
}

TEST(ParseMessages, ResultsAnswerCallsOnce) {
  const std::string calls =
      R"([{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f"}},)"
      R"({"id":"b","function":{"name":"g"}}]})";
  const auto result = [](const std::string& id) {
    return R"(,{"role":"tool","content":"r","tool_call_id":")" + id + "\"}";
  };
  EXPECT_EQ(ParamOf(calls + result("b") + result("a") + "]"), "ok");
  EXPECT_EQ(ParamOf(calls + result("b") + result("b") + "]"), "messages[2].tool_call_id");
  EXPECT_EQ(ParamOf(calls + R"(,{"role":"assistant","content":"x"})" + result("a") + "]"),
            "messages[2].tool_call_id");
}

TEST(ParseMessages, ServerBodies) {
  const std::pair<const char*, const char*> rows[] = {
      {"sv03_null_content", "ok"},
      {"sv04_empty_messages", "messages"},
      {"sv21_tool_order", "ok"},
      {"sv23_content_number", "messages[0].content"},
      {"sv23_empty_parts", "messages[0].content"},
      {"sv23_null_message", "messages[0]"},
      {"sv23_text_parts", "ok"},
      {"sv23_unknown_part", "messages[0].content[0].type"},
      {"sv23_unknown_role", "messages[0].role"},
  };
  for (const auto& [name, param] : rows) {
    std::ifstream in(std::string(K3_SOURCE_DIR "/tests/cases/server/bodies/") + name + ".json");
    const json body = json::parse(in);
    std::vector<Message> messages;
    ChatOptions options;
    const auto error = ParseChatFields(body, messages, options);
    EXPECT_EQ(error.has_value() ? error->param : "ok", param) << name;
  }
}

RequestStatus Fields(const std::string& fields, ChatOptions& options) {
  std::vector<Message> messages;
  return ParseChatFields(
      json::parse(R"({"messages":[{"role":"user","content":"q"}],)" + fields + "}"), messages,
      options);
}

TEST(ParseChatFields, ToolsChoiceFormatEffort) {
  const std::string tools =
      R"("tools":[{"type":"function","function":{"parameters":{"b":1,"a":2},"name":"f"}}],)";
  ChatOptions o;
  ASSERT_FALSE(Fields(tools + R"("tool_choice":{"type":"function","function":{"name":"f"}},)"
                              R"("reasoning_effort":"medium","response_format":)"
                              R"({"type":"json_schema","json_schema":{"schema":{"y":1,"x":[]}}})",
                      o));
  ASSERT_EQ(o.tools.size(), 1u);
  EXPECT_EQ(o.tools[0].json,
            R"({"function":{"name":"f","parameters":{"a":2,"b":1}},"type":"function"})");
  EXPECT_EQ(o.tool_choice, ToolChoice::kRequired);
  EXPECT_EQ(o.forced_tool, "f");
  EXPECT_EQ(o.effort, Effort::kMedium);
  EXPECT_EQ(o.response_schema, R"({"x":[],"y":1})");
  ChatOptions off;
  ASSERT_FALSE(Fields(R"("reasoning_effort":"none","tools":null)", off));
  EXPECT_FALSE(off.thinking);
  const std::pair<std::string, const char*> bad[] = {
      {R"("tools":{})", "tools"},
      {R"("tools":[{"type":"x"}])", "tools[0].type"},
      {R"("tools":[{"type":"function","function":{}}])", "tools[0].function.name"},
      {R"("tool_choice":"required")", "tool_choice"},
      {tools + R"("tool_choice":"maybe")", "tool_choice"},
      {tools + R"("tool_choice":{"type":"function","function":{"name":"g"}})",
       "tool_choice.function.name"},
      {R"("response_format":"json")", "response_format"},
      {R"("response_format":{"type":"yaml"})", "response_format.type"},
      {R"("response_format":{"type":"json_schema"})", "response_format.json_schema"},
      {R"("reasoning_effort":"huge")", "reasoning_effort"},
      {R"("reasoning_effort":3)", "reasoning_effort"},
  };
  for (const auto& [fields, param] : bad) {
    ChatOptions options;
    const auto error = Fields(fields, options);
    ASSERT_TRUE(error.has_value()) << fields;
    EXPECT_EQ(error->param, param) << fields;
  }
  ChatOptions huge;
  EXPECT_NE(Fields(R"("reasoning_effort":"huge")", huge)->message.find("low, medium, high, max"),
            std::string::npos);
}

TEST(MessagesText, ReadsBackTheSame) {
  std::vector<Message> messages(4);
  messages[0].role = Role::kSystem;
  messages[0].content = {"be brief"};
  messages[1].content = {"q \" é"};
  messages[1].name = "n";
  messages[2].role = Role::kAssistant;
  messages[2].content = {""};
  messages[2].reasoning_content = "hm";
  messages[2].tool_calls = {{"a", "f", "{\"x\": 1}"}};
  messages[3].role = Role::kTool;
  messages[3].tool_call_id = "a";
  messages[3].content = {"r"};
  std::vector<Message> back;
  ASSERT_FALSE(ParseMessages(json::parse(MessagesText(messages)), back));
  EXPECT_EQ(back, messages);
}

}  // namespace
}  // namespace k3::chat
