// A folder that one run at a time may write.
#pragma once

#include <string>
#include <utility>

#include "k3/base/status.h"

namespace k3 {

/// Holds `dir`/.lock, an advisory lock that ends with the process, however it ends. Movable.
class FolderLock {
 public:
  /// Makes the folder when it is not there. kIo when it cannot be written or is held; `who` is
  /// then named: "another run".
  static Result<FolderLock> Take(const std::string& dir, const char* who);

  FolderLock(FolderLock&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  FolderLock& operator=(FolderLock&& o) noexcept {
    std::swap(fd_, o.fd_);
    return *this;
  }
  ~FolderLock();

 private:
  explicit FolderLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

}  // namespace k3
