#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/read.hpp>
#include <chrono>
#include <exception>
#include <utility>

#include "k3/serve/http_session_internal.h"

namespace k3::serve::internal {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

constexpr std::size_t kReadAhead = 65536;  // of the next request while one is answered
constexpr std::size_t kLingerBytes = 1 << 20;
constexpr double kLingerSeconds = 2;

std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

std::string_view Text(beast::string_view s) { return {s.data(), s.size()}; }

/// The path and query of a target that has a scheme and host too, as proxies send it.
std::string_view OriginForm(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!beast::iequals(beast::string_view(target.data(), std::min(target.size(), scheme.size())),
                        beast::string_view(scheme.data(), scheme.size()))) {
      continue;
    }
    const std::size_t path = target.find_first_of("/?", scheme.size());
    return path == target.npos || target[path] == '?' ? "/" : target.substr(path);
  }
  return target;
}

/// What makes it unclear where the request ends or whom it is for; empty: nothing. Beast reads an
/// unknown coding as a request without a body, and what follows as the next one.
std::string_view Ambiguity(const http::request<http::string_body>& head) {
  if (head.count(http::field::host) > 1) return "found several Host fields, expected one";
  const std::size_t codings = head.count(http::field::transfer_encoding);
  if (codings == 0) return {};
  if (codings > 1 || !beast::iequals(head[http::field::transfer_encoding], "chunked")) {
    return "Transfer-Encoding: expected chunked and nothing else";
  }
  return head.version() < 11 ? "Transfer-Encoding: not in HTTP/1.0" : std::string_view();
}

}  // namespace

Session::Session(asio::ip::tcp::socket socket, std::shared_ptr<Shared> shared)
    : socket_(std::move(socket)),
      timer_(socket_.get_executor()),
      shared_(std::move(shared)),
      buffer_(shared_->options.limits.header_bytes + 2 * kReadAhead) {
  ++shared_->connections;
}

Session::~Session() {
  shared_->body_bytes -= reserved_;
  --shared_->connections;
  const std::lock_guard lock(shared_->mutex);
  shared_->sessions.erase(this);
}

void Session::Start() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    self->Arm(self->limits().idle_s);
    self->WatchPeer();
  });
}

void Session::StartRefused(HttpReply reply) {
  asio::post(socket_.get_executor(), [self = shared_from_this(), r = std::move(reply)]() mutable {
    self->phase_ = Phase::kHandling;
    self->keep_alive_ = false;
    self->answering_ = self->answer_ended_ = true;
    self->Queue(self->Head(r, false) + r.body);
  });
}

/// One read is always under way between requests and while one is handled: its end tells that the
/// peer has gone.
void Session::WatchPeer() {
  if (watching_ || phase_ == Phase::kClosed || buffer_.size() >= kReadAhead) return;
  watching_ = true;
  socket_.async_read_some(buffer_.prepare(4096),
                          [self = shared_from_this()](auto ec, auto n) { self->OnPeer(ec, n); });
}

void Session::OnPeer(beast::error_code ec, std::size_t n) {
  watching_ = false;
  if (phase_ == Phase::kClosed) return;
  if (ec == asio::error::operation_aborted && std::exchange(stop_watching_, false)) {
    return ReadHeader();
  }
  stop_watching_ = false;
  if (ec) return Close();
  if (phase_ == Phase::kLinger) {
    lingered_ += n;
    return lingered_ > kLingerBytes ? Close() : WatchPeer();
  }
  buffer_.commit(n);
  if (phase_ == Phase::kIdle) return ReadHeader();
  WatchPeer();
}

void Session::ReadHeader() {
  if (shared_->draining) return Close();
  phase_ = Phase::kHeader;
  parser_.emplace();
  parser_->header_limit(static_cast<std::uint32_t>(limits().header_bytes));
  parser_->body_limit(limits().body_bytes);
  request_id_ = RandomId();
  is_head_ = http_1_0_ = false;
  keep_alive_ = true;
  Arm(limits().header_s);
  http::async_read_header(socket_, buffer_, *parser_,
                          [self = shared_from_this()](auto ec, auto) { self->OnHeader(ec); });
}

void Session::OnHeader(beast::error_code ec) {
  if (ec) return OnReadError(ec);
  const auto& head = parser_->get();
  is_head_ = head.method() == http::verb::head;
  http_1_0_ = head.version() < 11;
  keep_alive_ = head.keep_alive();
  request_id_ = RequestIdOf(Text(head["X-Request-Id"]));
  if (const std::string_view why = Ambiguity(head); !why.empty()) return Refuse(400, why);
  if (head.target().size() > limits().url_bytes) {
    return Refuse(414, fmt::format("the URL has {} bytes, expected at most {}",
                                   head.target().size(), limits().url_bytes));
  }
  const HttpRequest request = TakeHead();
  if (auto refused = shared_->handler.Screen(request)) {
    phase_ = Phase::kHandling;
    keep_alive_ = keep_alive_ && parser_->is_done();
    answering_ = answer_ended_ = true;
    Arm(0);
    return Queue(Head(*refused, false) + (is_head_ ? "" : refused->body));
  }
  if (parser_->is_done()) return Handle();
  if (!ReserveBody()) {
    return Refuse(503, "too much request data at once, try again later");
  }
  if (!http_1_0_ && beast::iequals(head[http::field::expect], "100-continue")) {
    static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
    return asio::async_write(socket_, asio::buffer(kContinue),
                             [self = shared_from_this()](auto error, auto) {
                               return error ? self->Close() : self->ReadBody();
                             });
  }
  ReadBody();
}

