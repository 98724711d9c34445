#include "k3/io/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace k3 {
namespace {

/// Makes a rename in the folder of `path` survive a power cut. Some file systems cannot; no error.
void SyncFolderOf(const std::string& path) {
  const auto slash = path.rfind('/');
  const std::string folder = slash == path.npos ? "." : path.substr(0, slash + 1);
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

/// Where a rename may put the file: what a symbolic link points to, and never a device or a pipe,
/// which a rename would replace (root could lose /dev/null).
Result<std::string> Target(const std::string& path) {
  struct stat info = {};
  if (::lstat(path.c_str(), &info) != 0) return path;
  std::string target = path;
  if (S_ISLNK(info.st_mode)) {
    char* resolved = ::realpath(path.c_str(), nullptr);
    if (resolved == nullptr || ::stat(resolved, &info) != 0) {
      std::free(resolved);
      return Error{Code::kIo, fmt::format("{}: a symbolic link that leads nowhere", path)};
    }
    target = resolved;
    std::free(resolved);
  }
  if (S_ISDIR(info.st_mode)) {
    return Error{Code::kIo, fmt::format("{}: is a folder, expected a file to write", path)};
  }
  if (!S_ISREG(info.st_mode)) {
    return Error{Code::kIo, fmt::format("{}: is not a regular file, will not replace it", path)};
  }
  return target;
}

}  // namespace

AtomicFile::AtomicFile(std::string path, std::string temporary, int fd)
    : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {}

AtomicFile::AtomicFile(AtomicFile&& o) noexcept
    : path_(std::move(o.path_)),
      temporary_(std::move(o.temporary_)),
      fd_(std::exchange(o.fd_, -1)) {}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

Error AtomicFile::Fail(const char* doing) const {
  return {Code::kIo, fmt::format("{}: cannot {}: {}", path_, doing, std::strerror(errno))};
}

Result<AtomicFile> AtomicFile::Create(const std::string& wanted, unsigned mode) {
  K3_ASSIGN(const std::string path, Target(wanted));
  static std::atomic<unsigned> counter{0};
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::string temporary = fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter++);
    const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (fd >= 0) return AtomicFile(path, std::move(temporary), fd);
    if (errno != EEXIST) break;
  }
  return AtomicFile(path, "", -1).Fail("create the file");
}

Status AtomicFile::Write(const void* data, std::size_t bytes) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, p, std::min(bytes, std::size_t{1} << 28));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Fail("write");
    p += n;
    bytes -= static_cast<std::size_t>(n);
  }
  return {};
}

Status AtomicFile::Commit() {
  if (::fsync(fd_) != 0) return Fail("sync");
  const int fd = std::exchange(fd_, -1);
  // Network file systems report a full disk as late as here.
  const bool closed = ::close(fd) == 0;
  if (!closed || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    Error error = Fail(closed ? "rename to this name" : "close");
    ::unlink(temporary_.c_str());
    return error;
  }
  SyncFolderOf(path_);
  return {};
}

}  // namespace k3
