// One benchmark at a time on a machine.
#pragma once

#include <string>

#include "k3/base/status.h"

namespace k3::app {

/// A lock that the system frees when its holder ends, however it ends: a file left behind holds
/// nobody up. The file is $K3_BENCH_LOCK, else /tmp/k3-bench.lock, and any user may lock it.
class MachineLock {
 public:
  MachineLock();
  ~MachineLock();
  MachineLock(const MachineLock&) = delete;
  MachineLock& operator=(const MachineLock&) = delete;

  bool held() const { return fd_ >= 0; }
  /// Why it is not held: another one runs, or the file cannot be used.
  const Status& status() const { return status_; }

 private:
  Status Take(const std::string& path);

  int fd_ = -1;
  Status status_;
};

}  // namespace k3::app
