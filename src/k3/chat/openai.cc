#include "k3/chat/openai.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "k3/chat/json_text.h"
#include "k3/io/json.h"

namespace k3::chat {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxMessages = 1 << 16;
constexpr std::size_t kMaxTools = 1 << 12;

/// Returns early with the error of a RequestStatus expression.
#define K3_CHECK_REQUEST(expr)                                \
  do {                                                        \
    if (auto k3_error_ = (expr); k3_error_) return k3_error_; \
  } while (false)

RequestError Bad(std::string param, const json& found, std::string_view expected) {
  return {Code::kInvalidArgument,
          fmt::format("found {}, expected {}", PrintableValue(found), expected), std::move(param)};
}

RequestError Refuse(std::string param, std::string message) {
  return {Code::kInvalidArgument, std::move(message), std::move(param)};
}

/// The member, or null where it is absent.
const json& Get(const json& object, const char* key) {
  static const json null;
  const auto it = object.find(key);
  return it == object.end() ? null : *it;
}

/// An optional string; null is the empty one.
RequestStatus ReadString(const json& object, const char* key, const std::string& param,
                         std::string& out) {
  const json& value = Get(object, key);
  if (value.is_null()) return {};
  if (!value.is_string()) return Bad(param + "." + key, value, "a string");
  out = value.get<std::string>();
  return {};
}

RequestStatus ReadName(const json& object, const char* key, const std::string& param,
                       std::string& out) {
  K3_CHECK_REQUEST(ReadString(object, key, param, out));
  if (out.empty()) return Refuse(param + "." + key, "expected a string that is not empty");
  return {};
}

RequestStatus ReadPart(const json& part, const std::string& param, std::string& out) {
  if (!part.is_object()) return Bad(param, part, "an object");
  const json& type = Get(part, "type");
  if (type == "image" || type == "image_url" || type == "input_audio" || type == "file") {
    return RequestError{Code::kUnsupported,
                        fmt::format("parts of type {} are not supported", type.get<std::string>()),
                        param + ".type"};
  }
  if (type != "text") return Bad(param + ".type", type, "\"text\"");
  const json& text = Get(part, "text");
  if (!text.is_string()) return Bad(param + ".text", text, "a string");
  out = text.get<std::string>();
  return {};
}

RequestStatus ReadContent(const json& m, const std::string& message_param, Message& out) {
  const std::string param = message_param + ".content";
  const json& content = Get(m, "content");
  if (content.is_string()) {
    out.content = {content.get<std::string>()};
    return {};
  }
  const bool optional = out.role == Role::kAssistant || !out.tools.empty();
  if (content.is_null() && optional) return {};
  if (!content.is_array()) return Bad(param, content, "a string or a list of parts");
  if (content.empty()) return Bad(param, content, "a list with at least one part");
  for (std::size_t i = 0; i < content.size(); ++i) {
    K3_CHECK_REQUEST(
        ReadPart(content[i], fmt::format("{}[{}]", param, i), out.content.emplace_back()));
  }
  return {};
}

RequestStatus ReadArguments(const json& function, const std::string& function_param,
                            std::string& out) {
  const std::string param = function_param + ".arguments";
  const json& value = Get(function, "arguments");
  if (value.is_null()) return {};
  if (value.is_object()) {
    out = JsonText(value, JsonStyle::kCompact);
    return {};
  }
  if (!value.is_string()) return Bad(param, value, "a string or an object");
  out = value.get<std::string>();
  const auto parsed = ParseJson(out, "arguments");
  if (parsed.ok() && !parsed->is_object()) return Bad(param, value, "the text of a JSON object");
  return {};
}

RequestStatus ReadCalls(const json& m, const std::string& message_param, Message& out) {
  const std::string param = message_param + ".tool_calls";
  const json& calls = Get(m, "tool_calls");
  if (calls.is_null()) return {};
  if (!calls.is_array()) return Bad(param, calls, "a list");
  if (out.role != Role::kAssistant) {
    return Refuse(param, "only messages of the assistant have tool calls");
  }
  std::set<std::string> ids;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", param, i);
    ToolCall& call = out.tool_calls.emplace_back();
    if (!calls[i].is_object()) return Bad(at, calls[i], "an object");
    K3_CHECK_REQUEST(ReadName(calls[i], "id", at, call.id));
    if (!ids.insert(call.id).second) {
      return Refuse(at + ".id", fmt::format("\"{}\" is there twice", Printable(call.id)));
    }
    const json& type = Get(calls[i], "type");
    if (!type.is_null() && type != "function") return Bad(at + ".type", type, "\"function\"");
    const json& function = Get(calls[i], "function");
    if (!function.is_object()) return Bad(at + ".function", function, "an object");
    K3_CHECK_REQUEST(ReadName(function, "name", at + ".function", call.name));
    K3_CHECK_REQUEST(ReadArguments(function, at + ".function", call.arguments));
  }
  return {};
}

