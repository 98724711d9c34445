#include "k3/train/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>

namespace k3 {

Result<FolderLock> FolderLock::Take(const std::string& dir, const char* who) {
  std::error_code e;
  std::filesystem::create_directories(dir, e);
  if (e) return Error{Code::kIo, fmt::format("{}: cannot create: {}", dir, e.message())};
  const std::string path = dir + "/.lock";
  FolderLock lock(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (lock.fd_ < 0) {
    return Error{Code::kIo, fmt::format("{}: cannot open: {}", path, std::strerror(errno))};
  }
  if (flock(lock.fd_, LOCK_EX | LOCK_NB) != 0) {
    return Error{Code::kIo, fmt::format("{}: {} is using this folder", dir, who)};
  }
  return lock;
}

FolderLock::~FolderLock() {
  if (fd_ >= 0) close(fd_);
}

}  // namespace k3
