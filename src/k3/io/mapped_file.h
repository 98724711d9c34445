// Read-only memory mapping of a regular file.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "k3/base/status.h"

namespace k3 {

/// Owns one mapping or copy; movable. An empty file maps to an empty span.
/// Reading a page that the file no longer backs (it was truncated) raises SIGBUS in the process;
/// MappedFileAt lets a handler say which file it was.
class MappedFile {
 public:
  static Result<MappedFile> Open(const std::string& path);
  /// The contents in memory of their own, in huge pages where the system has them, byte
  /// `aligned_at` at a multiple of 64. Reading that memory misses the TLB far less and never raises
  /// SIGBUS. kResource when there is not enough.
  static Result<MappedFile> OpenCopy(const std::string& path, std::size_t aligned_at);

  MappedFile() = default;
  MappedFile(MappedFile&& o) noexcept;
  MappedFile& operator=(MappedFile&& o) noexcept;
  ~MappedFile();

  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  const std::string& path() const { return path_; }
  /// In memory of its own, not in pages of the file.
  bool copied() const { return mapping_size_ > size_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  void* mapping_ = nullptr;  // what to unmap
  std::size_t mapping_size_ = 0;
};

/// Path of the live mapping that contains `address`, or nullptr. Async-signal-safe.
const char* MappedFileAt(const void* address);

/// Whole contents of a small text file (config, index, tokenizer); refuses more than `limit` bytes,
/// folders and unreadable files with a message that names the path and the reason.
Result<std::string> ReadTextFile(const std::string& path, std::size_t limit = std::size_t{1} << 28);

/// Writes to a temporary name beside `path`, syncs, renames. Nothing appears under `path` on
/// failure.
Status WriteFileAtomically(const std::string& path, std::string_view contents,
                           unsigned mode = 0666);

}  // namespace k3
