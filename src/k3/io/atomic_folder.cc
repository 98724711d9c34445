#include "k3/io/atomic_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace k3 {
namespace {

std::string WithoutSlash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string ParentOf(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == path.npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Error Fail(const std::string& path, const char* doing) {
  return {Code::kIo, fmt::format("{}: cannot {}: {}", path, doing, std::strerror(errno))};
}

/// Makes what stands in a folder survive a power cut. Some file systems cannot; no error.
void Sync(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

}  // namespace

Status AtomicFolder::Check(const std::string& wanted) {
  const std::string path = WithoutSlash(wanted);
  struct stat info = {};
  if (path.empty()) return Error{Code::kInvalidArgument, "the name of the new folder is empty"};
  if (::lstat(path.c_str(), &info) == 0) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: exists already, expected the name of a new folder", path)};
  }
  if (errno != ENOENT) return Fail(path, "create the folder");
  if (::stat(ParentOf(path).c_str(), &info) != 0) return Fail(path, "create the folder");
  return {};
}

Result<AtomicFolder> AtomicFolder::Create(const std::string& wanted) {
  K3_TRY(Check(wanted));
  const std::string path = WithoutSlash(wanted);
  static std::atomic<unsigned> counter{0};
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::string temporary = fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter++);
    if (::mkdir(temporary.c_str(), 0777) == 0) return AtomicFolder(path, std::move(temporary));
    if (errno != EEXIST) break;
  }
  return Fail(path, "create the folder");
}

AtomicFolder::AtomicFolder(AtomicFolder&& o) noexcept
    : path_(std::move(o.path_)), temporary_(std::exchange(o.temporary_, std::string())) {}

AtomicFolder::~AtomicFolder() {
  if (temporary_.empty()) return;
  std::error_code ignored;
  std::filesystem::remove_all(temporary_, ignored);
}

Status AtomicFolder::Commit() {
  Sync(temporary_);
  // A plain rename would replace an empty folder of this name.
  int failed = ::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE);
  if (failed != 0 && (errno == EINVAL || errno == ENOSYS)) {  // a file system without that flag
    K3_TRY(Check(path_));
    failed = ::rename(temporary_.c_str(), path_.c_str());
  }
  if (failed != 0) return Fail(path_, "rename to this name");
  temporary_.clear();
  Sync(ParentOf(path_));
  return {};
}

Result<std::int64_t> FreeDiskBytes(const std::string& wanted) {
  const std::string path = WithoutSlash(wanted);
  struct statvfs info = {};
  if (::statvfs(path.c_str(), &info) != 0 && ::statvfs(ParentOf(path).c_str(), &info) != 0) {
    return Fail(path, "ask for free disk space");
  }
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  const std::uint64_t block = std::max<std::uint64_t>(1, info.f_frsize);
  return static_cast<std::int64_t>(
      info.f_bavail > kMost / block ? kMost : std::uint64_t{info.f_bavail} * block);
}

}  // namespace k3
