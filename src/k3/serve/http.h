// HTTP as the handlers see it: no sockets here.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace k3::serve {

using HeaderList = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;
  std::string path;    // before '?', as it came
  std::string query;   // after '?'
  HeaderList headers;  // names in lower case
  std::string body;
  std::string id;  // echoed as X-Request-Id: the client's if it is short and harmless, else random

  /// Empty when absent; the first of several.
  std::string_view Header(std::string_view lower_case_name) const;
};

struct HttpReply {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  HeaderList headers;
  /// Gives the body instead, for Send: called once on the connection's thread, which large ones
  /// keep busy instead of the caller's. May throw; then the answer is 500.
  std::function<std::string()> make_body;
};

/// Where the answer to one request goes. All functions may be called from any thread and never
/// block. Whoever drops it without an answer gives status 500. After the peer has gone calls do
/// nothing.
class Responder {
 public:
  virtual ~Responder() = default;

  /// The whole answer. Only the first of Send and Begin counts.
  virtual void Send(HttpReply reply) = 0;

  /// Starts a streamed answer; body is its first part.
  virtual void Begin(HttpReply head) = 0;
  /// False: the peer has gone, or reads so slowly that its buffer is full, which ends the
  /// connection.
  virtual bool Write(std::string data) = 0;
  /// Writes what `make` returns, which is called once on the connection's thread, in its turn;
  /// until then `about` bytes count as unsent. May throw; then the connection is closed.
  virtual bool WriteLater(std::size_t about, std::function<std::string()> make) {
    (void)about;
    return Write(make());
  }
  virtual void End() = 0;

  /// Calls `gone` once if the connection ends before the answer is complete; at once if it has
  /// ended already. Dropped when the answer is complete. One function; a second replaces it.
  virtual void OnClose(std::function<void()> gone) = 0;
};

/// What a server does with requests. Called from several threads.
class HttpHandler {
 public:
  virtual ~HttpHandler() = default;

  /// Looks at a request whose body has not come yet; an answer refuses it and ends the connection.
  virtual std::optional<HttpReply> Screen(const HttpRequest& head) = 0;
  virtual void Handle(HttpRequest request, std::shared_ptr<Responder> out) = 0;
  /// The answer to bytes that never became a request: bad syntax, too large, too slow.
  virtual HttpReply Refusal(int status, std::string_view message) = 0;
};

/// 128 random bits as hexadecimal digits; any thread.
std::string RandomId();
/// `text` when it has 1 to 128 characters of [A-Za-z0-9._:-], else a random id.
std::string RequestIdOf(std::string_view text);
/// Takes the same time wherever the texts differ; only their lengths show.
bool ConstantTimeEqual(std::string_view a, std::string_view b);

}  // namespace k3::serve
