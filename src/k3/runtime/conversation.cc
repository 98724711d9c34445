#include "k3/runtime/conversation.h"

#include <fmt/format.h>

#include <utility>

#include "k3/chat/parse.h"
#include "k3/chat/render.h"

namespace k3 {
namespace {

chat::Message TextMessage(chat::Role role, std::string_view text) {
  chat::Message m;
  m.role = role;
  if (!text.empty()) m.content.emplace_back(text);
  return m;
}

Status Tell(const std::function<Status(std::string_view)>& listener, std::string_view text) {
  return text.empty() || !listener ? Status() : listener(text);
}

/// No token of a reply was made.
bool Nothing(const Result<ConversationReply>& reply) {
  return !reply.ok() || (reply->finish == FinishReason::kCancelled && reply->n_tokens == 0);
}

/// Plain text has no place for what only the chat format can say.
Status CheckPlain(std::span<const chat::Message> messages) {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const chat::Message& m = messages[i];
    const bool talk = m.role == chat::Role::kUser || m.role == chat::Role::kAssistant;
    if (talk && m.tool_calls.empty()) continue;
    return Error{Code::kUnsupported,
                 fmt::format("messages[{}]: found a {}, expected texts of user and assistant: the "
                             "rest needs the chat format",
                             i, talk ? "tool call" : fmt::format("{} message", Name(m.role)))};
  }
  return {};
}

}  // namespace

Conversation::Conversation(TokenModel& model, const Tokenizer& tokenizer,
                           ConversationOptions options)
    : model_(&model),
      tokenizer_(&tokenizer),
      options_(std::move(options)),
      markup_(chat::FindMarkup(tokenizer)),
      state_(NewSequence(model, options_.seed)) {}

Result<Conversation> Conversation::Create(TokenModel& model, const Tokenizer& tokenizer,
                                          ConversationOptions options) {
  Conversation c(model, tokenizer, std::move(options));
  if (c.options_.chat_format) {
    if (!c.markup_.has_value()) {
      return Error{Code::kUnsupported, "the tokenizer lacks the control tokens of the chat format"};
    }
    c.options_.generate.eos.push_back(c.markup_->end);
    c.options_.generate.stop.clear();
  } else if (c.options_.effort.has_value()) {
    return Error{Code::kUnsupported,
                 "plain text has no thinking effort: that needs the chat format"};
  }
  K3_TRY(c.Rebuild());
  return c;
}

/// Tokens of messages in the middle of a conversation; what they need stands among them.
Result<std::vector<TokenId>> Conversation::TokensOf(std::span<const chat::Message> messages) const {
  if (options_.chat_format) {
    chat::ChatOptions o;
    o.thinking = options_.thinking;
    o.generation_prompt = false;
    K3_ASSIGN(const auto segments, chat::Render(messages, o, nullptr));
    return chat::Encode(segments, *tokenizer_);
  }
  std::vector<TokenId> ids;
  for (const chat::Message& m : messages) {
    const bool starts = m.role == chat::Role::kUser && &m != messages_.data();
    std::string text = m.Text();
    if (starts) text.insert(text.begin(), '\n');
    const auto part = tokenizer_->Encode(text);
    ids.insert(ids.end(), part.begin(), part.end());
  }
  return ids;
}

Result<std::vector<TokenId>> Conversation::ReplyPrompt() const {
  if (!options_.chat_format) return std::vector<TokenId>();
  return chat::Encode(chat::GenerationPrompt(options_.thinking), *tokenizer_);
}

/// The state from the messages alone: all of it pending, no snapshot.
Status Conversation::Rebuild() {
  SequenceState fresh = NewSequence(*model_, 0);
  fresh.sampler.set_rng_state(state_.sampler.rng_state());
  if (options_.chat_format && options_.effort.has_value() && options_.thinking) {
    chat::ChatOptions o;
    o.effort = options_.effort;
    o.generation_prompt = false;
    K3_ASSIGN(const auto segments,
              chat::Render({}, o, options_.bodies.has_value() ? &*options_.bodies : nullptr));
    K3_ASSIGN(const auto ids, chat::Encode(segments, *tokenizer_));
    AppendPrompt(fresh, ids);
  }
  if (!options_.chat_format && options_.bos.has_value()) {
    AppendPrompt(fresh, std::span(&*options_.bos, 1));
  }
  K3_ASSIGN(const auto ids, TokensOf(messages_));
  AppendPrompt(fresh, ids);
  turns_.clear();
  for (std::size_t i = 0; i < messages_.size(); ++i) {
    if (messages_[i].role == chat::Role::kUser) turns_.push_back({i, std::nullopt});
  }
  state_ = std::move(fresh);
  ready_.reset();
  return {};
}

Status Conversation::Reset() {
  const bool has_system = !messages_.empty() && messages_[0].role == chat::Role::kSystem;
  messages_.resize(has_system ? 1 : 0);
  return Rebuild();
}

Status Conversation::SetSystem(std::string_view text) {
  if (!options_.chat_format) {
    return Error{Code::kUnsupported, "plain text has no system text: that needs the chat format"};
  }
  if (!messages_.empty() && messages_[0].role == chat::Role::kSystem) {
    messages_.erase(messages_.begin());
  }
  if (!text.empty()) messages_.insert(messages_.begin(), TextMessage(chat::Role::kSystem, text));
  return Rebuild();
}

