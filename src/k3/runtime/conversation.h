// A conversation with a model that is continued, taken back and tried again.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/chat/format.h"
#include "k3/chat/message.h"
#include "k3/runtime/generate.h"
#include "k3/runtime/sequence_state.h"
#include "k3/runtime/token_model.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {

struct ConversationOptions {
  GenerateOptions generate;  // in the chat format its stop strings are not used
  bool chat_format = true;   // false: plain text that the model continues
  bool thinking = true;      // chat format: let the model think first
  std::optional<chat::Effort> effort;
  std::optional<chat::Bodies> bodies;  // needed for effort
  std::optional<TokenId> bos;          // plain text: comes first
  std::uint64_t seed = 0;
  std::size_t snapshots = 8;  // turns that can be undone without reading the history again
};

/// Told while a reply is made. Either may be empty; an error ends the reply with that error.
struct ReplyEvents {
  std::function<void(std::int64_t done, std::int64_t total)> on_prefill;
  std::function<Status(std::string_view text)> on_reasoning;
  std::function<Status(std::string_view text)> on_content;
};

struct ConversationReply {
  FinishReason finish = FinishReason::kStop;
  std::vector<chat::ToolCall> tool_calls;
  std::size_t n_tokens = 0;
  std::int64_t prompt_tokens_read = 0;
};

/// The sequence holds the tokens that were really generated; the history is not encoded again. A
/// copy of the whole state is kept before each of the last turns, and one after the last question
/// was read: Undo and Retry go back to those. In fast mode Retry reads the last, incomplete piece
/// of the grid again. In plain text a line end goes between one turn and the next.
///
/// A reply that fails, or is cancelled before its first token, leaves the conversation as it was
/// before the question. `model` and `tokenizer` outlive this. One thread.
class Conversation {
 public:
  /// Refuses the chat format where the tokenizer lacks its tokens, and an effort in plain text.
  static Result<Conversation> Create(TokenModel& model, const Tokenizer& tokenizer,
                                     ConversationOptions options);

  Result<ConversationReply> Send(std::string_view text, const ReplyEvents& events);
  /// Answers the last question anew, with the random stream where it is now. An error when there is
  /// no question.
  Result<ConversationReply> Retry(const ReplyEvents& events);
  /// Takes back the last question and its reply; false when there is none.
  bool Undo();
  /// Forgets everything but the system text.
  Status Reset();
  /// Replaces the system text in front of the conversation, empty for none; what was said stays and
  /// is read again with the next question. Plain text has no system text.
  Status SetSystem(std::string_view text);
  /// Replaces everything; read with the next question. The last message may be an unanswered
  /// question, for Retry. Plain text takes texts of user and assistant only. On an error the
  /// conversation stays as it was.
  Status Load(std::vector<chat::Message> messages);

  const std::vector<chat::Message>& messages() const { return messages_; }
  std::size_t n_turns() const { return turns_.size(); }
  bool chat_format() const { return options_.chat_format; }
  const SequenceState& state() const { return state_; }

 private:
  /// From a user's message up to the next.
  struct Turn {
    std::size_t first_message = 0;
    std::optional<SequenceState> before;
  };

  Conversation(TokenModel& model, const Tokenizer& tokenizer, ConversationOptions options);
  Result<std::vector<TokenId>> TokensOf(std::span<const chat::Message> messages) const;
  Result<std::vector<TokenId>> ReplyPrompt() const;
  Status Rebuild();
  Status ReadAhead(const ReplyEvents& events);
  Result<ConversationReply> Answer(const ReplyEvents& events);
  Result<ConversationReply> Reply(const ReplyEvents& events);
  Result<ConversationReply> PlainReply(const ReplyEvents& events);
  Result<ConversationReply> ChatReply(const ReplyEvents& events);

  TokenModel* model_;
  const Tokenizer* tokenizer_;
  ConversationOptions options_;
  std::optional<chat::Markup> markup_;
  std::vector<chat::Message> messages_;
  std::deque<Turn> turns_;
  SequenceState state_;
  std::optional<SequenceState> ready_;  // the last question read, nothing answered
};

}  // namespace k3
