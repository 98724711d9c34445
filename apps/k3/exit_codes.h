// What the exit status of the program means. Every --help page repeats it.
#pragma once

#include "k3/base/status.h"

namespace k3::app {

constexpr int kExitOk = 0;
constexpr int kExitFailed = 1;         // bad file, failed write, refused input
constexpr int kExitUsage = 2;          // the command line makes no sense
constexpr int kExitResource = 3;       // not enough memory, or no such device
constexpr int kExitInterrupted = 130;  // Ctrl-C, as shells expect

inline int ExitCodeOf(const Error& error) {
  switch (error.code) {
    case Code::kResource:
      return kExitResource;
    case Code::kCancelled:
      return kExitInterrupted;
    default:
      return kExitFailed;
  }
}

}  // namespace k3::app
