// A conversation and what is asked of its next reply, independent of any wire format.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace k3::chat {

enum class Role : std::uint8_t { kSystem, kUser, kAssistant, kTool };
std::string_view Name(Role role);  // "system", "user", "assistant", "tool"

struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;  // JSON text of an object as it arrived; other text is kept as it is
  bool operator==(const ToolCall&) const = default;
};

/// A tool the model may call: compact JSON with sorted keys, e.g. {"function":{...},"type":...}.
struct ToolDeclaration {
  std::string name;
  std::string json;
  bool operator==(const ToolDeclaration&) const = default;
};

/// All strings are UTF-8.
struct Message {
  Role role = Role::kUser;
  std::vector<std::string> content;    // text parts; their borders are kept when encoding
  std::string name;                    // system and user
  std::string reasoning_content;       // assistant
  std::vector<ToolCall> tool_calls;    // assistant
  std::string tool_call_id;            // tool
  std::vector<ToolDeclaration> tools;  // system: tools that join the conversation here
  bool operator==(const Message&) const = default;

  std::string Text() const {
    std::string text;
    for (const std::string& part : content) text += part;
    return text;
  }
};

enum class Effort : std::uint8_t { kLow, kMedium, kHigh, kMax };
std::string_view Name(Effort effort);
std::optional<Effort> ParseEffort(std::string_view name);
inline constexpr std::string_view kEffortNames = "low, medium, high, max";

enum class ToolChoice : std::uint8_t { kAuto, kNone, kRequired };
enum class ResponseFormat : std::uint8_t { kText, kJsonObject, kJsonSchema };

struct ChatOptions {
  std::vector<ToolDeclaration> tools;
  bool thinking = true;          // false: no think element anywhere
  std::optional<Effort> effort;  // absent: nothing is said about it; unused without thinking
  ToolChoice tool_choice = ToolChoice::kAuto;
  std::string forced_tool;  // tool_choice named this one; the prompt says only "required"
  ResponseFormat response_format = ResponseFormat::kText;
  std::string response_schema;    // kJsonSchema: compact JSON with sorted keys
  bool generation_prompt = true;  // open the assistant's turn at the end
};

}  // namespace k3::chat
