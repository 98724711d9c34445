#include "machine_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace k3::app {
namespace {

constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;

/// Opens the file of another user too: reading is all a lock needs, and O_CREAT on a foreign file
/// in a folder such as /tmp is refused on many systems, so it is only tried when there is none.
int OpenLockFile(const std::string& path) {
  for (int attempt = 0; attempt < 3; ++attempt) {
    int fd = ::open(path.c_str(), kFlags);
    if (fd >= 0 || errno != ENOENT) return fd;
    fd = ::open(path.c_str(), kFlags | O_CREAT | O_EXCL, 0644);
    if (fd >= 0) ::fchmod(fd, 0644);  // whatever the umask: others must be able to open it
    if (fd >= 0 || errno != EEXIST) return fd;
  }
  return -1;
}

}  // namespace

MachineLock::MachineLock() {
  const char* own = std::getenv("K3_BENCH_LOCK");
  status_ = Take(own != nullptr && *own != '\0' ? own : "/tmp/k3-bench.lock");
}

MachineLock::~MachineLock() {
  if (fd_ >= 0) ::close(fd_);
}

Status MachineLock::Take(const std::string& path) {
  const int fd = OpenLockFile(path);
  if (fd < 0) {
    return Error{Code::kIo, fmt::format("{}: cannot open the lock of k3 bench: {}", path,
                                        errno == ELOOP ? "a symbolic link" : std::strerror(errno))};
  }
  struct stat info = {};
  const bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  if (regular && ::flock(fd, LOCK_EX | LOCK_NB) == 0) {
    fd_ = fd;
    return {};
  }
  const int error = errno;
  ::close(fd);
  if (!regular) return Error{Code::kIo, path + ": is not a file, expected the lock of k3 bench"};
  if (error == EWOULDBLOCK) {
    return Error{Code::kUnsupported, path + ": another k3 bench runs on this machine"};
  }
  return Error{Code::kIo, fmt::format("{}: cannot lock: {}", path, std::strerror(error))};
}

}  // namespace k3::app