/// A body of unknown length counts as the largest one.
bool Session::ReserveBody() {
  const auto length = parser_->content_length();
  reserved_ = length ? static_cast<std::size_t>(*length) : limits().body_bytes;
  return shared_->body_bytes.fetch_add(reserved_) + reserved_ <= limits().all_body_bytes;
}

void Session::ReadBody() {
  phase_ = Phase::kBody;
  Arm(limits().body_s);
  http::async_read(socket_, buffer_, *parser_,
                   [self = shared_from_this()](auto ec, auto) { self->OnBody(ec); });
}

void Session::OnBody(beast::error_code ec) {
  if (ec) return OnReadError(ec);
  Handle();
}

void Session::OnReadError(beast::error_code ec) {
  if (timed_out_) {
    timed_out_ = false;
    return Refuse(408, "the request took too long to arrive");
  }
  if (ec == http::error::header_limit || ec == http::error::buffer_overflow) {
    const bool in_url = phase_ == Phase::kHeader && parser_->get().target().empty();
    return Refuse(in_url ? 414 : 431, in_url ? "the URL is too long" : "the header is too large");
  }
  if (ec == http::error::body_limit) {
    return Refuse(413, fmt::format("the body is larger than {} bytes", limits().body_bytes));
  }
  const bool syntax = ec.category() == http::make_error_code(http::error::bad_value).category();
  if (!syntax || ec == http::error::end_of_stream || ec == http::error::partial_message) {
    return Close();
  }
  if (ec == http::error::bad_version)
    return Refuse(505, "expected HTTP/1.1, and lines that end with CR LF");
  Refuse(400, "this is not HTTP: " + ec.message());
}

HttpRequest Session::TakeHead() {
  const auto& head = parser_->get();
  HttpRequest r;
  r.method = Text(head.method_string());
  const std::string target(OriginForm(Text(head.target())));
  const std::size_t mark = target.find('?');
  r.path = target.substr(0, mark);
  if (mark != target.npos) r.query = target.substr(mark + 1);
  for (const auto& field : head) {
    r.headers.emplace_back(Lower(Text(field.name_string())), Text(field.value()));
  }
  r.id = request_id_;
  return r;
}

void Session::Handle() {
  phase_ = Phase::kHandling;
  Arm(0);
  HttpRequest request = TakeHead();
  request.body = std::move(parser_->get().body());
  parser_.reset();
  answering_ = answer_ended_ = false;
  flow_ = std::make_shared<Flow>();
  const auto out = MakeExchange(shared_from_this(), flow_, shared_->handler);
  WatchPeer();
  try {
    shared_->handler.Handle(std::move(request), out);
  } catch (const std::exception& e) {
    spdlog::error("request {}: {}", request_id_, e.what());
    out->Send(shared_->handler.Refusal(500, "something went wrong in the server"));
  }
}

void Session::Refuse(int status, std::string_view message) {
  phase_ = Phase::kHandling;
  keep_alive_ = false;
  answering_ = answer_ended_ = true;
  Arm(0);
  const HttpReply reply = shared_->handler.Refusal(status, message);
  Queue(Head(reply, false) + (is_head_ ? "" : reply.body));
}

void Session::Arm(double seconds) {
  ++timer_use_;
  if (seconds <= 0) {
    timer_.cancel();
    return;
  }
  timer_.expires_after(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)));
  timer_.async_wait([self = shared_from_this(), use = timer_use_](auto ec) {
    if (!ec && use == self->timer_use_) self->OnTimer();
  });
}

void Session::OnTimer() {
  if (phase_ == Phase::kHeader || phase_ == Phase::kBody) {
    timed_out_ = true;
    beast::error_code ignored;
    socket_.cancel(ignored);
    return;
  }
  Close();  // idle, or a peer that does not read
}

std::string Session::Head(const HttpReply& reply, bool streamed) {
  keep_alive_ = keep_alive_ && !shared_->draining;
  chunked_ = streamed && !http_1_0_;
  if (streamed && http_1_0_) keep_alive_ = false;
  const auto reason =
      http::obsolete_reason(http::int_to_status(static_cast<unsigned>(reply.status)));
  std::string head = fmt::format("HTTP/1.1 {} {}\r\nServer: k3\r\nX-Request-Id: {}\r\n",
                                 reply.status, Text(reason), request_id_);
  if (reply.status != 204) head += "Content-Type: " + reply.content_type + "\r\n";
  if (chunked_) head += "Transfer-Encoding: chunked\r\n";
  if (!streamed && reply.status != 204) {
    head += fmt::format("Content-Length: {}\r\n", reply.body.size());
  }
  for (const auto& [name, value] : reply.headers) head += fmt::format("{}: {}\r\n", name, value);
  head += keep_alive_ ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n";
  return head;
}