RequestStatus ReadTools(const json& tools, const std::string& param,
                        std::vector<ToolDeclaration>& out) {
  if (tools.is_null()) return {};
  if (!tools.is_array()) return Bad(param, tools, "a list");
  if (tools.size() > kMaxTools) {
    return Refuse(param,
                  fmt::format("found {} tools, expected at most {}", tools.size(), kMaxTools));
  }
  std::set<std::string> names;
  for (std::size_t i = 0; i < tools.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", param, i);
    if (!tools[i].is_object()) return Bad(at, tools[i], "an object");
    const json& type = Get(tools[i], "type");
    if (type != "function") return Bad(at + ".type", type, "\"function\"");
    const json& function = Get(tools[i], "function");
    if (!function.is_object()) return Bad(at + ".function", function, "an object");
    ToolDeclaration& tool = out.emplace_back();
    K3_CHECK_REQUEST(ReadName(function, "name", at + ".function", tool.name));
    if (!names.insert(tool.name).second) {
      return Refuse(at + ".function.name",
                    fmt::format("\"{}\" is there twice", Printable(tool.name)));
    }
    const json& parameters = Get(function, "parameters");
    if (!parameters.is_null() && !parameters.is_object()) {
      return Bad(at + ".function.parameters", parameters, "an object");
    }
    tool.json = JsonText(tools[i], JsonStyle::kCompact);
  }
  return {};
}

std::optional<Role> RoleOf(const json& name) {
  if (name == "system" || name == "developer") return Role::kSystem;
  if (name == "user") return Role::kUser;
  if (name == "assistant") return Role::kAssistant;
  if (name == "tool") return Role::kTool;
  return std::nullopt;
}

/// The calls that the next tool results may answer.
struct OpenCalls {
  std::set<std::string> ids;

  RequestStatus Answer(const Message& m, const std::string& param) {
    if (ids.erase(m.tool_call_id) == 1) return {};
    return Refuse(param + ".tool_call_id",
                  fmt::format("\"{}\" is no unanswered call of the assistant's message before it",
                              Printable(m.tool_call_id)));
  }
};

RequestStatus ReadMessage(const json& m, const std::string& param, OpenCalls& open, Message& out) {
  if (!m.is_object()) return Bad(param, m, "an object");
  const json& role = Get(m, "role");
  const auto known = RoleOf(role);
  if (!known.has_value()) {
    return Bad(param + ".role", role, "system, developer, user, assistant or tool");
  }
  out.role = *known;
  if (out.role == Role::kSystem) {
    K3_CHECK_REQUEST(ReadTools(Get(m, "tools"), param + ".tools", out.tools));
  }
  K3_CHECK_REQUEST(ReadContent(m, param, out));
  if (!out.tools.empty() && !out.Text().empty()) {
    return Refuse(param + ".content", "a system message has either tools or content");
  }
  K3_CHECK_REQUEST(ReadString(m, "name", param, out.name));
  K3_CHECK_REQUEST(ReadCalls(m, param, out));
  if (out.role == Role::kAssistant) {
    K3_CHECK_REQUEST(ReadString(m, "reasoning_content", param, out.reasoning_content));
    if (out.reasoning_content.empty()) {
      K3_CHECK_REQUEST(ReadString(m, "reasoning", param, out.reasoning_content));
    }
    open.ids.clear();
    for (const ToolCall& call : out.tool_calls) open.ids.insert(call.id);
  }
  if (out.role == Role::kTool) {
    K3_CHECK_REQUEST(ReadName(m, "tool_call_id", param, out.tool_call_id));
    return open.Answer(out, param);
  }
  return {};
}

