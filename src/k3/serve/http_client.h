// Many HTTP/1.1 requests at once from one thread, to servers that may misbehave.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "k3/base/status.h"
#include "k3/serve/http.h"

namespace k3::serve {

struct HttpTarget {
  std::string host;  // a name or an address; IPv6 without brackets
  std::uint16_t port = 80;
  std::string base;  // path in front of every request's, without '/' at its end
};
/// "http://HOST[:PORT][/PATH]". https, user names, queries and control bytes are refused.
Result<HttpTarget> ParseUrl(std::string_view url);

enum class HttpEnd : std::uint8_t {
  kComplete,  // the whole answer came
  kRefused,   // no connection
  kReset,     // the connection broke
  kCut,       // it was closed before the answer was complete
  kTimeout,   // the request's time ran out
  kBadHttp,   // what came is no HTTP answer
  kTooLarge,  // the answer is larger than the limit
  kStopped,   // the sink wanted no more, or Run was cancelled
};
std::string_view Name(HttpEnd end);  // "complete", "refused", ...

struct HttpCall {
  std::string method = "POST";
  std::string path;
  std::string body;
  HeaderList headers;
};

/// Told about one request, from the thread that is in Run. Calls come in the order of the methods;
/// OnEnd exactly once, whatever happens, unless the client is destroyed first.
class HttpCallSink {
 public:
  virtual ~HttpCallSink() = default;
  virtual void OnHead(int status) { (void)status; }
  /// False closes the connection; OnEnd(kStopped) follows.
  virtual bool OnBody(std::string_view part) = 0;
  virtual void OnEnd(HttpEnd end) = 0;
};

struct HttpClientLimits {
  double call_s = 600;                                 // from Start to the end of the answer
  std::uint64_t body_bytes = std::uint64_t{64} << 20;  // of one answer
};

/// Each request has a connection of its own. Single thread.
class HttpClient {
 public:
  using Clock = std::chrono::steady_clock;

  /// Looks the host up. Refuses (kIo) a name that nobody knows.
  static Result<std::unique_ptr<HttpClient>> Create(const HttpTarget& target,
                                                    const HttpClientLimits& limits);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  void Start(HttpCall call, std::shared_ptr<HttpCallSink> sink);
  /// Calls `act` then, or as soon as Run gets there.
  void At(Clock::time_point when, std::function<void()> act);
  /// Until no request and no timer is left. Once `cancel` (may be null) is set, everything ends
  /// within a tenth of a second; timers then do not act.
  Status Run(const std::atomic<bool>* cancel);

 private:
  struct Impl;
  explicit HttpClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct HttpAnswer {
  HttpEnd end = HttpEnd::kRefused;
  int status = 0;
  std::string body;
};
/// One request by itself.
Result<HttpAnswer> Fetch(const HttpTarget& target, HttpCall call, const HttpClientLimits& limits,
                         const std::atomic<bool>* cancel = nullptr);

}  // namespace k3::serve
