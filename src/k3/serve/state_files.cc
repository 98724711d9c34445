#include "k3/serve/state_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "k3/io/json.h"

namespace k3::serve {
namespace {

constexpr std::size_t kLongestName = 128;
constexpr std::size_t kWaitingTasks = 4;  // each may hold the states of a text

class StateFd {
 public:
  explicit StateFd(int fd) : fd_(fd) {}
  StateFd(const StateFd&) = delete;
  StateFd& operator=(const StateFd&) = delete;
  ~StateFd() {
    if (fd_ >= 0) ::close(fd_);
  }

 private:
  int fd_;
};

ApiError StateError(int status, const char* code, const std::string& name, std::string_view what) {
  ApiError e = BadField("filename", fmt::format("\"{}\" {}", Printable(name), what));
  e.status = status;
  e.code = code;
  return e;
}

ApiError FileSystemError(const std::string& name, const char* doing, int error) {
  return StateError(500, "state_io", name,
                    fmt::format("cannot be {}: {}", doing, std::strerror(error)));
}

/// Of the model, or damaged: the file's fault, not the server's.
ApiError FromParse(const Error& error) {
  ApiError e = BadField("filename", error.message);
  e.code = "invalid_state";
  return e;
}

bool ReadAll(int fd, std::int64_t most, std::string& out) {
  char buffer[1 << 16];
  while (true) {
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n == 0;
    out.append(buffer, static_cast<std::size_t>(n));
    if (static_cast<std::int64_t>(out.size()) > most) {
      errno = EFBIG;
      return false;
    }
  }
}

bool WriteAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), std::min(bytes.size(), std::size_t{1} << 28));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

/// Whole or not at all, in the folder that is open, wherever it is by now. A link that appears
/// under the name is replaced: AtomicFile would write where it leads. False with errno set.
bool WriteInFolder(int folder, const std::string& name, std::string_view bytes) {
  static std::atomic<unsigned> counter{0};
  std::string temporary;
  int fd = -1;
  for (int attempt = 0; fd < 0 && attempt < 100; ++attempt) {
    temporary = fmt::format("{}.tmp-{}-{}", name, ::getpid(), counter++);
    fd = ::openat(folder, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 && errno != EEXIST) return false;
  }
  if (fd < 0) return false;
  bool good = WriteAll(fd, bytes) && ::fsync(fd) == 0;
  int error = errno;
  if (::close(fd) != 0 && good) {
    good = false;
    error = errno;
  }
  if (good && ::renameat(folder, temporary.c_str(), folder, name.c_str()) != 0) {
    good = false;
    error = errno;
  }
  if (good) {
    ::fsync(folder);  // some file systems cannot
  } else {
    ::unlinkat(folder, temporary.c_str(), 0);
    errno = error;
  }
  return good;
}

}  // namespace

Result<std::unique_ptr<StateFiles>> StateFiles::Open(std::string dir, Limits limits,
                                                     const TokenModel& model) {
  const int fd = ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return Error{Code::kIo, fmt::format("{}: cannot open the folder for states: {}", dir,
                                        std::strerror(errno))};
  }
  std::unique_ptr<StateFiles> files(new StateFiles(std::move(dir), fd, limits, model));
  try {
    files->thread_ = std::thread([raw = files.get()] { raw->Run(); });
  } catch (const std::system_error& e) {
    return Error{Code::kResource, fmt::format("cannot start the thread for files: {}", e.what())};
  }
  return files;
}

StateFiles::StateFiles(std::string dir, int fd, Limits limits, const TokenModel& model)
    : dir_(std::move(dir)), fd_(fd), limits_(limits), model_(model) {}

StateFiles::~StateFiles() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  ::close(fd_);
}

ApiStatus StateFiles::CheckName(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  const bool good = !name.empty() && name.size() <= kLongestName && name.front() != '.' &&
                    std::all_of(name.begin(), name.end(), allowed);
  if (good) return {};
  return BadField("filename", fmt::format("found \"{}\", expected 1 to {} characters of A-Z, a-z, "
                                          "0-9, '.', '_' and '-', the first no dot",
                                          Printable(name), kLongestName));
}

