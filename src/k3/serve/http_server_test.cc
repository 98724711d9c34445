#include "k3/serve/http_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace k3::serve {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// Echoes bodies; /wait answers when told, /stream writes without end, /throw throws.
class TestHandler final : public HttpHandler {
 public:
  std::optional<HttpReply> Screen(const HttpRequest& head) override {
    if (head.path != "/no") return std::nullopt;
    HttpReply r;
    r.status = 401;
    r.body = "no";
    return r;
  }
  void Handle(HttpRequest request, std::shared_ptr<Responder> out) override {
    if (request.path == "/throw") throw std::bad_alloc();
    if (request.path == "/drop") return;
    if (request.path == "/wait" || request.path == "/stream") {
      out->OnClose([this] {
        const std::lock_guard lock(mutex);
        ++gone;
        changed.notify_all();
      });
      if (request.path == "/stream") {
        out->Begin({});
        while (out->Write(std::string(65536, 'x'))) {
        }
      }
      const std::lock_guard lock(mutex);
      waiting = std::move(out);
      changed.notify_all();
      return;
    }
    if (request.path == "/later" || request.path == "/broken") return Later(*out, request.path);
    HttpReply r;
    if (request.path == "/made" || request.path == "/unmade") {
      r.make_body = [good = request.path == "/made"] {
        if (!good) throw std::bad_alloc();
        return std::string("made elsewhere");
      };
      std::thread([&] { out->Send(std::move(r)); }).join();
      return;
    }
    r.body = request.method + " " + request.path + " " + request.body;
    out->Send(std::move(r));
  }
  static void Later(Responder& out, const std::string& path) {
    std::thread([&] {
      const auto caller = std::this_thread::get_id();
      out.Begin({});
      out.Write("one ");
      out.WriteLater(1000000, [caller] {
        return std::string(std::this_thread::get_id() == caller ? "here " : "two ");
      });
      if (path == "/broken") out.WriteLater(1, []() -> std::string { throw std::bad_alloc(); });
      out.WriteLater(0, [] { return std::string(); });  // no chunk, which would be the last
      out.WriteLater(1, [] { return std::string("three "); });
      out.Write("four");
      out.End();
    }).join();
  }
  HttpReply Refusal(int status, std::string_view message) override {
    if (no_memory.exchange(false)) throw std::bad_alloc();
    HttpReply r;
    r.status = status;
    r.body = message;
    return r;
  }
  bool WaitGone(int n) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(5), [&] { return gone >= n; });
  }
  void WaitWaiting() {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, std::chrono::seconds(5), [&] { return waiting != nullptr; });
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<Responder> waiting;
  int gone = 0;
  std::atomic<bool> no_memory = false;  // for the next refusal
};

