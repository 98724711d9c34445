// From messages to token ids (the XTML chat format, docs/chat.md).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/chat/format.h"
#include "k3/chat/message.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::chat {

/// A stretch of a prompt that is encoded by itself: its borders are part of the format. Markup is
/// the name of one control token; everything else is ordinary text, whatever it looks like, so
/// nobody who writes text can write structure.
struct Segment {
  std::string text;
  bool is_markup = false;
  bool operator==(const Segment&) const = default;
};

/// The prompt of the next reply. `bodies` may be null; then tools, effort, a tool choice and a
/// response format are refused (kUnsupported). Consecutive tool results are put into the order of
/// the calls they answer; one that answers no call of the assistant's last message is refused.
Result<std::vector<Segment>> Render(std::span<const Message> messages, const ChatOptions& options,
                                    const Bodies* bodies);

/// What opens the assistant's turn and its first element.
std::vector<Segment> GenerationPrompt(bool thinking);

/// Markup as its name, for people to read. Encoding this text gives other ids.
std::string Text(std::span<const Segment> segments);

/// Refuses markup that the tokenizer does not have.
Result<std::vector<TokenId>> Encode(std::span<const Segment> segments, const Tokenizer& tokenizer);

}  // namespace k3::chat
