#include <utility>

#include "k3/serve/reply_writer.h"
#include "k3/serve/token_text.h"

namespace k3::serve {
namespace {

/// tokens, token_logprobs, top_logprobs and text_offset, which counts characters as Python does.
class TokenTable {
 public:
  TokenTable(const Tokenizer& tokenizer, std::size_t first_offset)
      : tokenizer_(tokenizer), offset_(first_offset) {}

  void AddFirst(TokenId id) { Row(id, Json(), Json()); }

  void Add(const SampleResult& t) {
    Json top = Json::object();
    for (const TokenLogprob& other : t.top) {
      const std::string name = TokenName(other.id, tokenizer_);
      if (!top.contains(name)) top[name] = LogprobJson(other.logprob);
    }
    Row(t.token, LogprobJson(t.logprob), std::move(top));
  }

  Json Take() {
    return {{"tokens", std::move(tokens_)},
            {"token_logprobs", std::move(logprobs_)},
            {"top_logprobs", std::move(top_)},
            {"text_offset", std::move(offsets_)}};
  }
  std::size_t offset() const { return offset_; }

 private:
  void Row(TokenId id, Json logprob, Json top) {
    tokens_.push_back(TokenName(id, tokenizer_));
    logprobs_.push_back(std::move(logprob));
    top_.push_back(std::move(top));
    offsets_.push_back(offset_);
    if (tokenizer_.IsSpecial(id)) return;
    for (const char c : tokenizer_.Bytes(id).value_or("")) {
      if ((static_cast<unsigned char>(c) & 0xC0u) != 0x80u) ++offset_;
    }
  }

  const Tokenizer& tokenizer_;
  std::size_t offset_;
  Json tokens_ = Json::array(), logprobs_ = Json::array(), top_ = Json::array(),
       offsets_ = Json::array();
};

std::string EchoText(const std::vector<TokenId>& prompt, const Tokenizer& tokenizer) {
  return tokenizer.Decode(prompt, false);
}

Json Logprobs(const Choice& c, const ReplyFormat& format, const ServedModel& model) {
  TokenTable table(*model.tokenizer, 0);
  if (format.echo && !c.prompt.empty()) {
    table.AddFirst(c.prompt[0]);
    for (const SampleResult& t : c.prompt_tokens) table.Add(t);
  }
  for (const SampleResult& t : c.tokens) table.Add(t);
  return table.Take();
}

std::string WholeCompletion(const std::vector<Choice>& choices, const Usage& usage,
                            const ReplyFormat& format, const ServedModel& model) {
  Json list = Json::array();
  for (const Choice& c : choices) {
    const std::string echo = format.echo ? EchoText(c.prompt, *model.tokenizer) : "";
    list.push_back({{"index", list.size()},
                    {"text", echo + c.content},
                    {"logprobs", format.logprobs ? Logprobs(c, format, model) : Json()},
                    {"finish_reason", c.finish_reason}});
  }
  return Dump({{"id", format.id},
               {"object", "text_completion"},
               {"created", format.created},
               {"model", model.id},
               {"choices", std::move(list)},
               {"usage", UsageJson(usage)}});
}

/// What the events of a stream are made of, on the connection's thread: one after the other.
class CompletionEvents {
 public:
  CompletionEvents(const ServedModel& model, ReplyFormat format)
      : model_(model), format_(std::move(format)) {}

  std::string Of(std::size_t index, const Piece& piece, Json finish) {
    Json logprobs;
    if (format_.logprobs && !piece.tokens.empty()) {
      if (index >= offsets_.size()) offsets_.resize(index + 1);
      TokenTable table(*model_.tokenizer, offsets_[index]);
      for (const SampleResult& t : piece.tokens) table.Add(t);
      offsets_[index] = table.offset();
      logprobs = table.Take();
    }
    Json chunk = Chunk();
    chunk["choices"].push_back({{"index", index},
                                {"text", piece.delta.content},
                                {"logprobs", std::move(logprobs)},
                                {"finish_reason", std::move(finish)}});
    return Event(chunk);
  }

  Json Chunk() const {
    Json chunk{{"id", format_.id},
               {"object", "text_completion"},
               {"created", format_.created},
               {"model", model_.id},
               {"choices", Json::array()}};
    if (format_.include_usage) chunk["usage"] = Json();
    return chunk;
  }
  const ReplyFormat& format() const { return format_; }

 private:
  const ServedModel& model_;
  const ReplyFormat format_;
  std::vector<std::size_t> offsets_;  // of each choice
};

class StreamedCompletion final : public ReplyWriter {
 public:
  StreamedCompletion(const ServedModel& model, ReplyFormat format, std::shared_ptr<Responder> out)
      : events_(std::make_shared<CompletionEvents>(model, std::move(format))),
        out_(std::move(out)) {}

  void Add(std::size_t index, const Piece& piece) override { Write(index, piece, Json()); }

  void Close(std::size_t index, const Choice& choice) override {
    Write(index, Piece(), choice.finish_reason);
  }

  void Done(std::vector<Choice>, const Usage& usage) override {
    std::string last;
    if (events_->format().include_usage) {
      Json chunk = events_->Chunk();
      chunk["usage"] = UsageJson(usage);
      last = Event(chunk);
    }
    out_->Write(last + "data: [DONE]\n\n");
    out_->End();
  }

  void Fail(const ApiError& error) override {
    if (!begun_) return out_->Send(ErrorReply(error, Dialect::kOpenAi));
    out_->Write("data: " + ErrorBody(error, Dialect::kOpenAi) + "\n\ndata: [DONE]\n\n");
    out_->End();
  }

 private:
  void Write(std::size_t index, const Piece& piece, Json finish) {
    if (!std::exchange(begun_, true)) out_->Begin(StreamHead(events_->format()));
    out_->WriteLater(AboutEventBytes(piece),
                     [events = events_, index, piece, finish = std::move(finish)] {
                       return events->Of(index, piece, finish);
                     });
  }

  const std::shared_ptr<CompletionEvents> events_;
  std::shared_ptr<Responder> out_;
  bool begun_ = false;
};

}  // namespace

std::unique_ptr<ReplyWriter> CompletionWriter(const ServedModel& model, ReplyFormat format,
                                              bool stream, std::shared_ptr<Responder> out) {
  if (stream) return std::make_unique<StreamedCompletion>(model, std::move(format), std::move(out));
  return WholeWriter(model, std::move(format), std::move(out), WholeCompletion);
}

}  // namespace k3::serve