RequestStatus ReadToolChoice(const json& choice, ChatOptions& out) {
  if (choice.is_null() || choice == "auto") return {};
  if (choice == "none") {
    out.tool_choice = ToolChoice::kNone;
    return {};
  }
  if (out.tools.empty()) return Refuse("tool_choice", "needs tools");
  out.tool_choice = ToolChoice::kRequired;
  if (choice == "required") return {};
  if (!choice.is_object() || Get(choice, "type") != "function" ||
      !Get(choice, "function").is_object()) {
    return Bad("tool_choice", choice, "\"auto\", \"none\", \"required\" or a function");
  }
  K3_CHECK_REQUEST(
      ReadName(Get(choice, "function"), "name", "tool_choice.function", out.forced_tool));
  for (const ToolDeclaration& tool : out.tools) {
    if (tool.name == out.forced_tool) return {};
  }
  return Refuse("tool_choice.function.name",
                fmt::format("\"{}\" is not among the tools", Printable(out.forced_tool)));
}

RequestStatus ReadResponseFormat(const json& format, ChatOptions& out) {
  if (format.is_null()) return {};
  if (!format.is_object()) return Bad("response_format", format, "an object");
  const json& type = Get(format, "type");
  if (type == "text") return {};
  if (type == "json_object") {
    out.response_format = ResponseFormat::kJsonObject;
    return {};
  }
  if (type != "json_schema") {
    return Bad("response_format.type", type, "\"text\", \"json_object\" or \"json_schema\"");
  }
  const json& description = Get(format, "json_schema");
  if (!description.is_object()) {
    return Bad("response_format.json_schema", description, "an object");
  }
  const json& schema = Get(description, "schema");
  if (!schema.is_object()) {
    return Bad("response_format.json_schema.schema", schema, "an object");
  }
  out.response_format = ResponseFormat::kJsonSchema;
  out.response_schema = JsonText(schema, JsonStyle::kCompact);
  return {};
}

RequestStatus ReadEffort(const json& effort, ChatOptions& out) {
  if (effort.is_null()) return {};
  if (effort == "none") {
    out.thinking = false;
    return {};
  }
  if (effort.is_string()) out.effort = ParseEffort(effort.get_ref<const std::string&>());
  if (!out.effort.has_value()) {
    return Bad("reasoning_effort", effort, fmt::format("none, {}", kEffortNames));
  }
  return {};
}

nlohmann::ordered_json ToJson(const Message& m) {
  nlohmann::ordered_json j{{"role", Name(m.role)}, {"content", m.Text()}};
  if (!m.name.empty()) j["name"] = m.name;
  if (!m.reasoning_content.empty()) j["reasoning_content"] = m.reasoning_content;
  if (!m.tool_call_id.empty()) j["tool_call_id"] = m.tool_call_id;
  for (const ToolCall& c : m.tool_calls) {
    j["tool_calls"].push_back({{"id", c.id},
                               {"type", "function"},
                               {"function", {{"name", c.name}, {"arguments", c.arguments}}}});
  }
  for (const ToolDeclaration& t : m.tools) {
    j["tools"].push_back(nlohmann::ordered_json::parse(t.json, nullptr, false));
  }
  return j;
}

}  // namespace

RequestStatus ParseMessages(const json& messages, std::vector<Message>& out) {
  out.clear();
  if (!messages.is_array()) return Bad("messages", messages, "a list");
  if (messages.empty()) return Bad("messages", messages, "at least one message");
  if (messages.size() > kMaxMessages) {
    return Refuse("messages",
                  fmt::format("found {}, expected at most {}", messages.size(), kMaxMessages));
  }
  OpenCalls open;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    K3_CHECK_REQUEST(
        ReadMessage(messages[i], fmt::format("messages[{}]", i), open, out.emplace_back()));
  }
  return {};
}

RequestStatus ParseChatFields(const json& request, std::vector<Message>& messages,
                              ChatOptions& options) {
  if (!request.is_object()) return Bad("", request, "an object");
  K3_CHECK_REQUEST(ParseMessages(Get(request, "messages"), messages));
  K3_CHECK_REQUEST(ReadTools(Get(request, "tools"), "tools", options.tools));
  K3_CHECK_REQUEST(ReadToolChoice(Get(request, "tool_choice"), options));
  K3_CHECK_REQUEST(ReadResponseFormat(Get(request, "response_format"), options));
  return ReadEffort(Get(request, "reasoning_effort"), options);
}

std::string MessagesText(std::span<const Message> messages) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Message& m : messages) list.push_back(ToJson(m));
  return list.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace k3::chat
