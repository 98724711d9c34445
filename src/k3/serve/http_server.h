// An HTTP/1.1 server: sockets, limits and time-outs. What is answered is the handler's business.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "k3/base/status.h"
#include "k3/serve/http.h"

namespace k3::serve {

struct HttpLimits {
  std::size_t connections = 512;                        // more are told 503
  std::size_t header_bytes = 32768;                     // 431
  std::size_t url_bytes = 4096;                         // 414
  std::size_t body_bytes = std::size_t{16} << 20;       // 413
  std::size_t all_body_bytes = std::size_t{256} << 20;  // of all requests being read: 503
  std::size_t output_bytes = std::size_t{4} << 20;      // unsent bytes of one stream
  double header_s = 10;  // from the first byte of a request to the end of its header: 408
  double body_s = 60;    // for the whole body: 408
  double write_s = 30;   // without progress of a write: the connection is closed
  double idle_s = 75;    // between requests: closed
};

struct HttpOptions {
  std::string host = "127.0.0.1";  // an address, or a name that resolves to one
  std::uint16_t port = 8080;       // 0: any free one
  int io_threads = 2;
  HttpLimits limits;
};

/// Runs in threads of its own from Start to Stop. A peer that closes its connection, or only its
/// sending half, has gone: that is noticed at once, whatever the request is waiting for.
class HttpServer {
 public:
  /// `handler` outlives the server. An error names host, port and the system's reason.
  static Result<std::unique_ptr<HttpServer>> Start(const HttpOptions& options,
                                                   HttpHandler& handler);
  ~HttpServer();  // Stop

  std::uint16_t port() const;
  std::string url() const;
  std::size_t connections() const;

  /// No new connections and no further request on those that are open. Answers go on.
  void StopAccepting();
  /// Closes every connection and ends the threads.
  void Stop();

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3::serve
