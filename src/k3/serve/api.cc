#include "k3/serve/api.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "k3/io/json.h"
#include "k3/serve/api_call_internal.h"
#include "k3/serve/caller_check.h"

namespace k3::serve {
namespace {

/// Counts the answer and adds the headers that every answer has.
class Counted final : public Responder {
 public:
  using Finish = std::function<void(int status)>;
  Counted(std::shared_ptr<Responder> out, HeaderList headers, Finish finish)
      : out_(std::move(out)), headers_(std::move(headers)), finish_(std::move(finish)) {}
  ~Counted() override {
    if (!done_) finish_(status_.load() != 0 ? status_.load() : 499);
  }

  void Send(HttpReply reply) override {
    Add(reply);
    if (!done_.exchange(true)) finish_(reply.status);
    out_->Send(std::move(reply));
  }
  void Begin(HttpReply head) override {
    Add(head);
    status_ = head.status;
    out_->Begin(std::move(head));
  }
  bool Write(std::string data) override { return out_->Write(std::move(data)); }
  bool WriteLater(std::size_t about, std::function<std::string()> make) override {
    return out_->WriteLater(about, std::move(make));
  }
  void End() override {
    if (!done_.exchange(true)) finish_(status_);
    out_->End();
  }
  void OnClose(std::function<void()> gone) override { out_->OnClose(std::move(gone)); }

 private:
  void Add(HttpReply& reply) const {
    reply.headers.insert(reply.headers.end(), headers_.begin(), headers_.end());
  }

