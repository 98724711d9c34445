// Lines of standard input, one by one.
#pragma once

#include <cstddef>
#include <string>

#include "k3/base/status.h"

namespace k3::app {

/// Reads without looking further ahead than the system call gives. On a terminal the kernel edits
/// the line. Ctrl-C ends a read.
class LineReader {
 public:
  enum class Event { kLine, kEnd, kInterrupted };

  /// A line without its LF (or CR LF), in `line`. The last line of a file needs no LF. A line
  /// longer than `kMaxLine` is an error.
  Result<Event> Next(std::string& line);

  static constexpr std::size_t kMaxLine = std::size_t{1} << 24;

 private:
  std::string buffer_;
  bool ended_ = false;
};

}  // namespace k3::app
