// Arbitrary bytes on a connection of the HTTP server. Whatever comes, the server answers or closes,
// and the next connection works.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "k3/serve/http_server.h"

namespace {

using k3::serve::HttpReply;
using k3::serve::HttpRequest;

class Echo final : public k3::serve::HttpHandler {
 public:
  std::optional<HttpReply> Screen(const HttpRequest&) override { return std::nullopt; }
  void Handle(HttpRequest r, std::shared_ptr<k3::serve::Responder> out) override {
    HttpReply reply;
    reply.body = r.method + " " + r.path + " " + r.query + " " + r.body;
    if (r.path == "/stream") {
      out->Begin({});
      out->Write(reply.body);
      return out->End();
    }
    out->Send(std::move(reply));
  }
  HttpReply Refusal(int status, std::string_view message) override {
    HttpReply r;
    r.status = status;
    r.body = message;
    return r;
  }
};

[[noreturn]] void Fail(const char* what) {
  std::perror(what);
  __builtin_trap();
}

/// The fuzzer's alarm clock may interrupt a connect, which goes on all the same.
void Connect(int fd, const sockaddr_in& address) {
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return;
  if (errno != EINTR) Fail("connect");
  pollfd wait{fd, POLLOUT, 0};
  int ready = -1;
  while ((ready = poll(&wait, 1, 5000)) < 0 && errno == EINTR) {
  }
  if (ready <= 0) Fail("poll");
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
    errno = error;
    Fail("connect after an alarm");
  }
}

std::string Exchange(std::uint16_t port, std::string_view bytes) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0) Fail("socket");
  const timeval limit{5, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  // No lingering: many short connections would use up the ports.
  const linger at_once{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  Connect(fd, address);
  (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  shutdown(fd, SHUT_WR);
  std::string text;
  char buffer[4096];
  ssize_t n = 0;
  while ((n = recv(fd, buffer, sizeof buffer, 0)) > 0 || (n < 0 && errno == EINTR)) {
    if (n > 0) text.append(buffer, static_cast<std::size_t>(n));
  }
  const bool timed_out = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  close(fd);
  if (timed_out) Fail("neither answered to the end nor closed");
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Echo echo;
  static const auto server = [] {
    k3::serve::HttpOptions o;
    o.port = 0;
    o.limits.body_bytes = 4096;
    o.limits.header_bytes = 4096;
    return std::move(k3::serve::HttpServer::Start(o, echo)).value();
  }();
  const std::string text =
      Exchange(server->port(), std::string_view(reinterpret_cast<const char*>(data), size));
  if (!text.empty() && !text.starts_with("HTTP/1.1 ")) __builtin_trap();
  return 0;
}
