#include "k3/serve/http_client.h"

#include <fmt/format.h>

#include <utility>  // first: Asio of Boost 1.74 forgets it

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <charconv>
#include <exception>
#include <list>
#include <optional>
#include <unordered_map>

namespace k3::serve {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;

namespace {

HttpEnd EndOf(const beast::error_code& ec) {
  if (ec == beast::error::timeout) return HttpEnd::kTimeout;
  if (ec == asio::error::operation_aborted) return HttpEnd::kStopped;
  if (ec == http::error::body_limit || ec == http::error::header_limit ||
      ec == http::error::buffer_overflow) {
    return HttpEnd::kTooLarge;
  }
  if (ec == http::error::partial_message || ec == http::error::end_of_stream ||
      ec == asio::error::eof) {
    return HttpEnd::kCut;
  }
  return ec.category() == http::make_error_code(http::error::bad_version).category()
             ? HttpEnd::kBadHttp
             : HttpEnd::kReset;
}

beast::string_view Word(std::string_view s) { return {s.data(), s.size()}; }

/// One request from connecting to its last byte.
class Call : public std::enable_shared_from_this<Call> {
 public:
  using Done = std::function<void(Call*)>;

  Call(asio::io_context& io, HttpCall call, const HttpTarget& target,
       const HttpClientLimits& limits, std::shared_ptr<HttpCallSink> sink, Done done)
      : stream_(io), sink_(std::move(sink)), done_(std::move(done)), limits_(limits) {
    request_.version(11);
    request_.method_string(Word(call.method));
    request_.target(Word(target.base + call.path));
    request_.set(http::field::host, fmt::format("{}:{}", target.host, target.port));
    request_.set(http::field::connection, "close");
    for (const auto& [name, value] : call.headers) request_.set(Word(name), Word(value));
    request_.body() = std::move(call.body);
    request_.prepare_payload();
    parser_.body_limit(limits.body_bytes);
    parser_.header_limit(65536);
  }

  void Start(const tcp::resolver::results_type& where) {
    stream_.expires_after(
        std::chrono::milliseconds(static_cast<std::int64_t>(std::min(limits_.call_s, 1e6) * 1e3)));
    stream_.async_connect(where, [self = shared_from_this()](auto ec, const auto&) {
      if (ec == beast::error::timeout) return self->End(HttpEnd::kTimeout);
      if (ec) return self->End(self->stopped_ ? HttpEnd::kStopped : HttpEnd::kRefused);
      self->Write();
    });
  }
  void Stop() {
    stopped_ = true;
    stream_.close();
  }

 private:
  void Write() {
    beast::error_code ignored;
    stream_.socket().set_option(tcp::no_delay(true), ignored);
    http::async_write(stream_, request_, [self = shared_from_this()](auto ec, std::size_t) {
      // A server may refuse a body without reading it: its answer is worth a look all the same.
      if (ec == beast::error::timeout || self->stopped_) return self->End(EndOf(ec));
      self->ReadHead();
    });
  }
  void ReadHead() {
    http::async_read_header(
        stream_, buffer_, parser_, [self = shared_from_this()](auto ec, std::size_t) {
          if (ec) return self->End(EndOf(ec));
          self->sink_->OnHead(static_cast<int>(self->parser_.get().result_int()));
          self->ReadBody();
        });
  }
  /// The parser must not be eager: then a read would end only with the answer when that comes in
  /// chunks, and no part would be seen at its time.
  void ReadBody() {
    if (parser_.is_done()) return End(HttpEnd::kComplete);
    http::async_read_some(stream_, buffer_, parser_,
                          [self = shared_from_this()](auto ec, std::size_t) { self->OnPart(ec); });
  }
  void OnPart(const beast::error_code& ec) {
    std::string& body = parser_.get().body();
    const bool more = body.empty() || sink_->OnBody(body);
    body.clear();
    if (ec) return End(EndOf(ec));
    if (!more) return End(HttpEnd::kStopped);
    ReadBody();
  }
  void End(HttpEnd end) {
    if (done_ == nullptr) return;
    const auto keep = shared_from_this();
    const Done done = std::exchange(done_, nullptr);
    stream_.close();
    const auto sink = std::exchange(sink_, nullptr);
    done(this);
    sink->OnEnd(stopped_ ? HttpEnd::kStopped : end);
  }

  beast::tcp_stream stream_;
  beast::flat_buffer buffer_{std::size_t{1} << 20};
  http::request<http::string_body> request_;
  http::response_parser<http::string_body> parser_;
  std::shared_ptr<HttpCallSink> sink_;
  Done done_;
  const HttpClientLimits limits_;
  bool stopped_ = false;
};

class Collector final : public HttpCallSink {
 public:
  explicit Collector(HttpAnswer& answer) : answer_(answer) {}
  void OnHead(int status) override { answer_.status = status; }
  bool OnBody(std::string_view part) override {
    answer_.body += part;
    return true;
  }
  void OnEnd(HttpEnd end) override { answer_.end = end; }

