// Assertions for bugs of ours (never for bad input: that is a Status).
#pragma once

namespace k3 {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition, const char* what);
}  // namespace k3

/// Always on; for cold paths. `what` says which rule was broken.
#define K3_CHECK(cond, what)                                         \
  do {                                                               \
    if (!(cond)) ::k3::CheckFailed(__FILE__, __LINE__, #cond, what); \
  } while (false)