class Client {
 public:
  explicit Client(std::uint16_t port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_port = htons(port);
    inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&a), sizeof a), 0);
  }
  ~Client() { Close(); }
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  void Send(std::string_view text) {
    EXPECT_EQ(send(fd_, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }
  /// Until the text has `end`, the peer closes, or two seconds passed without a byte.
  std::string Read(std::string_view end = "\n\n\n") {
    std::string text;
    char buffer[65536];
    while (text.find(end) == text.npos) {
      pollfd p{fd_, POLLIN, 0};
      if (poll(&p, 1, 2000) <= 0) return text + "<timeout>";
      const ssize_t n = recv(fd_, buffer, sizeof buffer, 0);
      if (n <= 0) return text + "<closed>";
      text.append(buffer, static_cast<std::size_t>(n));
    }
    return text;
  }

 private:
  int fd_;
};

class HttpServerTest : public ::testing::Test {
 protected:
  void Start() {
    options.port = 0;
    auto s = HttpServer::Start(options, handler);
    ASSERT_TRUE(s.ok()) << s.message();
    server = std::move(s).value();
  }
  std::string Ask(std::string_view request, std::string_view end = "<never>") {
    Client c(server->port());
    c.Send(request);
    return c.Read(end);
  }
  void TearDown() override {
    handler.waiting.reset();
    if (server) server->Stop();
  }

  TestHandler handler;
  HttpOptions options;
  std::unique_ptr<HttpServer> server;
};

TEST_F(HttpServerTest, KeepsTheConnectionAndAnswersInOrder) {
  Start();
  Client c(server->port());
  c.Send("POST /a HTTP/1.1\r\nContent-Length: 2\r\nX-Request-Id: id-7\r\n\r\nhi");
  EXPECT_THAT(c.Read("POST /a hi"), HasSubstr("X-Request-Id: id-7\r\n"));
  c.Send("GET /b HTTP/1.1\r\n\r\nGET /c HTTP/1.1\r\n\r\nGET /d HTTP/1.1\r\n\r\n");
  const std::string text = c.Read("GET /d");
  EXPECT_LT(text.find("GET /b"), text.find("GET /c"));
  EXPECT_LT(text.find("GET /c"), text.find("GET /d"));
}

TEST_F(HttpServerTest, RequestsInSingleBytes) {
  Start();
  Client c(server->port());
  for (const char b : std::string_view("POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
                                       "2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n")) {
    c.Send(std::string_view(&b, 1));
  }
  EXPECT_THAT(c.Read("hi!"), HasSubstr("POST /a hi!"));
}

TEST_F(HttpServerTest, HeadHasNoBodyAndOldClientsAreClosed) {
  Start();
  EXPECT_THAT(Ask("HEAD /a HTTP/1.1\r\nConnection: close\r\n\r\n"),
              ::testing::AllOf(HasSubstr("Content-Length: 8"), Not(HasSubstr("HEAD /a"))));
  EXPECT_THAT(Ask("GET /a HTTP/1.0\r\n\r\n"), HasSubstr("<closed>"));
}

TEST_F(HttpServerTest, WhatIsNotHttpIsRefused) {
  Start();
  EXPECT_THAT(Ask("\x16\x03\x01 hello\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Ask("GET / HTTP/7.1\r\n\r\n"), StartsWith("HTTP/1.1 505"));
  EXPECT_THAT(Ask("POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Ask("POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n"),
              StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Ask("GET / HTTP/1.1\r\n a: b\r\n: c\r\n\r\n"), StartsWith("HTTP/1.1 400"));
}

/// What two readers of the same bytes could cut differently.
TEST_F(HttpServerTest, AmbiguousFramingIsRefusedAndEndsTheConnection) {
  Start();
  for (const std::string_view head :
       {"Transfer-Encoding: gzip", "Transfer-Encoding: xchunked",
        "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Host: a\r\nHost: b"}) {
    const std::string answer = Ask("POST /a HTTP/1.1\r\n" + std::string(head) +
                                   "\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 400")) << head;
    EXPECT_THAT(answer, Not(HasSubstr("smuggled"))) << head;
    EXPECT_THAT(answer, HasSubstr("Connection: close")) << head;
  }
  EXPECT_THAT(Ask("POST /a HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
              StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(
      Ask("POST /a HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "hi"),
      HasSubstr("POST /a hi"));
}

TEST_F(HttpServerTest, TargetsWithSchemeAndHost) {
  Start();
  EXPECT_THAT(Ask("GET http://x:80/a?b HTTP/1.1\r\n\r\n", "GET /a"), HasSubstr("GET /a "));
  EXPECT_THAT(Ask("GET HTTPS://x HTTP/1.1\r\n\r\n", "GET /"), HasSubstr("GET / "));
}

TEST_F(HttpServerTest, BodiesMadeOnTheConnectionsThread) {
  Start();
  EXPECT_THAT(Ask("GET /made HTTP/1.1\r\n\r\n", "elsewhere"),
              ::testing::AllOf(HasSubstr("Content-Length: 14"), HasSubstr("made elsewhere")));
  EXPECT_THAT(Ask("GET /unmade HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 500"));
}

TEST_F(HttpServerTest, Limits) {
  options.limits.body_bytes = 1000;
  options.limits.url_bytes = 100;
  options.limits.header_bytes = 2000;
  Start();
  const std::string big(3000, 'x');
  EXPECT_THAT(Ask("POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n"), StartsWith("HTTP/1.1 413"));
  EXPECT_THAT(Ask("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + big),
              StartsWith("HTTP/1.1 413"));
  EXPECT_THAT(Ask("GET /" + std::string(101, 'x') + " HTTP/1.1\r\n\r\n"),
              StartsWith("HTTP/1.1 414"));
  EXPECT_THAT(Ask("GET /" + big + " HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 414"));
  EXPECT_THAT(Ask("GET / HTTP/1.1\r\nA: " + big + "\r\n\r\n"), StartsWith("HTTP/1.1 431"));
}

TEST_F(HttpServerTest, AllBodiesTogether) {
  options.limits.body_bytes = 1000;
  options.limits.all_body_bytes = 1500;
  Start();
  Client first(server->port());
  first.Send("POST /a HTTP/1.1\r\nContent-Length: 1000\r\n\r\n");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_THAT(Ask("POST /a HTTP/1.1\r\nContent-Length: 1000\r\n\r\n"), StartsWith("HTTP/1.1 503"));
  first.Close();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_THAT(Ask("POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi", "hi"),
              StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, RefusedByItsHeadBeforeTheBodyCame) {
  Start();
  EXPECT_THAT(Ask("POST /no HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + std::string(70000, 'x')),
              StartsWith("HTTP/1.1 401"));
}

TEST_F(HttpServerTest, ExpectContinue) {
  Start();
  Client c(server->port());
  c.Send("POST /a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  EXPECT_THAT(c.Read("\r\n\r\n"), StartsWith("HTTP/1.1 100"));
  c.Send("hi");
  EXPECT_THAT(c.Read("hi"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Ask("POST /a HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"),
              StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, SlowClients) {
  options.limits.header_s = options.limits.body_s = options.limits.idle_s = 0.2;
  Start();
  EXPECT_THAT(Ask("GET /a HTTP/1.1\r\nA:"), StartsWith("HTTP/1.1 408"));
  EXPECT_THAT(Ask("POST /a HTTP/1.1\r\nContent-Length: 5\r\n\r\nhi"), StartsWith("HTTP/1.1 408"));
  EXPECT_EQ(Ask(""), "<closed>");
}

TEST_F(HttpServerTest, DisconnectIsSeenAtOnce) {
  Start();
  {
    Client c(server->port());
    c.Send("GET /wait HTTP/1.1\r\n\r\n");
    handler.WaitWaiting();
  }
  EXPECT_TRUE(handler.WaitGone(1));
  handler.waiting->Send({});  // too late: nothing happens
}

TEST_F(HttpServerTest, ReaderThatIsTooSlowIsDropped) {
  options.limits.output_bytes = 1 << 20;
  Start();
  Client c(server->port());
  c.Send("GET /stream HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(handler.WaitGone(1));
}

TEST_F(HttpServerTest, WhatIsWrittenLaterIsMadeOnTheConnectionsThreadAndInOrder) {
  options.limits.output_bytes = 1100000;
  Start();
  const std::string whole = Ask("GET /later HTTP/1.1\r\nConnection: close\r\n\r\n");
  EXPECT_THAT(whole, HasSubstr("4\r\none \r\n4\r\ntwo \r\n6\r\nthree \r\n4\r\nfour\r\n0\r\n"));
  const std::string broken = Ask("GET /broken HTTP/1.1\r\n\r\n");
  EXPECT_THAT(broken, HasSubstr("<closed>"));
  EXPECT_THAT(broken, Not(HasSubstr("three")));
  options.limits.output_bytes = 900000;  // less than was promised
  server = nullptr;
  Start();
  EXPECT_THAT(Ask("GET /later HTTP/1.1\r\n\r\n"), Not(HasSubstr("two")));
}

TEST_F(HttpServerTest, WriteWithoutProgressEndsTheConnection) {
  options.limits.output_bytes = std::size_t{1} << 30;
  options.limits.write_s = 0.2;
  Start();
  Client c(server->port());
  c.Send("GET /wait HTTP/1.1\r\n\r\n");
  handler.WaitWaiting();
  HttpReply r;
  r.body = std::string(std::size_t{32} << 20, 'x');
  handler.waiting->Send(std::move(r));
  EXPECT_TRUE(handler.WaitGone(1));
}

TEST_F(HttpServerTest, HandlerThatFailsOrForgets) {
  Start();
  EXPECT_THAT(Ask("GET /throw HTTP/1.1\r\nConnection: close\r\n\r\n"), StartsWith("HTTP/1.1 500"));
  EXPECT_THAT(Ask("GET /drop HTTP/1.1\r\nConnection: close\r\n\r\n"), StartsWith("HTTP/1.1 500"));
}

TEST_F(HttpServerTest, ConnectionLimit) {
  options.limits.connections = 2;
  Start();
  Client a(server->port()), b(server->port());
  a.Send("GET /a HTTP/1.1\r\n\r\n");
  b.Send("GET /b HTTP/1.1\r\n\r\n");
  EXPECT_THAT(a.Read("GET /a"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(b.Read("GET /b"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Ask(""), StartsWith("HTTP/1.1 503"));
  a.Close();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_THAT(Ask("GET /c HTTP/1.1\r\n\r\n", "GET /c"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, ConnectionThatCannotBeTakenIsTheOnlyOneLost) {
  options.limits.connections = 1;
  Start();
  Client first(server->port());
  first.Send("GET /a HTTP/1.1\r\n\r\n");
  EXPECT_THAT(first.Read("GET /a"), StartsWith("HTTP/1.1 200"));
  handler.no_memory = true;
  EXPECT_EQ(Ask(""), "<closed>");
  EXPECT_THAT(Ask(""), StartsWith("HTTP/1.1 503"));
}

TEST_F(HttpServerTest, DrainingFinishesWhatRunsAndClosesTheRest) {
  Start();
  Client idle(server->port()), busy(server->port());
  busy.Send("GET /wait HTTP/1.1\r\n\r\n");
  handler.WaitWaiting();
  server->StopAccepting();
  EXPECT_EQ(idle.Read(), "<closed>");
  HttpReply r;
  r.body = "done";
  handler.waiting->Send(std::move(r));
  const std::string text = busy.Read("<never>");
  EXPECT_THAT(text, HasSubstr("Connection: close"));
  EXPECT_THAT(text, HasSubstr("done<closed>"));
}

TEST_F(HttpServerTest, PortThatIsTaken) {
  Start();
  HttpOptions second;
  second.port = server->port();
  const auto other = HttpServer::Start(second, handler);
  ASSERT_FALSE(other.ok());
  EXPECT_THAT(other.message(), HasSubstr(std::to_string(second.port)));
  second.host = "no.such.host.invalid";
  EXPECT_FALSE(HttpServer::Start(second, handler).ok());
}

TEST(Http, SmallThings) {
  EXPECT_EQ(RequestIdOf("abc-1.2_3:4"), "abc-1.2_3:4");
  EXPECT_EQ(RequestIdOf("a\nb").size(), 32u);
  EXPECT_EQ(RequestIdOf("").size(), 32u);
  EXPECT_EQ(RequestIdOf(std::string(129, 'a')).size(), 32u);
  EXPECT_NE(RandomId(), RandomId());
  EXPECT_TRUE(ConstantTimeEqual("abc", "abc"));
  EXPECT_FALSE(ConstantTimeEqual("abc", "abd"));
  EXPECT_FALSE(ConstantTimeEqual("abc", "ab"));
}

}  // namespace
}  // namespace k3::serve
