// The endpoints about the server itself.
#include <fmt/format.h>

#include <utility>

#include "k3/io/json.h"
#include "k3/serve/api_call_internal.h"
#include "k3/serve/json_out.h"
#include "k3/serve/telemetry.h"
#include "k3/serve/web_files.h"

namespace k3::serve {
namespace {

Json ModelJson(const ServedModel& m) {
  return {{"id", m.id},
          {"object", "model"},
          {"created", m.created},
          {"owned_by", "k3"},
          {"max_model_len", m.context},
          {"chat_format", m.chat_format ? "xtml" : "none"}};
}

HttpReply JsonReply(const Json& value) {
  HttpReply reply;
  reply.body = Dump(value);
  return reply;
}

ApiError Unavailable(const char* code, const char* message, int retry_after_s) {
  ApiError e;
  e.status = 503;
  e.code = code;
  e.message = message;
  e.retry_after_s = retry_after_s;
  return e;
}

}  // namespace

ApiStatus Api::ModelList(Call& call) {
  call.out->Send(JsonReply({{"object", "list"}, {"data", Json::array({ModelJson(*call.model)})}}));
  return {};
}

ApiStatus Api::ModelInfo(Call& call) {
  constexpr std::size_t kPrefix = std::string_view("/v1/models/").size();
  const std::string name = call.request.path.substr(kPrefix);
  if (name == call.model->id) {
    call.out->Send(JsonReply(ModelJson(*call.model)));
    return {};
  }
  ApiError e;
  e.status = 404;
  e.param = "model";
  e.code = "model_not_found";
  e.message = fmt::format("there is no model \"{}\", only \"{}\"", Printable(name), call.model->id);
  return e;
}

ApiStatus Api::WebPage(Call& call) {
  const WebFile* file = FindWebFile(call.request.path);
  if (file == nullptr) {
    ApiError e;
    e.status = 404;
    e.code = "not_found";
    e.message = fmt::format("there is no {}", Printable(call.request.path));
    return e;
  }
  HttpReply reply;
  reply.content_type = ContentType(*file);
  reply.body = file->body;
  reply.headers = {{"Content-Security-Policy", std::string(kWebPolicy)},
                   {"X-Content-Type-Options", "nosniff"},
                   {"Referrer-Policy", "no-referrer"},
                   {"Cache-Control", "no-cache"}};
  call.out->Send(std::move(reply));
  return {};
}

/// The process lives and has its model, also while it drains.
ApiStatus Api::Health(Call& call) {
  if (model() == nullptr) return Unavailable("loading", "the model is loading", 1);
  call.out->Send(JsonReply({{"status", "ok"}}));
  return {};
}

/// New requests are welcome.
ApiStatus Api::Ready(Call& call) {
  if (model() == nullptr) return Unavailable("loading", "the model is loading", 1);
  if (draining_) return Unavailable("draining", "the server is stopping", 5);
  call.out->Send(JsonReply({{"status", "ready"}}));
  return {};
}

ApiStatus Api::MetricsPage(Call& call) {
  const auto m = model();
  const std::size_t connections = connections_ ? connections_() : 0;
  HttpReply reply;
  reply.content_type = "text/plain; version=0.0.4; charset=utf-8";
  reply.body = metrics_.Page(m.get(), connections);
  call.out->Send(std::move(reply));
  return {};
}

ApiStatus Api::TelemetryPage(Call& call) {
  call.out->Send(JsonReply(TelemetryJson(
      call.model->telemetry != nullptr ? call.model->telemetry->view() : TelemetryView())));
  return {};
}

ApiStatus Api::AlertsReference(Call& call) {
  const DriftMonitor none;
  call.out->Send(
      JsonReply(ReferenceJson(call.model->drift != nullptr ? *call.model->drift : none)));
  return {};
}

ApiStatus Api::Alerts(Call& call) {
  DriftMonitor none;
  call.out->Send(JsonReply(AlertsJson(call.model->drift != nullptr ? *call.model->drift : none)));
  return {};
}

ApiStatus Api::NoEmbeddings(Call&) {
  ApiError e;
  e.status = 404;
  e.code = "unsupported";
  e.message = "this server generates text; it has no embeddings";
  return e;
}

}  // namespace k3::serve
