// What a client is told when its request is refused or fails.
#pragma once

#include <optional>
#include <string>

#include "k3/base/status.h"
#include "k3/chat/openai.h"
#include "k3/serve/http.h"

namespace k3::serve {

/// Both shapes have "error" with message, type, param and code. Anthropic's adds "type":"error" and
/// has its own words for error.type.
enum class Dialect { kOpenAi, kAnthropic };

struct ApiError {
  int status = 400;
  std::string message;    // one line; made valid UTF-8 when it is written
  std::string param;      // the field it is about; empty: null
  std::string code;       // a word for programs; empty: null
  int retry_after_s = 0;  // > 0: header Retry-After
};

/// nullopt is success.
using ApiStatus = std::optional<ApiError>;

/// Returns early with the error of an ApiStatus expression.
#define K3_API_TRY(expr)                                                  \
  do {                                                                    \
    if (auto k3_api_error_ = (expr); k3_api_error_) return k3_api_error_; \
  } while (false)

/// OpenAI's word: "invalid_request_error", "authentication_error", "rate_limit_error", ...
std::string ErrorType(int status, Dialect dialect);
/// The body: one line of JSON without a line end.
std::string ErrorBody(const ApiError& error, Dialect dialect);
HttpReply ErrorReply(const ApiError& error, Dialect dialect);

/// Status 400.
ApiError BadField(std::string param, std::string message);
ApiError FromRequest(const chat::RequestError& error);
/// An error of Engine::Submit or of a running request.
ApiError FromEngine(const Error& error);

}  // namespace k3::serve
