#include "line_reader.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "signals.h"

namespace k3::app {

Result<LineReader::Event> LineReader::Next(std::string& line) {
  std::size_t searched = 0;
  for (;;) {
    const std::size_t end = buffer_.find('\n', searched);
    if (end != buffer_.npos || (ended_ && !buffer_.empty())) {
      line = buffer_.substr(0, end);
      buffer_.erase(0, end == buffer_.npos ? end : end + 1);
      if (!line.empty() && line.back() == '\r') line.pop_back();
      return Event::kLine;
    }
    if (ended_) return Event::kEnd;
    searched = buffer_.size();
    if (searched > kMaxLine) {
      return Error{Code::kInvalidArgument,
                   fmt::format("standard input: a line of more than {} bytes", kMaxLine)};
    }
    if (Interrupted().load()) return Event::kInterrupted;
    char chunk[1 << 16];
    const ssize_t n = read(STDIN_FILENO, chunk, sizeof chunk);
    if (n < 0 && errno != EINTR) {
      return Error{Code::kIo, fmt::format("standard input: {}", std::strerror(errno))};
    }
    if (n == 0) ended_ = true;
    if (n > 0) buffer_.append(chunk, static_cast<std::size_t>(n));
  }
}

}  // namespace k3::app
