#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "k3/io/json.h"
#include "k3/serve/reply_writer.h"

namespace k3::serve {
namespace {

// Clients want one and send it back; nobody checks it, because thoughts come back as their text.
constexpr const char* kSignature = "k3";

std::string StopReason(const Choice& c) {
  if (!c.matched_stop.empty()) return "stop_sequence";
  if (c.finish_reason == "tool_calls") return "tool_use";
  return c.finish_reason == "length" ? "max_tokens" : "end_turn";
}

Json UsageOf(const Usage& u) {
  return {{"input_tokens", u.prompt_tokens - u.cached_tokens},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", u.cached_tokens},
          {"output_tokens", u.completion_tokens}};
}

Json StopSequence(const Choice& c) {
  return c.matched_stop.empty() ? Json() : Json(c.matched_stop);
}

/// Arguments as an object; text that is none becomes an empty one.
Json Input(const std::string& arguments) {
  const auto parsed = ParseJson(arguments, "arguments");
  if (!parsed.ok() || !parsed->is_object()) return Json::object();
  Json out = Json::parse(arguments, nullptr, false);
  return out.is_discarded() ? Json::object() : out;
}

Json EmptyMessage(const ServedModel& model, const ReplyFormat& format, const Usage& usage) {
  return {{"id", format.id},         {"type", "message"},        {"role", "assistant"},
          {"model", model.id},       {"content", Json::array()}, {"stop_reason", Json()},
          {"stop_sequence", Json()}, {"usage", UsageOf(usage)}};
}

class WholeMessage final : public ReplyWriter {
 public:
  WholeMessage(const ServedModel& model, ReplyFormat format, std::shared_ptr<Responder> out)
      : model_(model), format_(std::move(format)), out_(std::move(out)) {}

  void Done(std::vector<Choice> choices, const Usage& usage) override {
    const Choice& c = choices.front();
    Json message = EmptyMessage(model_, format_, usage);
    Json& content = message["content"];
    if (!c.reasoning.empty()) {
      content.push_back(
          {{"type", "thinking"}, {"thinking", c.reasoning}, {"signature", kSignature}});
    }
    if (!c.content.empty()) content.push_back({{"type", "text"}, {"text", c.content}});
    for (const chat::ToolCall& call : c.tool_calls) {
      content.push_back({{"type", "tool_use"},
                         {"id", call.id},
                         {"name", call.name},
                         {"input", Input(call.arguments)}});
    }
    message["stop_reason"] = StopReason(c);
    message["stop_sequence"] = StopSequence(c);
    HttpReply reply;
    reply.headers = format_.headers;
    reply.body = Dump(message);
    out_->Send(std::move(reply));
  }

  void Fail(const ApiError& error) override { out_->Send(ErrorReply(error, Dialect::kAnthropic)); }

 private:
  const ServedModel& model_;
  ReplyFormat format_;
  std::shared_ptr<Responder> out_;
};

/// message_start, then each block as start, deltas, stop, then message_delta and message_stop. A
/// block is open at a time.
class StreamedMessage final : public ReplyWriter {
 public:
  StreamedMessage(const ServedModel& model, ReplyFormat format, std::shared_ptr<Responder> out)
      : model_(model), format_(std::move(format)), out_(std::move(out)) {}

  void Start(const Usage& usage) override { prompt_ = usage; }

  void Add(std::size_t, const Piece& piece) override {
    const chat::ReplyDelta& d = piece.delta;
    if (!d.reasoning.empty()) {
      Open(Block::kThinking, {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
      Delta({{"type", "thinking_delta"}, {"thinking", d.reasoning}});
    }
    if (!d.content.empty()) {
      Open(Block::kText, {{"type", "text"}, {"text", ""}});
      Delta({{"type", "text_delta"}, {"text", d.content}});
    }
    for (const chat::ToolCallDelta& call : d.tool_calls) {
      if (!call.id.empty()) {
        CloseBlock();
        Open(Block::kTool, {{"type", "tool_use"},
                            {"id", call.id},
                            {"name", call.name},
                            {"input", Json::object()}});
      }
      if (!call.arguments.empty()) {
        Delta({{"type", "input_json_delta"}, {"partial_json", call.arguments}});
      }
    }
  }

  void Done(std::vector<Choice> choices, const Usage& usage) override {
    Begin();
    CloseBlock();
    const Choice& c = choices.front();
    Write("message_delta",
          {{"type", "message_delta"},
           {"delta", {{"stop_reason", StopReason(c)}, {"stop_sequence", StopSequence(c)}}},
           {"usage", UsageOf(usage)}});
    Write("message_stop", {{"type", "message_stop"}});
    out_->End();
  }

  void Fail(const ApiError& error) override {
    if (!begun_) return out_->Send(ErrorReply(error, Dialect::kAnthropic));
    out_->Write("event: error\ndata: " + ErrorBody(error, Dialect::kAnthropic) + "\n\n");
    out_->End();
  }

 private:
  enum class Block { kNone, kThinking, kText, kTool };

  void Begin() {
    if (std::exchange(begun_, true)) return;
    out_->Begin(StreamHead(format_));
    Write("message_start",
          {{"type", "message_start"}, {"message", EmptyMessage(model_, format_, prompt_)}});
    Write("ping", {{"type", "ping"}});
  }

  void Open(Block block, Json content) {
    if (block_ == block && block != Block::kTool) return;
    CloseBlock();
    Begin();
    block_ = block;
    Write("content_block_start", {{"type", "content_block_start"},
                                  {"index", index_},
                                  {"content_block", std::move(content)}});
  }

  void Delta(Json delta) {
    Write("content_block_delta",
          {{"type", "content_block_delta"}, {"index", index_}, {"delta", std::move(delta)}});
  }

  void CloseBlock() {
    if (block_ == Block::kNone) return;
    if (block_ == Block::kThinking) {
      Delta({{"type", "signature_delta"}, {"signature", kSignature}});
    }
    Write("content_block_stop", {{"type", "content_block_stop"}, {"index", index_}});
    ++index_;
    block_ = Block::kNone;
  }

  void Write(const char* name, const Json& value) {
    out_->Write(fmt::format("event: {}\ndata: {}\n\n", name, Dump(value)));
  }

  const ServedModel& model_;
  ReplyFormat format_;
  std::shared_ptr<Responder> out_;
  Usage prompt_;
  bool begun_ = false;
  Block block_ = Block::kNone;
  std::size_t index_ = 0;
};

}  // namespace

std::unique_ptr<ReplyWriter> MessagesWriter(const ServedModel& model, ReplyFormat format,
                                            bool stream, std::shared_ptr<Responder> out) {
  if (stream) return std::make_unique<StreamedMessage>(model, std::move(format), std::move(out));
  return std::make_unique<WholeMessage>(model, std::move(format), std::move(out));
}

}  // namespace k3::serve
