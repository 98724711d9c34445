// The server's endpoints: who may call what, and which code answers.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "k3/serve/api_error.h"
#include "k3/serve/http.h"
#include "k3/serve/metrics.h"
#include "k3/serve/served_model.h"

namespace k3::serve {

struct ApiOptions {
  std::vector<std::string> keys;           // none: everybody may
  std::string cors_origin;                 // empty: no CORS headers; "*" or one origin
  bool check_caller = false;               // refuse other hosts and origins: caller_check.h
  std::vector<std::string> allowed_hosts;  // that are no other ones
  bool strict_model = false;               // refuse (404) other model names than the served one
  bool log_requests = false;               // one line each, at level info
  bool log_prompts = false;                // bodies of requests for text go to the log
};

/// Knows no sockets. Any thread. Until SetModel everything that needs a model answers 503.
class Api final : public HttpHandler {
 public:
  explicit Api(ApiOptions options);

  void SetModel(std::shared_ptr<const ServedModel> model);
  void SetDraining() { draining_ = true; }
  /// How many connections the server has, for /metrics.
  void SetConnectionCount(std::function<std::size_t()> count) { connections_ = std::move(count); }
  Metrics& metrics() { return metrics_; }
  /// Requests for text that have not ended.
  std::int64_t jobs() const { return *jobs_; }

  std::optional<HttpReply> Screen(const HttpRequest& head) override;
  void Handle(HttpRequest request, std::shared_ptr<Responder> out) override;
  HttpReply Refusal(int status, std::string_view message) override;

 private:
  struct Call;
  struct Route;
  static const std::vector<Route>& Routes();
  static const Route* FindRoute(std::string_view path);

  HttpReply Preflight(const HttpRequest& request) const;
  bool HasKey(const HttpRequest& request) const;
  void AddCors(const HttpRequest& request, HttpReply& reply) const;
  std::shared_ptr<const ServedModel> model() const;

  ApiStatus ModelList(Call& call);
  ApiStatus ModelInfo(Call& call);
  ApiStatus WebPage(Call& call);
  ApiStatus Health(Call& call);
  ApiStatus Ready(Call& call);
  ApiStatus MetricsPage(Call& call);
  ApiStatus TelemetryPage(Call& call);
  ApiStatus Alerts(Call& call);
  ApiStatus AlertsReference(Call& call);
  ApiStatus NoEmbeddings(Call& call);
  ApiStatus ChatCompletions(Call& call);
  ApiStatus Completions(Call& call);
  ApiStatus Messages(Call& call);
  ApiStatus CountTokens(Call& call);
  ApiStatus TokenizerInfo(Call& call);
  ApiStatus Tokenize(Call& call);
  ApiStatus Detokenize(Call& call);
  ApiStatus ApplyTemplate(Call& call);
  ApiStatus Slots(Call& call);
  void RememberSlot(const Generation& generation);
  ApiStatus ReadSavedText(const nlohmann::json& body, std::int64_t slot, const ServedModel& model,
                          Generation& out) const;
  ApiStatus CheckModel(const nlohmann::json& body, const ServedModel& model) const;
  using MakeWriter = std::unique_ptr<ReplyWriter> (*)(const ServedModel&, ReplyFormat, bool,
                                                      std::shared_ptr<Responder>);
  void Start(Call& call, Generation generation, MakeWriter make, std::string_view id_prefix,
             std::string_view call_prefix);

  const ApiOptions options_;
  Metrics metrics_;
  std::function<std::size_t()> connections_;
  std::atomic<bool> draining_{false};
  std::shared_ptr<std::atomic<std::int64_t>> jobs_ = std::make_shared<std::atomic<std::int64_t>>(0);
  mutable std::mutex mutex_;
  std::shared_ptr<const ServedModel> model_;  // guarded by mutex_
  struct SlotText {
    std::vector<TokenId> prompt;
    std::vector<std::int64_t> snapshot_at;
  };
  std::map<std::int64_t, SlotText> slots_;  // guarded by mutex_: the last prompt of each
};

}  // namespace k3::serve
