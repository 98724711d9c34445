// A folder that appears under its name only when it is complete.
#pragma once

#include <cstdint>
#include <string>

#include "k3/base/status.h"

namespace k3 {

/// Makes a folder under a temporary name beside the target; Commit renames it. Without Commit (an
/// error, an early return) it is removed with all that is in it. A killed process leaves the
/// temporary folder, never the target. Movable; one thread.
class AtomicFolder {
 public:
  /// Refuses a target that exists, whatever it is, and one whose parent does not.
  static Result<AtomicFolder> Create(const std::string& path);
  /// The error Create would give now, without making anything.
  static Status Check(const std::string& path);

  AtomicFolder(AtomicFolder&& o) noexcept;
  AtomicFolder& operator=(AtomicFolder&&) = delete;
  ~AtomicFolder();

  /// Where to put files until Commit.
  const std::string& temporary() const { return temporary_; }
  /// Refuses if something has taken the target's name meanwhile.
  Status Commit();

 private:
  AtomicFolder(std::string path, std::string temporary)
      : path_(std::move(path)), temporary_(std::move(temporary)) {}

  std::string path_;
  std::string temporary_;  // empty: nothing to remove
};

/// Bytes that an ordinary user may still write to the file system `path` (or, if it does not exist
/// yet, the folder it would be in) belongs to.
Result<std::int64_t> FreeDiskBytes(const std::string& path);

}  // namespace k3
