// Errors as values. Libraries neither throw, print nor exit; they return Status or Result<T>.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace k3 {

enum class Code {
  kInvalidArgument,  // the caller asked for something meaningless
  kNotFound,         // a file, tensor or key that must exist does not
  kCorrupt,          // a file contradicts itself or its own format
  kUnsupported,      // well formed, but this build or version cannot do it
  kResource,         // not enough memory, context or device (exit status 3)
  kIo,               // the operating system refused a read or write
  kCancelled,        // stopped on request
  kNumeric,          // a value that must be finite is not
};

/// What went wrong, in one line: what, where (file, tensor, key), found and expected.
struct Error {
  Code code = Code::kInvalidArgument;
  std::string message;
};

/// Success, or an Error. Cheap to return; must not be ignored.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}  // NOLINT: `return Error{...}` is the idiom

  bool ok() const { return !error_.has_value(); }
  const Error& error() const { return *error_; }
  const std::string& message() const { return error_->message; }

 private:
  std::optional<Error> error_;
};

/// A value, or an Error. Looks like std::expected, which our compilers do not have.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::move(value)) {}      // NOLINT: `return value` is the idiom
  Result(Error error) : v_(std::move(error)) {}  // NOLINT

  bool ok() const { return v_.index() == 0; }
  T& value() & { return std::get<0>(v_); }
  const T& value() const& { return std::get<0>(v_); }
  T&& value() && { return std::get<0>(std::move(v_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Error& error() const { return std::get<1>(v_); }
  const std::string& message() const { return error().message; }
  Status status() const { return ok() ? Status() : Status(error()); }

 private:
  std::variant<T, Error> v_;
};

}  // namespace k3

#define K3_CONCAT_(a, b) a##b
#define K3_CONCAT(a, b) K3_CONCAT_(a, b)

/// Returns early with the error of a Status expression.
#define K3_TRY(expr)                                                           \
  do {                                                                         \
    if (auto k3_status_ = (expr); !k3_status_.ok()) return k3_status_.error(); \
  } while (false)

/// K3_ASSIGN(auto x, F()): x = value of F(), or returns early with its error.
#define K3_ASSIGN(decl, expr) K3_ASSIGN_(K3_CONCAT(k3_result_, __COUNTER__), decl, expr)
#define K3_ASSIGN_(tmp, decl, expr)  \
  auto tmp = (expr);                 \
  if (!tmp.ok()) return tmp.error(); \
  decl = std::move(tmp).value()
