// One thread pool for a process. Work is cut into tasks whose results never depend on who runs
// them.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace k3 {

/// Processors this process may really use: affinity mask and cgroup quota, at least 1.
int UsableCpus();

/// Runs loops on `threads` threads, the caller being one of them.
/// ParallelFor may be called from one thread at a time; a nested call runs serially.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // std::system_error when the system refuses a thread
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  /// Calls fn(begin, end) for disjoint ranges covering [0, n), each of at most `grain` items.
  /// Returns when all are done. Where memory ran out in fn the caller gets the std::bad_alloc.
  template <class F>
  void ParallelFor(std::int64_t n, std::int64_t grain, F&& fn) {
    if (n <= 0) return;
    if (size_ == 1 || n <= grain) return fn(std::int64_t{0}, n);
    auto call = [](void* f, std::int64_t b, std::int64_t e) {
      (*static_cast<std::remove_reference_t<F>*>(f))(b, e);
    };
    Run(n, grain, call, const_cast<void*>(static_cast<const void*>(&fn)));
  }

 private:
  using Call = void (*)(void*, std::int64_t, std::int64_t);
  void Run(std::int64_t n, std::int64_t grain, Call call, void* fn);

  struct Impl;
  int size_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
