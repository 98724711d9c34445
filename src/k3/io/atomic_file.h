// A file that appears under its name only when it is complete.
#pragma once

#include <cstddef>
#include <string>

#include "k3/base/status.h"

namespace k3 {

/// Writes to a temporary name beside the target; Commit syncs and renames. Without Commit (an
/// error, an early return) the temporary file is removed and whatever was under the target stays.
/// Movable; one thread.
class AtomicFile {
 public:
  /// Follows a symbolic link. Refuses a folder, a device, a pipe: a rename would replace them.
  /// `mode` as of open(2): who may read it, less the umask.
  static Result<AtomicFile> Create(const std::string& path, unsigned mode = 0666);
  /// The error Create would give now; for checks before long work.
  static Status Check(const std::string& path) { return Create(path).status(); }

  AtomicFile(AtomicFile&& o) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  Status Write(const void* data, std::size_t bytes);
  Status Commit();

 private:
  AtomicFile(std::string path, std::string temporary, int fd);
  Error Fail(const char* doing) const;

  std::string path_;
  std::string temporary_;
  int fd_ = -1;
};

}  // namespace k3
