#include "k3/serve/http_server.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "k3/serve/http_session_internal.h"

namespace k3::serve {

namespace asio = boost::asio;
using asio::ip::tcp;
using internal::Session;
using internal::Shared;

struct HttpServer::Impl {
  explicit Impl(std::shared_ptr<Shared> s)
      : shared(std::move(s)),
        acceptor(asio::make_strand(shared->io)),
        retry(acceptor.get_executor()),
        work(asio::make_work_guard(shared->io)) {}

  Status Listen();
  void Accept();
  void OnAccept(boost::system::error_code ec, tcp::socket socket);
  void Welcome(tcp::socket socket);
  void RunThread();
  void ForEach(void (Session::*act)());

  std::shared_ptr<Shared> shared;
  tcp::acceptor acceptor;
  asio::steady_timer retry;
  asio::executor_work_guard<asio::io_context::executor_type> work;
  std::vector<std::thread> threads;
  std::uint16_t port = 0;
  bool stopped = false;
};

Status HttpServer::Impl::Listen() {
  const HttpOptions& o = shared->options;
  const auto fail = [&o](const boost::system::error_code& ec) {
    return Error{Code::kIo,
                 fmt::format("cannot listen on {}:{}: {}", o.host, o.port, ec.message())};
  };
  boost::system::error_code ec;
  tcp::resolver resolver(shared->io);
  const auto found = resolver.resolve(o.host, std::to_string(o.port), tcp::resolver::passive, ec);
  if (ec) return fail(ec);
  const tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor.open(endpoint.protocol(), ec);
  if (ec) return fail(ec);
  acceptor.set_option(asio::socket_base::reuse_address(true), ec);
  if (!ec) acceptor.bind(endpoint, ec);
  if (!ec) acceptor.listen(asio::socket_base::max_listen_connections, ec);
  if (ec) return fail(ec);
  port = acceptor.local_endpoint(ec).port();
  return ec ? Status(fail(ec)) : Status();
}

void HttpServer::Impl::Accept() {
  acceptor.async_accept(asio::make_strand(shared->io),
                        [this](auto ec, tcp::socket socket) { OnAccept(ec, std::move(socket)); });
}

void HttpServer::Impl::OnAccept(boost::system::error_code ec, tcp::socket socket) {
  if (shared->draining || ec == asio::error::operation_aborted) return;
  if (ec) {  // out of file descriptors, say: try again a little later
    spdlog::warn("accepting a connection: {}", ec.message());
    retry.expires_after(std::chrono::milliseconds(100));
    retry.async_wait([this](auto error) {
      if (!error) Accept();
    });
    return;
  }
  try {
    Welcome(std::move(socket));
  } catch (const std::exception& e) {  // without memory for this one, the next are still accepted
    spdlog::error("a connection was dropped: {}", e.what());
  }
  Accept();
}

void HttpServer::Impl::Welcome(tcp::socket socket) {
  boost::system::error_code ignored;
  socket.set_option(tcp::no_delay(true), ignored);
  const std::size_t limit = shared->options.limits.connections;
  const std::size_t open = shared->connections;
  if (open >= limit + 64) return;  // closed without a word
  const auto session = std::make_shared<Session>(std::move(socket), shared);
  {
    const std::lock_guard lock(shared->mutex);
    shared->sessions.emplace(session.get(), session);
  }
  if (open < limit) return session->Start();
  session->StartRefused(shared->handler.Refusal(503, "too many connections, try again later"));
}

void HttpServer::Impl::RunThread() {
  for (;;) {
    try {
      shared->io.run();
      return;
    } catch (const std::exception& e) {  // memory ran out in one connection: the others go on
      spdlog::error("a connection failed: {}", e.what());
    }
  }
}

void HttpServer::Impl::ForEach(void (Session::*act)()) {
  const std::lock_guard lock(shared->mutex);
  for (const auto& [key, weak] : shared->sessions) {
    // Not the last owner while the lock is held: the destructor wants the lock too.
    if (auto session = weak.lock()) {
      ((*session).*act)();
      asio::post(shared->io, [keep = std::move(session)] {});
    }
  }
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpServer::~HttpServer() { Stop(); }

Result<std::unique_ptr<HttpServer>> HttpServer::Start(const HttpOptions& options,
                                                      HttpHandler& handler) {
  try {
    auto impl = std::make_unique<Impl>(std::make_shared<Shared>(options, handler));
    K3_TRY(impl->Listen());
    Impl* raw = impl.get();
    asio::post(raw->acceptor.get_executor(), [raw] { raw->Accept(); });
    std::unique_ptr<HttpServer> server(new HttpServer(std::move(impl)));
    for (int i = 0; i < options.io_threads; ++i) {
      raw->threads.emplace_back([raw] { raw->RunThread(); });
    }
    return server;
  } catch (const std::exception& e) {
    return Error{Code::kIo, fmt::format("cannot start the HTTP server: {}", e.what())};
  }
}

std::uint16_t HttpServer::port() const { return impl_->port; }

std::string HttpServer::url() const {
  const std::string& host = impl_->shared->options.host;
  const bool bare_ipv6 = host.find(':') != host.npos && !host.starts_with('[');
  return fmt::format("http://{}:{}", bare_ipv6 ? "[" + host + "]" : host, impl_->port);
}

std::size_t HttpServer::connections() const { return impl_->shared->connections; }

void HttpServer::StopAccepting() {
  if (impl_->shared->draining.exchange(true)) return;
  Impl* raw = impl_.get();
  asio::post(raw->acceptor.get_executor(), [raw] {
    boost::system::error_code ignored;
    raw->acceptor.close(ignored);
    raw->retry.cancel();
  });
  raw->ForEach(&Session::PostCloseIdle);
}

void HttpServer::Stop() {
  if (std::exchange(impl_->stopped, true)) return;
  StopAccepting();
  impl_->ForEach(&Session::PostClose);
  impl_->work.reset();
  for (std::thread& thread : impl_->threads) thread.join();
  impl_->threads.clear();
}

}  // namespace k3::serve
