// From the pieces of a reply to what the client reads: one class for each dialect, streamed or not.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "k3/chat/message.h"
#include "k3/runtime/engine.h"
#include "k3/serve/api_error.h"
#include "k3/serve/http.h"
#include "k3/serve/json_out.h"
#include "k3/serve/reply_reader.h"
#include "k3/serve/served_model.h"

namespace k3::serve {

struct Usage {
  std::int64_t prompt_tokens = 0, completion_tokens = 0;
  std::int64_t cached_tokens = 0;     // <= prompt_tokens
  std::int64_t reasoning_tokens = 0;  // <= completion_tokens
};

/// One choice, complete.
struct Choice {
  std::string reasoning, content;
  std::vector<chat::ToolCall> tool_calls;
  std::vector<SampleResult> tokens;  // when log-probabilities were asked for
  std::string finish_reason;         // OpenAI's
  std::string matched_stop;
  // Completions with echo.
  std::vector<TokenId> prompt;
  std::vector<SampleResult> prompt_tokens;  // entry i is about prompt[i + 1]
};

struct ReplyFormat {
  std::string id;  // chatcmpl-..., cmpl-..., msg_...
  std::int64_t created = 0;
  bool logprobs = false;
  bool echo = false;
  bool include_usage = false;
  HeaderList headers;  // of the answer
};

/// Told about the choices of one request, from one thread at a time. Done or Fail ends it; what
/// comes after that is ignored.
class ReplyWriter {
 public:
  virtual ~ReplyWriter() = default;
  /// Once, before the first Piece. `usage` has the prompt only.
  virtual void Start(const Usage& usage) { (void)usage; }
  virtual void Add(std::size_t choice, const Piece& piece) {
    (void)choice;
    (void)piece;
  }
  virtual void Close(std::size_t index, const Choice& choice) {
    (void)index;
    (void)choice;
  }
  virtual void Done(std::vector<Choice> choices, const Usage& usage) = 0;
  /// A proper status as long as nothing was sent, an error event afterwards.
  virtual void Fail(const ApiError& error) = 0;
};

std::unique_ptr<ReplyWriter> ChatWriter(const ServedModel& model, ReplyFormat format, bool stream,
                                        std::shared_ptr<Responder> out);
std::unique_ptr<ReplyWriter> CompletionWriter(const ServedModel& model, ReplyFormat format,
                                              bool stream, std::shared_ptr<Responder> out);
std::unique_ptr<ReplyWriter> MessagesWriter(const ServedModel& model, ReplyFormat format,
                                            bool stream, std::shared_ptr<Responder> out);

/// An OpenAI answer in one piece; `body` is called on the connection's thread.
using BodyOf = std::string (*)(const std::vector<Choice>&, const Usage&, const ReplyFormat&,
                               const ServedModel&);
std::unique_ptr<ReplyWriter> WholeWriter(const ServedModel& model, ReplyFormat format,
                                         std::shared_ptr<Responder> out, BodyOf body);

/// About how many bytes an event with these tokens takes.
std::size_t AboutEventBytes(const Piece& piece);

Json UsageJson(const Usage& usage);  // OpenAI's
HttpReply StreamHead(const ReplyFormat& format);

}  // namespace k3::serve