/// 404 when there is none; `bytes` are those of the whole file. The caller closes `fd`.
ApiStatus StateFiles::OpenFile(const std::string& name, int& fd, std::int64_t& bytes) const {
  K3_API_TRY(CheckName(name));
  fd = ::openat(fd_, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    if (error == ENOENT) return StateError(404, "not_found", name, "is not there");
    // A link, a socket or somebody else's file.
    if (error == ELOOP || error == ENXIO || error == EACCES) {
      return StateError(400, "invalid_state", name, "is not a saved state");
    }
    return FileSystemError(name, "opened", error);
  }
  struct stat st{};
  char magic[8] = {};
  const bool saved = ::fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
                     ::pread(fd, magic, sizeof magic, 0) == ssize_t{sizeof magic} &&
                     LooksSaved(std::string_view(magic, sizeof magic));
  if (!saved) {
    ::close(fd);
    fd = -1;
    return StateError(400, "invalid_state", name, "is not a saved state");
  }
  bytes = st.st_size;
  return {};
}

ApiStatus StateFiles::CheckTarget(const std::string& name) const {
  int fd = -1;
  std::int64_t bytes = 0;
  if (const ApiStatus error = OpenFile(name, fd, bytes); error) {
    if (error->status != 404) return error;
  }
  const StateFd closer(fd);
  return CheckRoom(name, 0);
}

/// Everything in the folder counts, whoever put it there, but what is replaced.
ApiStatus StateFiles::CheckRoom(const std::string& name, std::int64_t bytes) const {
  const int copy = ::openat(fd_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* folder = copy < 0 ? nullptr : ::fdopendir(copy);
  if (folder == nullptr) {
    const int error = errno;
    const StateFd closer(copy);
    return FileSystemError(name, "saved", error);
  }
  std::int64_t sum = 0, count = 0;
  while (const dirent* entry = ::readdir(folder)) {
    struct stat st{};
    if (entry->d_name == name) continue;
    if (::fstatat(fd_, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (!S_ISREG(st.st_mode)) continue;
    sum += st.st_size;
    ++count;
  }
  ::closedir(folder);
  if (count >= limits_.files) {
    return StateError(400, "state_dir_full", name,
                      fmt::format("would be one file too many: there are {}, expected fewer than "
                                  "{}; action=erase deletes one",
                                  count, limits_.files));
  }
  if (sum + bytes <= limits_.bytes) return {};
  return StateError(400, "state_dir_full", name,
                    fmt::format("needs {} bytes and other files have {}, expected at most {} in "
                                "all (--state-dir-limit); action=erase deletes one",
                                bytes, sum, limits_.bytes));
}

ApiStatus StateFiles::Save(const std::string& name, const std::vector<SavedSnapshot>& list,
                           std::int64_t& bytes) const {
  K3_API_TRY(CheckTarget(name));
  const std::string image = SerializeSaved(list, model_);
  bytes = static_cast<std::int64_t>(image.size());
  K3_API_TRY(CheckRoom(name, bytes));
  if (WriteInFolder(fd_, name, image)) return {};
  spdlog::warn("saved states: {}/{}: cannot write: {}", dir_, name, std::strerror(errno));
  return StateError(500, "state_io", name, "cannot be written; the server's log says why");
}

ApiStatus StateFiles::Restore(const std::string& name, std::vector<SavedSnapshot>& list,
                              std::int64_t& bytes) const {
  int fd = -1;
  K3_API_TRY(OpenFile(name, fd, bytes));
  const StateFd closer(fd);
  if (bytes > limits_.bytes) {
    return StateError(
        400, "invalid_state", name,
        fmt::format("has {} bytes, expected at most {} (--state-dir-limit)", bytes, limits_.bytes));
  }
  // Read, not mapped: somebody else may cut the file meanwhile.
  std::string image;
  if (!ReadAll(fd, limits_.bytes, image)) return FileSystemError(name, "read", errno);
  bytes = static_cast<std::int64_t>(image.size());
  auto parsed = ParseSaved(image, name, model_);
  if (!parsed.ok()) return FromParse(parsed.error());
  list = std::move(*parsed);
  return {};
}

ApiStatus StateFiles::Erase(const std::string& name, std::int64_t& bytes) const {
  int fd = -1;
  K3_API_TRY(OpenFile(name, fd, bytes));
  const StateFd closer(fd);
  if (::unlinkat(fd_, name.c_str(), 0) == 0) return {};
  return FileSystemError(name, "deleted", errno);
}

bool StateFiles::Post(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (stop_ || tasks_.size() >= kWaitingTasks) return false;
  tasks_.push_back(std::move(task));
  wake_.notify_one();
  return true;
}

void StateFiles::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    try {
      task();
    } catch (const std::bad_alloc&) {
      spdlog::warn("saved states: out of memory");  // whoever waits gets status 500
    }
    task = nullptr;
    lock.lock();
  }
}

}  // namespace k3::serve