  std::shared_ptr<Responder> out_;
  HeaderList headers_;
  Finish finish_;
  std::atomic<int> status_{0};
  std::atomic<bool> done_{false};
};

Dialect DialectOf(std::string_view path) {
  return path.starts_with("/v1/messages") ? Dialect::kAnthropic : Dialect::kOpenAi;
}

/// The page is public; it asks for the key itself.
bool IsPublic(std::string_view path) {
  return path == "/health" || path == "/ready" || path == "/" || path.starts_with("/ui/");
}

}  // namespace

const std::vector<Api::Route>& Api::Routes() {
  static const std::vector<Route> routes{
      {"/v1/chat/completions", "POST", &Api::ChatCompletions, true},
      {"/v1/completions", "POST", &Api::Completions, true},
      {"/v1/messages", "POST", &Api::Messages, true},
      {"/v1/messages/count_tokens", "POST", &Api::CountTokens, true},
      {"/v1/models", "GET", &Api::ModelList, true},
      {"/v1/models/", "GET", &Api::ModelInfo, true},  // and what follows
      {"/v1/embeddings", "POST", &Api::NoEmbeddings, false},
      {"/tokenizer_info", "GET", &Api::TokenizerInfo, true},
      {"/tokenize", "POST", &Api::Tokenize, true},
      {"/detokenize", "POST", &Api::Detokenize, true},
      {"/apply-template", "POST", &Api::ApplyTemplate, true},
      {"/slots/", "POST", &Api::Slots, true},  // and what follows
      {"/", "GET", &Api::WebPage, false},
      {"/ui/", "GET", &Api::WebPage, false},  // and what follows
      {"/health", "GET", &Api::Health, false},
      {"/ready", "GET", &Api::Ready, false},
      {"/metrics", "GET", &Api::MetricsPage, false},
      {"/alerts", "GET", &Api::Alerts, true},
      {"/alerts/reference", "GET", &Api::AlertsReference, true},
      {"/v1/k3/telemetry", "GET", &Api::TelemetryPage, true},
  };
  return routes;
}

const Api::Route* Api::FindRoute(std::string_view path) {
  for (const Route& r : Routes()) {
    const bool prefix = r.path.size() > 1 && r.path.ends_with('/');
    if (prefix ? path.starts_with(r.path) && path.size() > r.path.size() : path == r.path)
      return &r;
  }
  return nullptr;
}

Api::Api(ApiOptions options) : options_(std::move(options)) {}

void Api::SetModel(std::shared_ptr<const ServedModel> model) {
  const std::lock_guard lock(mutex_);
  model_ = std::move(model);
}

std::shared_ptr<const ServedModel> Api::model() const {
  const std::lock_guard lock(mutex_);
  return model_;
}

bool Api::HasKey(const HttpRequest& request) const {
  if (options_.keys.empty() || IsPublic(request.path)) return true;
  std::string_view given = request.Header("x-api-key");
  if (given.empty()) {
    given = request.Header("authorization");
    if (given.size() < 7 || !(given.starts_with("Bearer ") || given.starts_with("bearer "))) {
      return false;
    }
    given.remove_prefix(7);
  }
  bool found = false;  // all keys are compared, so that time tells nothing about which one matched
  for (const std::string& key : options_.keys) found |= ConstantTimeEqual(given, key);
  return found;
}

void Api::AddCors(const HttpRequest& request, HttpReply& reply) const {
  if (options_.cors_origin.empty() || request.Header("origin").empty()) return;
  reply.headers.emplace_back("Access-Control-Allow-Origin", options_.cors_origin);
  reply.headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
  if (options_.cors_origin != "*") reply.headers.emplace_back("Vary", "Origin");
}

HttpReply Api::Preflight(const HttpRequest& request) const {
  HttpReply reply;
  reply.status = 204;
  AddCors(request, reply);
  reply.headers.emplace_back("Allow", "GET, HEAD, POST, OPTIONS");
  if (options_.cors_origin.empty()) return reply;
  reply.headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
  reply.headers.emplace_back(
      "Access-Control-Allow-Headers",
      "Authorization, Content-Type, X-Api-Key, X-Request-Id, Anthropic-Version, Anthropic-Beta");
  reply.headers.emplace_back("Access-Control-Max-Age", "600");
  return reply;
}

std::optional<HttpReply> Api::Screen(const HttpRequest& head) {
  const ApiStatus caller = options_.check_caller
                               ? CheckCaller(head, options_.allowed_hosts, options_.cors_origin)
                               : std::nullopt;
  if (head.method == "OPTIONS" && !caller) return Preflight(head);
  ApiError error;
  const Route* route = FindRoute(head.path);
  if (caller) {
    error = *caller;
  } else if (!HasKey(head)) {
    error.status = 401;
    error.code = "invalid_api_key";
    error.message = "a valid API key is needed, as Authorization: Bearer KEY or X-Api-Key: KEY";
  } else if (route == nullptr) {
    error.status = 404;
    error.code = "not_found";
    error.message = fmt::format("there is no {}", Printable(head.path));
  } else if (head.method != route->method && !(head.method == "HEAD" && route->method == "GET")) {
    error.status = 405;
    error.code = "method_not_allowed";
    error.message = fmt::format("{} takes {}, found {}", Printable(head.path), route->method,
                                Printable(head.method));
  } else if (const ApiStatus encoding = CheckContentEncoding(head); encoding) {
    error = *encoding;
  } else {
    return std::nullopt;
  }
  metrics_.CountHttp(route == nullptr ? "none" : route->path, error.status, 0);
  if (options_.log_requests) {
    spdlog::info("{} {} {} {} refused", head.id, Printable(head.method, 16), Printable(head.path),
                 error.status);
  }
  HttpReply reply = ErrorReply(error, DialectOf(head.path));
  if (error.status == 405) reply.headers.emplace_back("Allow", std::string(route->method));
  AddCors(head, reply);
  return reply;
}

HttpReply Api::Refusal(int status, std::string_view message) {
  metrics_.CountHttp("none", status, 0);
  ApiError error;
  error.status = status;
  error.message = message;
  if (status == 503) error.retry_after_s = 1;
  return ErrorReply(error, Dialect::kOpenAi);
}

void Api::Handle(HttpRequest request, std::shared_ptr<Responder> out) {
  const Route* route = FindRoute(request.path);  // Screen has seen that there is one
  if (route == nullptr) return out->Send(Refusal(404, "not found"));
  HttpReply headers;
  AddCors(request, headers);
  const auto start = std::chrono::steady_clock::now();
  const auto finish = [this, route, start, id = request.id, method = request.method](int status) {
    const double s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    metrics_.CountHttp(route->path, status, s);
    if (!options_.log_requests) return;
    spdlog::info("{} {} {} {} {:.1f} ms", id, method, route->path, status, s * 1e3);
  };
  const Dialect dialect = DialectOf(request.path);
  Call call{std::move(request),
            std::make_shared<Counted>(std::move(out), std::move(headers.headers), finish), model()};
  ApiStatus error;
  if (route->needs_model && (call.model == nullptr || draining_)) {
    error.emplace();
    error->status = 503;
    error->code = call.model == nullptr ? "loading" : "draining";
    error->message = call.model == nullptr ? "the model is loading" : "the server is stopping";
    error->retry_after_s = call.model == nullptr ? 1 : 5;
  } else {
    error = (this->*route->handle)(call);
  }
  if (error) call.out->Send(ErrorReply(*error, dialect));
}

}  // namespace k3::serve
