#include "k3/io/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>

#include "k3/io/atomic_file.h"

namespace k3 {
namespace {

/// One live mapping. Slots are reused but never freed, so a signal handler may walk the list.
struct Slot {
  std::atomic<std::uintptr_t> begin{0};  // 0: free
  std::atomic<std::uintptr_t> end{0};
  char path[1024] = {};
  Slot* next = nullptr;
};

std::atomic<Slot*> g_slots{nullptr};
std::mutex g_slots_mutex;  // writers only; readers follow the atomics

void Register(const std::byte* data, std::size_t size, const std::string& path) {
  const std::lock_guard lock(g_slots_mutex);
  Slot* slot = g_slots.load();
  while (slot && slot->begin.load() != 0) slot = slot->next;
  const bool fresh = slot == nullptr;
  if (fresh) {
    slot = new Slot;
    slot->next = g_slots.load();
  }
  // The end of a long path says more than its start.
  const std::size_t keep = std::min(path.size(), sizeof(slot->path) - 1);
  std::memcpy(slot->path, path.data() + (path.size() - keep), keep);
  slot->path[keep] = '\0';
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  slot->end.store(begin + size);
  slot->begin.store(begin);
  if (fresh) g_slots.store(slot);
}

void Unregister(const std::byte* data) {
  const std::lock_guard lock(g_slots_mutex);
  for (Slot* s = g_slots.load(); s; s = s->next) {
    if (s->begin.load() == reinterpret_cast<std::uintptr_t>(data)) s->begin.store(0);
  }
}

Error IoError(const std::string& path, const char* doing, int error) {
  return {error == ENOENT ? Code::kNotFound : Code::kIo,
          fmt::format("{}: cannot {}: {}", path, doing, std::strerror(error))};
}

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  Fd(Fd&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

/// Opens a regular file for reading and gives its size; never blocks on a pipe.
Result<Fd> OpenRegular(const std::string& path, std::size_t* size) {
  if (path.find('\0') != path.npos) {
    return Error{Code::kInvalidArgument, "a path contains a zero byte"};
  }
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return IoError(path, "open", errno);
  struct stat st{};
  if (::fstat(fd.get(), &st) != 0) return IoError(path, "stat", errno);
  if (S_ISDIR(st.st_mode)) return Error{Code::kIo, path + ": is a folder, expected a file"};
  if (!S_ISREG(st.st_mode)) return Error{Code::kIo, path + ": is not a regular file"};
  *size = static_cast<std::size_t>(st.st_size);
  return fd;
}

}  // namespace

Result<MappedFile> MappedFile::Open(const std::string& path) {
  std::size_t size = 0;
  K3_ASSIGN(const Fd fd, OpenRegular(path, &size));
  MappedFile file;
  file.path_ = path;
  if (size == 0) return file;
  void* p = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (p == MAP_FAILED) return IoError(path, "map", errno);
  file.data_ = static_cast<const std::byte*>(p);
  file.size_ = size;
  file.mapping_ = p;
  file.mapping_size_ = size;
  Register(file.data_, size, path);
  return file;
}

Result<MappedFile> MappedFile::OpenCopy(const std::string& path, std::size_t aligned_at) {
  std::size_t size = 0;
  K3_ASSIGN(const Fd fd, OpenRegular(path, &size));
  MappedFile file;
  file.path_ = path;
  if (size == 0) return file;
  constexpr std::size_t kHuge = std::size_t{1} << 21, kLine = 64;
  const std::size_t bytes = (size + kLine + kHuge - 1) / kHuge * kHuge + kHuge;
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    return Error{Code::kResource, fmt::format("{}: no memory for a copy of {} bytes", path, size)};
  }
  file.mapping_ = p;
  file.mapping_size_ = bytes;
  const auto huge = (reinterpret_cast<std::uintptr_t>(p) + kHuge - 1) / kHuge * kHuge;
#if defined(MADV_HUGEPAGE)
  // Whole ones only: the rest would take as much memory. May be refused.
  ::madvise(reinterpret_cast<void*>(huge), (size + kLine) / kHuge * kHuge, MADV_HUGEPAGE);
#endif
  auto* to = reinterpret_cast<std::byte*>(huge) + (kLine - aligned_at % kLine) % kLine;
  for (std::size_t at = 0; at < size;) {
    const ssize_t n = ::pread(fd.get(), to + at, size - at, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return IoError(path, "read", errno);
    if (n == 0) {
      return Error{Code::kCorrupt, fmt::format("{}: {} bytes, then the end; expected {}, the size "
                                               "when it was opened",
                                               path, at, size)};
    }
    at += static_cast<std::size_t>(n);
  }
  ::mprotect(p, bytes, PROT_READ);
  file.data_ = to;
  file.size_ = size;
  return file;
}

MappedFile::MappedFile(MappedFile&& o) noexcept
    : path_(std::move(o.path_)),
      data_(std::exchange(o.data_, nullptr)),
      size_(std::exchange(o.size_, 0)),
      mapping_(std::exchange(o.mapping_, nullptr)),
      mapping_size_(std::exchange(o.mapping_size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& o) noexcept {
  std::swap(path_, o.path_);
  std::swap(data_, o.data_);
  std::swap(size_, o.size_);
  std::swap(mapping_, o.mapping_);
  std::swap(mapping_size_, o.mapping_size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (mapping_ == nullptr) return;
  if (mapping_ == data_) Unregister(data_);
  ::munmap(mapping_, mapping_size_);
}

const char* MappedFileAt(const void* address) {
  const auto a = reinterpret_cast<std::uintptr_t>(address);
  for (const Slot* s = g_slots.load(); s; s = s->next) {
    const auto begin = s->begin.load();
    if (begin != 0 && a >= begin && a < s->end.load()) return s->path;
  }
  return nullptr;
}

Result<std::string> ReadTextFile(const std::string& path, std::size_t limit) {
  std::size_t size = 0;
  K3_ASSIGN(const Fd fd, OpenRegular(path, &size));
  std::string text;
  char buffer[1 << 16];
  if (size <= limit) text.reserve(size);
  while (true) {
    const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return IoError(path, "read", errno);
    if (n == 0) return text;
    text.append(buffer, static_cast<std::size_t>(n));
    if (text.size() > limit) {
      return Error{Code::kCorrupt,
                   fmt::format("{}: more than the {} bytes such a file may have", path, limit)};
    }
  }
}

Status WriteFileAtomically(const std::string& path, std::string_view contents, unsigned mode) {
  K3_ASSIGN(AtomicFile file, AtomicFile::Create(path, mode));
  K3_TRY(file.Write(contents.data(), contents.size()));
  return file.Commit();
}

}  // namespace k3
