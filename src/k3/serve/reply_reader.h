// From the tokens of one choice to text that may be sent.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"
#include "k3/chat/parse.h"
#include "k3/runtime/engine_stats.h"
#include "k3/runtime/sampler.h"
#include "k3/runtime/stop.h"
#include "k3/serve/served_model.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::serve {

/// What one or several tokens made certain, and the tokens whose text that is.
struct Piece {
  chat::ReplyDelta delta;            // plain text is content
  std::vector<SampleResult> tokens;  // only when asked for
  bool empty() const { return delta.empty() && tokens.empty(); }
};

/// Reads tokens as chat reply or as plain text, and looks for stop strings: in the answer and in
/// the reasoning, each by itself, not in the arguments of tool calls. Streaming and not streaming
/// use this in the same way, so they give the same text. The model outlives it. One thread at a
/// time.
class ReplyReader {
 public:
  struct Options {
    bool chat = false;
    bool thinking = false;  // chat: the prompt opened the think element
    std::vector<std::string> stop;
    bool keep_tokens = false;  // fill Piece::tokens
    std::string call_id_prefix = "call_";
  };
  static Result<ReplyReader> Create(const ServedModel& model, Options options);

  Piece Push(const SampleResult& token);
  /// What was held back. After it finish_reason() is known.
  Piece Finish(EngineFinish finish);

  /// A stop string came, or the reply closed itself: no more tokens are wanted.
  bool done() const { return stopped() || (parser_ && parser_->done()); }
  bool stopped() const { return content_stop_.stopped() || reasoning_stop_.stopped(); }
  const std::string& matched_stop() const {
    return content_stop_.stopped() ? content_stop_.matched() : reasoning_stop_.matched();
  }
  std::string_view finish_reason() const { return finish_reason_; }  // of OpenAI

 private:
  ReplyReader(const ServedModel& model, Options options);
  chat::ReplyDelta Filter(chat::ReplyDelta raw);
  Piece WithTokens(chat::ReplyDelta delta, bool all);

  const ServedModel* model_;
  Options options_;
  std::optional<chat::ReplyParser> parser_;  // chat
  Utf8Stream utf8_;                          // plain text
  StopMatcher content_stop_, reasoning_stop_;
  std::vector<SampleResult> held_;
  bool reasoning_over_ = false;
  std::string_view finish_reason_ = "stop";
};

}  // namespace k3::serve