void Session::PostSend(HttpReply reply) {
  asio::post(socket_.get_executor(), [self = shared_from_this(), r = std::move(reply)]() mutable {
    if (self->phase_ == Phase::kClosed || self->answering_) return;
    self->answering_ = self->answer_ended_ = true;
    if (r.make_body) self->MakeBody(r);
    self->Queue(self->Head(r, false) + (self->is_head_ ? "" : r.body));
  });
}

void Session::MakeBody(HttpReply& reply) {
  try {
    reply.body = std::exchange(reply.make_body, nullptr)();
  } catch (const std::exception& e) {
    spdlog::error("request {}: {}", request_id_, e.what());
    reply = shared_->handler.Refusal(500, "something went wrong in the server");
  }
}

void Session::PostBegin(HttpReply head) {
  asio::post(socket_.get_executor(), [self = shared_from_this(), r = std::move(head)]() mutable {
    if (self->phase_ == Phase::kClosed || self->answering_) return;
    self->answering_ = true;
    self->Queue(self->Head(r, true));
  });
  PostWrite(std::move(head.body));
}

void Session::PostWrite(std::string data) {
  if (data.empty()) return;
  asio::post(socket_.get_executor(), [self = shared_from_this(), d = std::move(data)] {
    if (self->phase_ == Phase::kClosed || !self->answering_) return;
    self->flow_queued_ += d.size();
    self->Queue(self->chunked_ ? fmt::format("{:x}\r\n{}\r\n", d.size(), d) : d);
  });
}

void Session::PostWriteLater(std::size_t about, std::function<std::string()> make) {
  asio::post(socket_.get_executor(), [self = shared_from_this(), about, m = std::move(make)] {
    if (self->phase_ == Phase::kClosed || !self->answering_) return;
    std::string data;
    try {
      data = m();
    } catch (const std::exception& e) {
      spdlog::error("request {}: {}", self->request_id_, e.what());
      return self->Close();
    }
    if (self->flow_ != nullptr) self->flow_->unsent += data.size() - about;
    if (data.empty()) return;
    self->flow_queued_ += data.size();
    self->Queue(self->chunked_ ? fmt::format("{:x}\r\n{}\r\n", data.size(), data)
                               : std::move(data));
  });
}

void Session::PostEnd() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    if (self->phase_ == Phase::kClosed) return;
    self->answer_ended_ = true;
    self->Queue(self->chunked_ ? "0\r\n\r\n" : "");
  });
}

void Session::PostClose() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] { self->Close(); });
}

void Session::PostCloseIdle() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    if (self->phase_ == Phase::kIdle) self->Close();
  });
}

void Session::Queue(std::string bytes) {
  out_ += bytes;
  if (!writing_) WriteMore();
}

void Session::WriteMore() {
  if (out_.empty()) {
    if (answer_ended_) AnswerDone();
    return;
  }
  writing_ = true;
  sending_ = std::exchange(out_, {});
  Arm(limits().write_s);
  asio::async_write(socket_, asio::buffer(sending_),
                    [self = shared_from_this(), flow = std::exchange(flow_queued_, 0)](
                        auto ec, auto) { self->OnWritten(ec, flow); });
}

void Session::OnWritten(beast::error_code ec, std::size_t flow_bytes) {
  writing_ = false;
  if (phase_ == Phase::kClosed) return;
  if (ec) return Close();
  if (flow_ != nullptr) flow_->unsent -= flow_bytes;
  Arm(0);
  WriteMore();
}

void Session::AnswerDone() {
  EndFlow(false);
  answering_ = answer_ended_ = false;
  shared_->body_bytes -= std::exchange(reserved_, 0);
  if (!keep_alive_) return Linger();
  phase_ = Phase::kIdle;
  if (shared_->draining) return Close();
  Arm(limits().idle_s);
  if (buffer_.size() == 0) return WatchPeer();
  // The next request came while this one was answered: read what is there.
  if (!watching_) return ReadHeader();
  stop_watching_ = true;
  beast::error_code ignored;
  socket_.cancel(ignored);
}

/// Closing with unread bytes would make the system throw the answer away, so the rest is read
/// first.
void Session::Linger() {
  phase_ = Phase::kLinger;
  beast::error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  buffer_.clear();
  Arm(kLingerSeconds);
  WatchPeer();
}

void Session::Close() {
  if (phase_ == Phase::kClosed) return;
  phase_ = Phase::kClosed;
  Arm(0);
  beast::error_code ignored;
  socket_.close(ignored);
  EndFlow(true);
}

void Session::EndFlow(bool gone) {
  if (flow_ == nullptr) return;
  const auto flow = std::exchange(flow_, nullptr);
  std::function<void()> tell;
  {
    const std::lock_guard lock(flow->mutex);
    flow->closed = true;
    tell = std::exchange(flow->gone, nullptr);
  }
  if (gone && tell) tell();
}

}  // namespace k3::serve::internal