 private:
  HttpAnswer& answer_;
};

}  // namespace

std::string_view Name(HttpEnd end) {
  constexpr std::string_view kNames[] = {"complete", "refused",  "reset",     "cut",
                                         "timeout",  "bad http", "too large", "stopped"};
  return kNames[static_cast<std::size_t>(end)];
}

Result<HttpTarget> ParseUrl(std::string_view url) {
  const auto bad = [url](std::string_view why) {
    return Error{Code::kInvalidArgument, fmt::format("URL \"{}\": {}", url, why)};
  };
  for (const char c : url) {
    if (c <= ' ' || c == 127) return bad("has a blank or a control byte");
  }
  if (url.starts_with("https://")) return bad("https is not spoken here, expected http://");
  constexpr std::string_view kScheme = "http://";
  if (!url.starts_with(kScheme)) return bad("expected http://HOST[:PORT][/PATH]");
  std::string_view rest = url.substr(kScheme.size());
  HttpTarget target;
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  target.base = rest.substr(slash);
  while (target.base.ends_with('/')) target.base.pop_back();
  std::string_view host = rest.substr(0, slash), port;
  if (url.find_first_of("@?#") != url.npos) return bad("found one of @ ? #");
  if (host.starts_with('[')) {
    const std::size_t end = host.find(']');
    if (end == host.npos) return bad("no ] after [");
    port = host.substr(end + 1);
    host = host.substr(1, end - 1);
    if (!port.empty() && !port.starts_with(':')) return bad("expected :PORT after ]");
  } else if (const std::size_t colon = host.find(':'); colon != host.npos) {
    port = host.substr(colon);
    host = host.substr(0, colon);
  }
  if (host.empty()) return bad("has no host");
  target.host = host;
  if (!port.empty()) {
    port.remove_prefix(1);
    const auto [end, ec] = std::from_chars(port.data(), port.data() + port.size(), target.port);
    if (ec != std::errc() || end != port.data() + port.size() || target.port == 0) {
      return bad("expected a port from 1 to 65535");
    }
  }
  return target;
}

struct HttpClient::Impl {
  Impl(HttpTarget t, HttpClientLimits l) : target(std::move(t)), limits(l) {}

  void StopAll() {
    cancelled = true;
    for (asio::steady_timer& timer : timers) timer.cancel();
    const auto list = calls;  // they leave the map as they end
    for (const auto& [key, call] : list) call->Stop();
  }

  const HttpTarget target;
  const HttpClientLimits limits;
  asio::io_context io{1};
  tcp::resolver::results_type where;
  std::unordered_map<Call*, std::shared_ptr<Call>> calls;
  std::list<asio::steady_timer> timers;
  bool cancelled = false;
};

HttpClient::HttpClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpClient::~HttpClient() = default;

Result<std::unique_ptr<HttpClient>> HttpClient::Create(const HttpTarget& target,
                                                       const HttpClientLimits& limits) {
  auto impl = std::make_unique<Impl>(target, limits);
  boost::system::error_code ec;
  tcp::resolver resolver(impl->io);
  impl->where = resolver.resolve(target.host, std::to_string(target.port), ec);
  if (ec || impl->where.empty()) {
    return Error{Code::kIo, fmt::format("{}: {}", target.host, ec.message())};
  }
  return std::unique_ptr<HttpClient>(new HttpClient(std::move(impl)));
}

void HttpClient::Start(HttpCall call, std::shared_ptr<HttpCallSink> sink) {
  Impl* raw = impl_.get();
  const auto made =
      std::make_shared<Call>(raw->io, std::move(call), raw->target, raw->limits, std::move(sink),
                             [raw](Call* c) { raw->calls.erase(c); });
  raw->calls.emplace(made.get(), made);
  made->Start(raw->where);
  if (raw->cancelled) made->Stop();
}

void HttpClient::At(Clock::time_point when, std::function<void()> act) {
  Impl* raw = impl_.get();
  const auto it = raw->timers.emplace(raw->timers.end(), raw->io);
  it->expires_at(when);
  it->async_wait([raw, it, act = std::move(act)](auto ec) {
    raw->timers.erase(it);
    if (!ec && !raw->cancelled) act();
  });
}

Status HttpClient::Run(const std::atomic<bool>* cancel) {
  try {
    impl_->io.restart();
    while (!impl_->io.stopped()) {
      impl_->io.run_for(std::chrono::milliseconds(50));
      if (cancel != nullptr && cancel->load() && !impl_->cancelled) impl_->StopAll();
    }
    return {};
  } catch (const std::exception& e) {
    return Error{Code::kIo,
                 fmt::format("{}:{}: {}", impl_->target.host, impl_->target.port, e.what())};
  }
}

Result<HttpAnswer> Fetch(const HttpTarget& target, HttpCall call, const HttpClientLimits& limits,
                         const std::atomic<bool>* cancel) {
  K3_ASSIGN(const auto client, HttpClient::Create(target, limits));
  HttpAnswer answer;
  client->Start(std::move(call), std::make_shared<Collector>(answer));
  K3_TRY(client->Run(cancel));
  return answer;
}

}  // namespace k3::serve