Status Conversation::Load(std::vector<chat::Message> messages) {
  if (!options_.chat_format) K3_TRY(CheckPlain(messages));
  std::swap(messages_, messages);
  const Status rebuilt = Rebuild();
  if (!rebuilt.ok()) std::swap(messages_, messages);
  return rebuilt;
}

bool Conversation::Undo() {
  if (turns_.empty()) return false;
  Turn turn = std::move(turns_.back());
  turns_.pop_back();
  messages_.resize(turn.first_message);
  ready_.reset();
  if (turn.before.has_value()) {
    const auto stream = state_.sampler.rng_state();
    state_ = std::move(*turn.before);
    state_.sampler.set_rng_state(stream);
    return true;
  }
  return Rebuild().ok();
}

Result<ConversationReply> Conversation::Send(std::string_view text, const ReplyEvents& events) {
  turns_.push_back({messages_.size(), state_});
  if (turns_.size() > options_.snapshots) {
    turns_[turns_.size() - options_.snapshots - 1].before.reset();
  }
  messages_.push_back(TextMessage(chat::Role::kUser, text));
  ready_.reset();
  auto ids = TokensOf(std::span(messages_).last(1));
  if (!ids.ok()) {
    Undo();
    return ids.error();
  }
  AppendPrompt(state_, *ids);
  auto reply = Answer(events);
  if (Nothing(reply)) Undo();
  return reply;
}

Result<ConversationReply> Conversation::Retry(const ReplyEvents& events) {
  if (turns_.empty()) return Error{Code::kInvalidArgument, "there is no question to answer again"};
  const auto stream = state_.sampler.rng_state();
  std::vector<chat::Message> old = messages_;
  messages_.resize(turns_.back().first_message + 1);
  if (ready_.has_value()) {
    state_ = *ready_;
  } else {
    auto before = std::move(turns_.back().before);
    if (before.has_value()) {
      state_ = *before;
      K3_ASSIGN(const auto ids, TokensOf(std::span(messages_).last(1)));
      AppendPrompt(state_, ids);
    } else {
      K3_TRY(Rebuild());
    }
    turns_.back().before = std::move(before);
  }
  state_.sampler.set_rng_state(stream);
  auto reply = Answer(events);
  if (Nothing(reply)) {
    messages_ = std::move(old);
    K3_TRY(Rebuild());
  }
  return reply;
}

/// Reads the question up to its last token, so that a second answer need not.
Status Conversation::ReadAhead(const ReplyEvents& events) {
  GenerateOptions read = options_.generate;
  read.max_tokens = 0;
  GenerateEvents progress;
  progress.on_prefill = events.on_prefill;
  K3_ASSIGN(const auto result, Generate(*model_, *tokenizer_, state_, read, progress));
  if (result.finish == FinishReason::kCancelled) return {};
  const auto pending = state_.pending();
  if (model_->math() == MathMode::kFast || pending.size() < 2) return {};
  std::vector<float> none;
  const SequenceInput input{pending.first(pending.size() - 1), &state_.model, LogitRows::kNone};
  return model_->Forward(std::span(&input, 1), none);
}

/// Makes and records the reply to what is pending.
Result<ConversationReply> Conversation::Answer(const ReplyEvents& events) {
  if (!ready_.has_value()) {
    K3_ASSIGN(const auto prompt, ReplyPrompt());
    AppendPrompt(state_, prompt);
    const auto unread = static_cast<std::int64_t>(state_.pending().size());
    K3_TRY(ReadAhead(events));
    ready_ = state_;
    auto reply = Reply(events);
    if (reply.ok()) reply->prompt_tokens_read = unread;
    return reply;
  }
  const auto unread = static_cast<std::int64_t>(state_.pending().size());
  auto reply = Reply(events);
  if (reply.ok()) reply->prompt_tokens_read = unread;
  return reply;
}

Result<ConversationReply> Conversation::Reply(const ReplyEvents& events) {
  return options_.chat_format ? ChatReply(events) : PlainReply(events);
}

Result<ConversationReply> Conversation::PlainReply(const ReplyEvents& events) {
  GenerateEvents on;
  on.on_prefill = events.on_prefill;
  on.on_text = events.on_content;
  K3_ASSIGN(const auto r, Generate(*model_, *tokenizer_, state_, options_.generate, on));
  messages_.push_back(TextMessage(chat::Role::kAssistant, r.text));
  return ConversationReply{r.finish, {}, r.ids.size(), 0};
}

Result<ConversationReply> Conversation::ChatReply(const ReplyEvents& events) {
  chat::ReplyParser parser(*tokenizer_, *markup_,
                           options_.thinking ? chat::Section::kThink : chat::Section::kResponse);
  const auto tell = [&events](const chat::ReplyDelta& d) -> Status {
    K3_TRY(Tell(events.on_reasoning, d.reasoning));
    return Tell(events.on_content, d.content);
  };
  GenerateEvents on;
  on.on_prefill = events.on_prefill;
  on.on_token = [&](const SampleResult& token) { return tell(parser.Push(token.token)); };
  K3_ASSIGN(const auto r, Generate(*model_, *tokenizer_, state_, options_.generate, on));
  K3_ASSIGN(const auto closing, chat::Encode(parser.Closing(), *tokenizer_));
  K3_TRY(tell(parser.Finish(r.finish == FinishReason::kStop)));
  AppendPrompt(state_, closing);
  chat::Message reply = parser.message();
  ConversationReply out{r.finish, reply.tool_calls, r.ids.size(), 0};
  messages_.push_back(std::move(reply));
  return out;
}

}  // namespace k3
