#include "output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "exit_codes.h"
#include "signals.h"

namespace k3::app {
namespace {

std::string OneLine(std::string_view message) {
  std::string out(message);
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return out;
}

}  // namespace

Status WriteOut(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(STDOUT_FILENO, bytes.data(), bytes.size());
    if (n >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EPIPE) {
      return Error{Code::kIo, ""};
    } else if (errno != EINTR) {
      return Error{Code::kIo, fmt::format("standard output: {}", std::strerror(errno))};
    }
  }
  return {};
}

void Say(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(STDERR_FILENO, bytes.data(), bytes.size());
    if (n < 0 && errno != EINTR) return;  // full or closed: nobody left to tell
    if (n > 0) bytes.remove_prefix(static_cast<std::size_t>(n));
  }
}

void Complain(std::string_view message) { Say(fmt::format("k3: {}\n", OneLine(message))); }

void Warn(std::string_view message) { Say(fmt::format("k3: warning: {}\n", OneLine(message))); }

int Fail(const Error& error) {
  if (!error.message.empty()) Complain(error.message);
  return ExitCodeOf(error);
}

bool StdoutIsTerminal() { return isatty(STDOUT_FILENO) == 1; }
bool StderrIsTerminal() { return isatty(STDERR_FILENO) == 1; }

void ProgressLine::Show(std::string_view what, std::int64_t done, std::int64_t total) {
  if (!StderrIsTerminal()) return;
  Say(fmt::format("\r{} {}/{}\x1b[K", what, done, total));
  shown_ = true;
}

void ProgressLine::Clear() {
  if (!shown_) return;
  Say("\r\x1b[K");
  shown_ = false;
}

Result<std::string> ReadStdin(std::size_t limit) {
  if (isatty(STDIN_FILENO) == 1 && StderrIsTerminal()) {
    Say("reading standard input, Ctrl-D ends it\n");
  }
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    if (Interrupted().load()) return Error{Code::kCancelled, ""};
    const ssize_t n = read(STDIN_FILENO, buffer, sizeof buffer);
    if (n == 0) return text;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return Error{Code::kIo, fmt::format("standard input: {}", std::strerror(errno))};
    }
    if (text.size() + static_cast<std::size_t>(n) > limit) {
      return Error{Code::kInvalidArgument,
                   fmt::format("standard input: more than {} bytes", limit)};
    }
    text.append(buffer, static_cast<std::size_t>(n));
  }
}

}  // namespace k3::app
