#include <utility>

#include "k3/serve/reply_writer.h"
#include "k3/serve/token_text.h"

namespace k3::serve {
namespace {

Json CallsJson(const std::vector<chat::ToolCall>& calls) {
  Json list = Json::array();
  for (const chat::ToolCall& c : calls) {
    list.push_back({{"id", c.id},
                    {"type", "function"},
                    {"function", {{"name", c.name}, {"arguments", c.arguments}}}});
  }
  return list;
}

Json DeltaJson(const chat::ReplyDelta& d) {
  Json delta = Json::object();
  if (!d.reasoning.empty()) delta["reasoning_content"] = d.reasoning;
  if (!d.content.empty()) delta["content"] = d.content;
  for (const chat::ToolCallDelta& c : d.tool_calls) {
    Json call{{"index", c.index}};
    Json function = Json::object();
    if (!c.id.empty()) {
      call["id"] = c.id;
      call["type"] = "function";
      function["name"] = c.name;
    }
    function["arguments"] = c.arguments;
    call["function"] = std::move(function);
    delta["tool_calls"].push_back(std::move(call));
  }
  return delta;
}

std::string WholeChat(const std::vector<Choice>& choices, const Usage& usage,
                      const ReplyFormat& format, const ServedModel& model) {
  Json list = Json::array();
  for (const Choice& c : choices) {
    Json message{{"role", "assistant"}};
    const bool no_text = c.content.empty() && (!c.tool_calls.empty() || !c.reasoning.empty());
    message["content"] = no_text ? Json() : Json(c.content);
    if (!c.reasoning.empty()) message["reasoning_content"] = c.reasoning;
    if (!c.tool_calls.empty()) message["tool_calls"] = CallsJson(c.tool_calls);
    Json logprobs;
    if (format.logprobs) logprobs["content"] = ChatLogprobs(c.tokens, *model.tokenizer);
    list.push_back({{"index", list.size()},
                    {"message", std::move(message)},
                    {"logprobs", std::move(logprobs)},
                    {"finish_reason", c.finish_reason}});
  }
  return Dump({{"id", format.id},
               {"object", "chat.completion"},
               {"created", format.created},
               {"model", model.id},
               {"choices", std::move(list)},
               {"usage", UsageJson(usage)}});
}

/// What the events of a stream are made of, on the connection's thread.
class ChatEvents {
 public:
  ChatEvents(const ServedModel& model, ReplyFormat format)
      : model_(model), format_(std::move(format)) {}

  std::string Of(std::size_t index, const Piece& piece, Json finish, bool first) const {
    Json delta = Json::object();
    if (first) delta = {{"role", "assistant"}, {"content", ""}};
    delta.update(DeltaJson(piece.delta));
    Json logprobs;
    if (!piece.tokens.empty()) logprobs["content"] = ChatLogprobs(piece.tokens, *model_.tokenizer);
    Json chunk = Chunk();
    chunk["choices"].push_back({{"index", index},
                                {"delta", std::move(delta)},
                                {"logprobs", std::move(logprobs)},
                                {"finish_reason", std::move(finish)}});
    return Event(chunk);
  }

  Json Chunk() const {
    Json chunk{{"id", format_.id},
               {"object", "chat.completion.chunk"},
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
};

class StreamedChat final : public ReplyWriter {
 public:
  StreamedChat(const ServedModel& model, ReplyFormat format, std::shared_ptr<Responder> out)
      : events_(std::make_shared<const ChatEvents>(model, std::move(format))),
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
    if (index >= greeted_.size()) greeted_.resize(index + 1);
    const bool first = !greeted_[index];
    greeted_[index] = true;
    out_->WriteLater(AboutEventBytes(piece),
                     [events = events_, index, piece, finish = std::move(finish), first] {
                       return events->Of(index, piece, finish, first);
                     });
  }

  const std::shared_ptr<const ChatEvents> events_;
  std::shared_ptr<Responder> out_;
  bool begun_ = false;
  std::vector<bool> greeted_;
};

}  // namespace

std::unique_ptr<ReplyWriter> ChatWriter(const ServedModel& model, ReplyFormat format, bool stream,
                                        std::shared_ptr<Responder> out) {
  if (stream) return std::make_unique<StreamedChat>(model, std::move(format), std::move(out));
  return WholeWriter(model, std::move(format), std::move(out), WholeChat);
}

}  // namespace k3::serve
