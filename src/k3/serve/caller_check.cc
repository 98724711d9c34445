#include "k3/serve/caller_check.h"

#include <fmt/format.h>

#include <boost/beast/core/string.hpp>

#include <algorithm>
#include <utility>

#include "k3/io/json.h"

namespace k3::serve {
namespace {

bool SameIgnoringCase(std::string_view a, std::string_view b) {
  using View = boost::beast::string_view;
  return boost::beast::iequals(View(a.data(), a.size()), View(b.data(), b.size()));
}

/// Without ":PORT"; empty when what follows the name is no port.
std::string_view HostName(std::string_view host) {
  const std::size_t bracket = host.starts_with('[') ? host.find(']') : 0;
  if (bracket == host.npos) return {};
  const std::size_t colon = host.find(':', bracket);
  const std::string_view port = colon == host.npos ? "" : host.substr(colon + 1);
  const bool digits =
      std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; });
  return digits ? host.substr(0, colon) : std::string_view();
}

ApiError Forbidden(std::string code, std::string message) {
  ApiError error;
  error.status = 403;
  error.code = std::move(code);
  error.message = std::move(message);
  return error;
}

}  // namespace

bool IsAllowedHost(std::string_view host, const std::vector<std::string>& names) {
  const std::string_view name = HostName(host);
  const auto same = [name](std::string_view allowed) { return SameIgnoringCase(name, allowed); };
  return !name.empty() && (same("localhost") || same("127.0.0.1") || same("[::1]") ||
                           std::any_of(names.begin(), names.end(), same));
}

ApiStatus CheckCaller(const HttpRequest& head, const std::vector<std::string>& names,
                      std::string_view cors_origin) {
  const std::string_view host = head.Header("host");
  if (!host.empty() && !IsAllowedHost(host, names)) {
    return Forbidden("host_not_allowed",
                     fmt::format("Host: found {}, expected localhost, 127.0.0.1, [::1] or a name "
                                 "given by --allowed-host",
                                 Printable(host)));
  }
  const bool reads = head.method == "GET" || head.method == "HEAD" || head.method == "OPTIONS";
  const std::string_view origin = head.Header("origin");
  if (reads || origin.empty() || cors_origin == "*" || origin == cors_origin) return std::nullopt;
  const std::size_t scheme = origin.find("://");
  const bool web = origin.starts_with("http://") || origin.starts_with("https://");
  if (web && IsAllowedHost(origin.substr(scheme + 3), names)) return std::nullopt;
  return Forbidden("origin_not_allowed",
                   fmt::format("Origin: pages of {} may not call; --cors or --allowed-host lets "
                               "them",
                               Printable(origin)));
}

ApiStatus CheckContentEncoding(const HttpRequest& head) {
  for (const auto& [name, value] : head.headers) {
    if (name != "content-encoding" || value.empty() || SameIgnoringCase(value, "identity")) {
      continue;
    }
    ApiError error;
    error.status = 415;
    error.code = "unsupported_content_encoding";
    error.message =
        fmt::format("Content-Encoding: found {}, expected identity: bodies are read uncompressed",
                    Printable(value));
    return error;
  }
  return std::nullopt;
}

}  // namespace k3::serve
