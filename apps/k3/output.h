// Data goes to standard output, everything else to standard error.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "k3/base/status.h"

namespace k3::app {

/// Writes all bytes to standard output at once, unbuffered. A closed pipe is an error with an empty
/// message: the reader left and there is nobody to tell, but the exit status says so.
Status WriteOut(std::string_view bytes);

/// Exactly these bytes on standard error; a full or closed one is no error.
void Say(std::string_view bytes);
/// One line on standard error: "k3: MESSAGE". Control bytes of the message become '?'.
void Complain(std::string_view message);
void Warn(std::string_view message);

/// Prints the error (unless it is a closed pipe) and returns the exit status it stands for.
int Fail(const Error& error);

bool StdoutIsTerminal();
bool StderrIsTerminal();

/// A line on standard error that is written over itself; nothing unless that is a terminal.
class ProgressLine {
 public:
  ~ProgressLine() { Clear(); }
  void Show(std::string_view what, std::int64_t done, std::int64_t total);
  void Clear();

 private:
  bool shown_ = false;
};

/// All of standard input, or an error; stops at `limit` bytes. Ctrl-C ends it with kCancelled.
Result<std::string> ReadStdin(std::size_t limit = std::size_t{1} << 28);

}  // namespace k3::app
