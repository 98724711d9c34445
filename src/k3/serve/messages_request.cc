// Anthropic's shape of a conversation, turned into OpenAI's and then read like one.
#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "k3/chat/openai.h"
#include "k3/serve/generation.h"

namespace k3::serve {
namespace {

using nlohmann::json;

const json& Get(const json& object, const char* key) {
  static const json null;
  const auto it = object.find(key);
  return it == object.end() ? null : *it;
}

bool IsText(const json& block) {
  return block.is_object() && Get(block, "type") == "text" && Get(block, "text").is_string();
}

/// A string, or a list of text blocks; other blocks are refused. A block that only says who pays,
/// different for every request, is dropped: it would make every prompt new.
ApiStatus ReadText(const json& content, const std::string& param, std::string& out) {
  if (content.is_string()) {
    out = content.get<std::string>();
    return {};
  }
  if (!content.is_array()) return BadField(param, "expected a string or a list of blocks");
  for (const json& block : content) {
    if (!IsText(block)) return BadField(param, "expected only text blocks");
    const auto& text = block["text"].get_ref<const std::string&>();
    if (!text.starts_with("x-anthropic-billing-header:")) out += text;
  }
  return {};
}

struct Turn {
  std::string text, reasoning;
  json calls = json::array();
  json results = json::array();  // messages of role tool
};

ApiStatus ReadResult(const json& block, const std::string& param, Turn& turn) {
  std::string text;
  if (const json& content = Get(block, "content"); !content.is_null()) {
    K3_API_TRY(ReadText(content, param + ".content", text));
  }
  turn.results.push_back(
      {{"role", "tool"}, {"tool_call_id", Get(block, "tool_use_id")}, {"content", text}});
  return {};
}

ApiStatus ReadBlock(const json& block, bool assistant, const std::string& param, Turn& turn) {
  if (!block.is_object()) return BadField(param, "expected an object");
  const json& type = Get(block, "type");
  if (IsText(block)) {
    turn.text += block["text"].get_ref<const std::string&>();
    return {};
  }
  if (assistant && type == "thinking" && Get(block, "thinking").is_string()) {
    turn.reasoning += block["thinking"].get_ref<const std::string&>();
    return {};
  }
  if (assistant && type == "redacted_thinking") return {};
  if (assistant && type == "tool_use") {
    turn.calls.push_back(
        {{"id", Get(block, "id")},
         {"type", "function"},
         {"function", {{"name", Get(block, "name")}, {"arguments", Get(block, "input")}}}});
    return {};
  }
  if (!assistant && type == "tool_result") return ReadResult(block, param, turn);
  return BadField(param + ".type",
                  fmt::format("found {}, expected {}", PrintableValue(type),
                              assistant ? "text, thinking or tool_use" : "text or tool_result"));
}

ApiStatus AddMessage(const json& m, const std::string& param, json& out) {
  if (!m.is_object()) return BadField(param, "expected an object");
  const bool assistant = Get(m, "role") == "assistant";
  if (!assistant && Get(m, "role") != "user") {
    return BadField(param + ".role", "expected user or assistant");
  }
  const json& content = Get(m, "content");
  Turn turn;
  if (content.is_string()) {
    turn.text = content.get<std::string>();
  } else {
    if (!content.is_array() || content.empty()) {
      return BadField(param + ".content", "expected a string or a list of blocks");
    }
    for (std::size_t i = 0; i < content.size(); ++i) {
      K3_API_TRY(ReadBlock(content[i], assistant, fmt::format("{}.content[{}]", param, i), turn));
    }
  }
  for (json& result : turn.results) out.push_back(std::move(result));
  const bool only_results = !turn.results.empty() && turn.text.empty();
  if (only_results) return {};
  json message{{"role", assistant ? "assistant" : "user"}, {"content", turn.text}};
  if (!turn.reasoning.empty()) message["reasoning_content"] = turn.reasoning;
  if (!turn.calls.empty()) message["tool_calls"] = std::move(turn.calls);
  out.push_back(std::move(message));
  return {};
}

ApiStatus AddTools(const json& body, json& out) {
  const json& tools = Get(body, "tools");
  if (!tools.is_null() && !tools.is_array()) return BadField("tools", "expected a list");
  for (std::size_t i = 0; i < tools.size(); ++i) {
    const json& t = tools[i];
    if (!t.is_object()) return BadField(fmt::format("tools[{}]", i), "expected an object");
    json function{{"name", Get(t, "name")}};
    if (t.contains("description")) function["description"] = t["description"];
    if (t.contains("input_schema")) function["parameters"] = t["input_schema"];
    out["tools"].push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  const json& choice = Get(body, "tool_choice");
  if (choice.is_null()) return {};
  if (!choice.is_object()) return BadField("tool_choice", "expected an object");
  if (const json& one = Get(choice, "disable_parallel_tool_use"); one.is_boolean()) {
    out["parallel_tool_calls"] = !one.get<bool>();
  }
  const json& type = Get(choice, "type");
  if (type == "auto" || type == "none") {
    out["tool_choice"] = type;
  } else if (type == "any") {
    out["tool_choice"] = "required";
  } else if (type == "tool") {
    out["tool_choice"] = {{"type", "function"}, {"function", {{"name", Get(choice, "name")}}}};
  } else {
    return BadField("tool_choice", "type: expected auto, any, tool or none");
  }
  return {};
}

ApiStatus Convert(const json& body, json& out) {
  const json& messages = Get(body, "messages");
  if (!messages.is_array() || messages.empty()) {
    return BadField("messages", "expected a list of at least one message");
  }
  out["messages"] = json::array();
  if (const json& system = Get(body, "system"); !system.is_null()) {
    std::string text;
    K3_API_TRY(ReadText(system, "system", text));
    if (!text.empty()) out["messages"].push_back({{"role", "system"}, {"content", text}});
  }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    K3_API_TRY(AddMessage(messages[i], fmt::format("messages[{}]", i), out["messages"]));
  }
  // Thinking is off unless asked for, as with the original.
  out["thinking"] = Get(body, "thinking");
  if (out["thinking"].is_null()) out["thinking"] = {{"type", "disabled"}};
  return AddTools(body, out);
}

}  // namespace

ApiStatus ReadMessages(const json& body, const ServedModel& model, bool counting, Generation& out) {
  json converted = json::object();
  K3_API_TRY(Convert(body, converted));
  std::vector<chat::Message> messages;
  K3_API_TRY(ReadChatFields(converted, model, messages, out.chat_options));
  const JsonReader r(body, "request");
  K3_API_TRY(ReadCommonFields(r, model, out));
  out.n = 1;
  out.stop.clear();
  K3_API_TRY(ReadStops(r, "stop_sequences", out.stop));
  if (!counting) {
    std::int64_t max_tokens = 0;
    K3_API_TRY(Take(r.Int("max_tokens", 1, std::numeric_limits<std::int32_t>::max()), "max_tokens",
                    max_tokens));
    out.max_tokens = max_tokens;
  }
  if (!counting) K3_API_TRY(CheckMessages(messages, model));
  K3_API_TRY(BuildChatPrompt(messages, model, out));
  return counting ? ApiStatus() : AddConstraint(converted, model, out);
}

}  // namespace k3::serve
