// From generated tokens to reasoning, answer and tool calls, piece by piece.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/chat/format.h"
#include "k3/chat/message.h"
#include "k3/chat/render.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::chat {

/// A piece of a tool call, as OpenAI streams them: `id` and `name` only in the first piece of a
/// call; `arguments` joined over all pieces is JSON text.
struct ToolCallDelta {
  std::size_t index = 0;
  std::string id, name, arguments;
  bool operator==(const ToolCallDelta&) const = default;
};

/// What one token made certain. Text is valid UTF-8.
struct ReplyDelta {
  std::string reasoning, content;
  std::vector<ToolCallDelta> tool_calls;
  bool empty() const { return reasoning.empty() && content.empty() && tool_calls.empty(); }
};

/// Elements of a reply that a prompt or the model can have opened.
enum class Section : std::uint8_t {
  kMessage,  // between elements
  kThink,
  kResponse,
  kTools,
  kCall,
  kArgument,
  kJson,
  kDone,  // the message is closed
};

/// Reads one reply. Only control tokens, known by id, are structure: ordinary text that spells one
/// is text. The joined deltas are the same however the reply is cut, and equal message().
///
/// Models slip, so this is tolerant: opening an element closes those it cannot stand in (a think
/// that was never closed, an argument before the next one); closing one closes what is open inside
/// it; an element nobody knows is ignored and its text belongs where it stands; text right in the
/// message, where no response was opened, is the answer; a tag cut off by the end is dropped, one
/// cut off by another control token ends there. A call without a tool name is dropped, as is the
/// second argument of one name. An argument whose text is not of its declared type is a string.
/// Text after the message was closed is dropped.
///
/// One thread; linear in the reply.
class ReplyParser {
 public:
  /// `inside` is the element that the prompt opened: kThink or kResponse. Tool calls get the ids
  /// PREFIX0, PREFIX1, ... The tokenizer outlives the parser.
  ReplyParser(const Tokenizer& tokenizer, const Markup& markup, Section inside,
              std::string call_id_prefix = "call_");
  ~ReplyParser();
  ReplyParser(ReplyParser&&) noexcept;
  ReplyParser& operator=(ReplyParser&&) noexcept;

  /// Control tokens other than the four of the format are dropped.
  ReplyDelta Push(TokenId id);
  /// Ordinary text, for replies that do not come as tokens.
  ReplyDelta PushText(std::string_view bytes);
  /// The reply is over. `ended`: the model ended it, so what is open is complete; otherwise it was
  /// cut off, and the arguments of an open call stay as far as they came.
  ReplyDelta Finish(bool ended);

  /// The reply so far: role, reasoning_content, content and tool_calls.
  const Message& message() const;
  /// "tool_calls" when it ended with calls, "stop", or "length" when it was cut off. After Finish.
  std::string_view finish_reason() const;
  /// The message was closed: nothing can follow.
  bool done() const;
  /// What still has to follow the reply's tokens so that the next message can come: the end of a
  /// tag that was begun, of every open element, an empty response where there was none. After
  /// Finish it is what it was before.
  std::vector<Segment> Closing() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3::chat
