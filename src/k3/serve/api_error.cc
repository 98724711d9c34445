#include "k3/serve/api_error.h"

#include <fmt/format.h>

#include <utility>

#include "k3/serve/json_out.h"

namespace k3::serve {

std::string ErrorType(int status, Dialect dialect) {
  const bool openai = dialect == Dialect::kOpenAi;
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return openai ? "invalid_request_error" : "permission_error";
    case 404:
      return openai ? "invalid_request_error" : "not_found_error";
    case 413:
      return openai ? "invalid_request_error" : "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return openai ? "service_unavailable_error" : "overloaded_error";
    case 504:
      return "timeout_error";
    default:
      if (status < 500) return "invalid_request_error";
      return openai ? "server_error" : "api_error";
  }
}

std::string ErrorBody(const ApiError& e, Dialect dialect) {
  const auto text_or_null = [](const std::string& s) { return s.empty() ? Json() : Json(s); };
  const Json error{{"message", e.message},
                   {"type", ErrorType(e.status, dialect)},
                   {"param", text_or_null(e.param)},
                   {"code", text_or_null(e.code)}};
  if (dialect == Dialect::kOpenAi) return Dump({{"error", error}});
  return Dump({{"type", "error"}, {"error", error}});
}

HttpReply ErrorReply(const ApiError& e, Dialect dialect) {
  HttpReply reply;
  reply.status = e.status;
  reply.body = ErrorBody(e, dialect);
  if (e.retry_after_s > 0)
    reply.headers.emplace_back("Retry-After", fmt::to_string(e.retry_after_s));
  if (e.status == 401) reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  return reply;
}

ApiError BadField(std::string param, std::string message) {
  ApiError e;
  e.message = param.empty() ? std::move(message) : fmt::format("{}: {}", param, message);
  e.param = std::move(param);
  return e;
}

ApiError FromRequest(const chat::RequestError& error) {
  ApiError e = BadField(error.param, error.message);
  if (error.code == Code::kUnsupported) e.code = "unsupported";
  return e;
}

ApiError FromEngine(const Error& error) {
  ApiError e;
  e.message = error.message;
  switch (error.code) {
    case Code::kInvalidArgument:
    case Code::kUnsupported:
      break;
    case Code::kResource:
      e.status = 429;
      e.code = "queue_full";
      e.retry_after_s = 1;
      break;
    case Code::kCancelled:
      e.status = 503;
      e.code = "draining";
      e.retry_after_s = 5;
      break;
    case Code::kNumeric:
      e.status = 500;
      e.code = "numeric_error";
      break;
    default:
      e.status = 500;
  }
  return e;
}

}  // namespace k3::serve
