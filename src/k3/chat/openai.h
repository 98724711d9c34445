// Messages and chat options in the JSON shapes of the OpenAI API, from untrusted requests.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/chat/message.h"

namespace k3::chat {

/// A refused request: `param` names the place, e.g. "messages[1].content".
struct RequestError {
  Code code = Code::kInvalidArgument;
  std::string message;  // one line; does not repeat `param`
  std::string param;
};

/// nullopt is success.
using RequestStatus = std::optional<RequestError>;

/// A non-empty list of messages with the roles system, developer (read as system), user, assistant
/// and tool. Content is a string, a non-empty list of {"type":"text","text":...} or, from an
/// assistant, null. Checked besides: names of calls, arguments (a string or an object; a string
/// that is valid JSON must be an object), call ids (unique in their message), and that each tool
/// result answers, once, a call of the last assistant message. Reasoning is read from
/// reasoning_content or reasoning. Unknown keys are ignored; other parts (images, sound) are
/// refused as kUnsupported.
[[nodiscard]] RequestStatus ParseMessages(const nlohmann::json& messages,
                                          std::vector<Message>& out);

/// The fields of a chat request that shape its prompt: messages (required), tools, tool_choice
/// ("auto", "none", "required" or one function of tools), response_format (text, json_object,
/// json_schema) and reasoning_effort (low, medium, high, max; "none" turns thinking off). null
/// counts as absent. Other fields are the caller's.
[[nodiscard]] RequestStatus ParseChatFields(const nlohmann::json& request,
                                            std::vector<Message>& messages, ChatOptions& options);

/// The inverse of ParseMessages, for saving: text content is one string.
std::string MessagesText(std::span<const Message> messages);

}  // namespace k3::chat
