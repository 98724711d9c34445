// The constants of the chat format: its control tokens, its fixed texts, and who speaks it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::chat {

inline constexpr std::string_view kOpen = "<|open|>";
inline constexpr std::string_view kClose = "<|close|>";
inline constexpr std::string_view kSep = "<|sep|>";
inline constexpr std::string_view kEnd = "<|end_of_msg|>";

/// Ids of the four control tokens.
struct Markup {
  TokenId open = 0, close = 0, sep = 0, end = 0;
};

/// nullopt unless the tokenizer has all four.
std::optional<Markup> FindMarkup(const Tokenizer& tokenizer);

/// English sentences with which the format tells the model about tools and the like. They belong to
/// the model's release and are read from its folder, not built in (docs/chat.md). "{}" stands for
/// what is filled in.
struct Bodies {
  std::string tool_declare;          // {}: the list of tools
  std::string tool_declare_dynamic;  // {}: the list of tools
  std::string thinking_effort;       // {}: low, medium, high or max
  std::string tool_choice_required;
  std::string tool_choice_none;
  std::string json_object;
  std::string json_schema;  // {}: the schema
};

inline constexpr std::string_view kBodiesFile = "chat_bodies.json";

/// One JSON object with exactly these keys, each a non-empty string with "{}" once where the list
/// above has it. `where` starts every message.
Result<Bodies> ParseBodies(std::string_view json, std::string_view where);
/// DIR/chat_bodies.json; nullopt when there is no such file.
Result<std::optional<Bodies>> LoadBodies(const std::string& dir);

/// Whether a model is to be talked to in the chat format. tokenizer_config.json of `dir` may say
/// so: "chat_format" is "xtml" or "none". Otherwise a model has it that has the four control tokens
/// and whose tokenizer does not say add_bos_token: text models are trained with BOS in front, the
/// chat format has none.
Result<bool> SpeaksChat(const Tokenizer& tokenizer, const std::string& dir);

}  // namespace k3::chat
