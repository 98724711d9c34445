// One connection. Internal: the only header that knows Boost.
#pragma once

#include <utility>  // first: Asio of Boost 1.74 forgets it

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "k3/serve/http.h"
#include "k3/serve/http_server.h"

namespace k3::serve::internal {

class Session;

/// What all connections share. Kept alive by them.
struct Shared {
  Shared(const HttpOptions& o, HttpHandler& h) : options(o), handler(h) {}

  const HttpOptions options;
  HttpHandler& handler;
  boost::asio::io_context io;
  std::atomic<bool> draining{false};
  std::atomic<std::size_t> connections{0};
  std::atomic<std::size_t> body_bytes{0};  // promised to bodies that are being read or handled
  std::mutex mutex;
  std::unordered_map<Session*, std::weak_ptr<Session>> sessions;  // guarded by mutex
};

/// The part of an answer that both its writer and its connection look at.
struct Flow {
  std::atomic<bool> closed{false};
  std::atomic<std::size_t> unsent{0};
  std::mutex mutex;
  std::function<void()> gone;  // guarded by mutex
};

/// All functions but the constructor, Start and the Post ones run on the connection's strand.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(boost::asio::ip::tcp::socket socket, std::shared_ptr<Shared> shared);
  ~Session();

  void Start();
  void StartRefused(HttpReply reply);  // answers without reading, then closes
  void PostSend(HttpReply reply);
  void PostBegin(HttpReply head);
  void PostWrite(std::string data);
  void PostWriteLater(std::size_t about, std::function<std::string()> make);
  void PostEnd();
  void PostClose();      // at once
  void PostCloseIdle();  // unless a request is being handled

  const HttpLimits& limits() const { return shared_->options.limits; }

 private:
  enum class Phase { kIdle, kHeader, kBody, kHandling, kLinger, kClosed };
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  void WatchPeer();
  void OnPeer(boost::beast::error_code ec, std::size_t n);
  void ReadHeader();
  void OnHeader(boost::beast::error_code ec);
  bool ReserveBody();
  void ReadBody();
  void OnBody(boost::beast::error_code ec);
  void OnReadError(boost::beast::error_code ec);
  void Handle();
  HttpRequest TakeHead();
  void Refuse(int status, std::string_view message);
  void Arm(double seconds);
  void OnTimer();
  void MakeBody(HttpReply& reply);
  void Queue(std::string bytes);
  void WriteMore();
  void OnWritten(boost::beast::error_code ec, std::size_t flow_bytes);
  void AnswerDone();
  void Linger();
  void Close();
  void EndFlow(bool gone);
  std::string Head(const HttpReply& reply, bool streamed);

  boost::asio::ip::tcp::socket socket_;
  boost::asio::steady_timer timer_;
  std::uint64_t timer_use_ = 0;
  std::shared_ptr<Shared> shared_;
  boost::beast::flat_buffer buffer_;
  std::optional<Parser> parser_;
  Phase phase_ = Phase::kIdle;
  bool watching_ = false;
  bool timed_out_ = false;
  bool stop_watching_ = false;  // the read was cancelled to parse what has come
  std::string request_id_;
  bool is_head_ = false, http_1_0_ = false, keep_alive_ = true;
  bool chunked_ = false;
  bool answering_ = false;     // Send or Begin came
  bool answer_ended_ = false;  // all of it is in out_
  std::string out_, sending_;
  bool writing_ = false;
  std::size_t flow_queued_ = 0, reserved_ = 0, lingered_ = 0;
  std::shared_ptr<Flow> flow_;
};

/// Where a handler's answer goes; without one the peer is told that it is our fault.
std::shared_ptr<Responder> MakeExchange(std::shared_ptr<Session> session,
                                        std::shared_ptr<Flow> flow, HttpHandler& handler);

}  // namespace k3::serve::internal
