// What the writers of several dialects share.
#include "k3/serve/reply_writer.h"

#include <utility>

namespace k3::serve {
namespace {

class WholeReply final : public ReplyWriter {
 public:
  WholeReply(const ServedModel& model, ReplyFormat format, std::shared_ptr<Responder> out,
             BodyOf body)
      : model_(model), format_(std::move(format)), out_(std::move(out)), body_(body) {}

  void Done(std::vector<Choice> choices, const Usage& usage) override {
    HttpReply reply;
    reply.headers = format_.headers;
    const auto all = std::make_shared<const std::vector<Choice>>(std::move(choices));
    reply.make_body = [all, usage, format = format_, model = &model_, body = body_] {
      return body(*all, usage, format, *model);
    };
    out_->Send(std::move(reply));
  }

  void Fail(const ApiError& error) override { out_->Send(ErrorReply(error, Dialect::kOpenAi)); }

 private:
  const ServedModel& model_;
  ReplyFormat format_;
  std::shared_ptr<Responder> out_;
  BodyOf body_;
};

}  // namespace

std::unique_ptr<ReplyWriter> WholeWriter(const ServedModel& model, ReplyFormat format,
                                         std::shared_ptr<Responder> out, BodyOf body) {
  return std::make_unique<WholeReply>(model, std::move(format), std::move(out), body);
}

std::size_t AboutEventBytes(const Piece& piece) {
  std::size_t sum = 256 + piece.delta.reasoning.size() + piece.delta.content.size();
  for (const chat::ToolCallDelta& c : piece.delta.tool_calls) sum += 64 + c.arguments.size();
  for (const SampleResult& t : piece.tokens) sum += 80 * (1 + t.top.size());
  return sum;
}

Json UsageJson(const Usage& u) {
  return {{"prompt_tokens", u.prompt_tokens},
          {"completion_tokens", u.completion_tokens},
          {"total_tokens", u.prompt_tokens + u.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", u.cached_tokens}}},
          {"completion_tokens_details", {{"reasoning_tokens", u.reasoning_tokens}}},
          {"cached_tokens", u.cached_tokens}};
}

HttpReply StreamHead(const ReplyFormat& format) {
  HttpReply head;
  head.content_type = "text/event-stream; charset=utf-8";
  head.headers = format.headers;
  head.headers.emplace_back("Cache-Control", "no-cache");
  head.headers.emplace_back("X-Accel-Buffering", "no");
  return head;
}

}  // namespace k3::serve
