#include "k3/serve/reply_reader.h"

#include <utility>

namespace k3::serve {

ReplyReader::ReplyReader(const ServedModel& model, Options options)
    : model_(&model), options_(std::move(options)) {
  if (options_.chat && model.markup) {
    parser_.emplace(*model.tokenizer, *model.markup,
                    options_.thinking ? chat::Section::kThink : chat::Section::kResponse,
                    options_.call_id_prefix);
  }
}

Result<ReplyReader> ReplyReader::Create(const ServedModel& model, Options options) {
  if (options.chat && !model.markup) {
    return Error{Code::kUnsupported, "the tokenizer lacks the control tokens of the chat format"};
  }
  ReplyReader reader(model, std::move(options));
  if (!reader.options_.stop.empty()) {
    K3_ASSIGN(reader.content_stop_, StopMatcher::Create(reader.options_.stop));
    reader.reasoning_stop_ = reader.content_stop_;
  }
  return reader;
}

/// Takes out stop strings and what comes after them.
chat::ReplyDelta ReplyReader::Filter(chat::ReplyDelta raw) {
  chat::ReplyDelta out;
  if (stopped()) return out;
  if (!raw.reasoning.empty()) out.reasoning = reasoning_stop_.Push(raw.reasoning);
  if (reasoning_stop_.stopped()) return out;
  const bool later = !raw.content.empty() || !raw.tool_calls.empty();
  if (later && !std::exchange(reasoning_over_, true)) out.reasoning += reasoning_stop_.Finish();
  if (!raw.content.empty()) out.content = content_stop_.Push(raw.content);
  if (content_stop_.stopped()) return out;
  if (!raw.tool_calls.empty()) out.content += content_stop_.Finish();
  out.tool_calls = std::move(raw.tool_calls);
  return out;
}

/// Tokens stay back as long as some of their text might.
Piece ReplyReader::WithTokens(chat::ReplyDelta delta, bool all) {
  Piece piece{std::move(delta), {}};
  if (!options_.keep_tokens) return piece;
  if (stopped()) {
    if (!piece.delta.empty()) piece.tokens = std::move(held_);
    held_.clear();
  } else if (all || !piece.delta.empty()) {
    piece.tokens = std::exchange(held_, {});
  }
  return piece;
}

Piece ReplyReader::Push(const SampleResult& token) {
  if (options_.keep_tokens) held_.push_back(token);
  chat::ReplyDelta raw;
  if (parser_) {
    raw = parser_->Push(token.token);
  } else if (!model_->tokenizer->IsSpecial(token.token)) {
    raw.content = utf8_.Push(model_->tokenizer->Bytes(token.token).value_or(""));
  }
  return WithTokens(Filter(std::move(raw)), false);
}

Piece ReplyReader::Finish(EngineFinish finish) {
  chat::ReplyDelta raw;
  if (parser_) {
    const bool closed = parser_->done();
    raw = parser_->Finish(closed || finish == EngineFinish::kStop);
    finish_reason_ = parser_->finish_reason();
  } else {
    raw.content = utf8_.Finish();
    finish_reason_ = finish == EngineFinish::kLength ? "length" : "stop";
  }
  const bool was_stopped = stopped();
  chat::ReplyDelta out = Filter(std::move(raw));
  if (!stopped()) {
    out.reasoning += reasoning_over_ ? "" : reasoning_stop_.Finish();
    out.content += content_stop_.Finish();
  }
  if (stopped()) finish_reason_ = "stop";
  return WithTokens(std::move(out), !was_stopped);
}

}  // namespace k3::serve
