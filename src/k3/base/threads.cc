#include "k3/base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace k3 {
namespace {

/// CPUs granted by a cgroup v2 quota ("max 100000" or "150000 100000"), or a large number.
double CgroupCpus() {
  double cpus = 1e9;
  if (std::FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "re")) {
    double quota = 0, period = 0;
    if (std::fscanf(f, "%lf %lf", &quota, &period) == 2 && quota > 0 && period > 0) {
      cpus = quota / period;
    }
    std::fclose(f);
  }
  return cpus;
}

thread_local bool in_parallel_region = false;

}  // namespace

int UsableCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int mask = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::max(1, std::min(mask, static_cast<int>(std::ceil(std::min(CgroupCpus(), 1e6)))));
}

struct ThreadPool::Impl {
  std::mutex mutex;
  std::condition_variable start, done;
  std::uint64_t epoch = 0;     // guarded by mutex; one more for every Run
  std::exception_ptr failure;  // guarded by mutex; the first one of the current Run
  int running = 0;             // guarded by mutex; workers still inside the current Run
  bool stop = false;           // guarded by mutex

  // The current loop. Written under mutex before `start` is signalled.
  Call call = nullptr;
  void* fn = nullptr;
  std::int64_t n = 0, grain = 1;
  std::atomic<std::int64_t> next{0};
  std::vector<std::thread> workers;

  void Drain() {
    in_parallel_region = true;
    for (;;) {
      const std::int64_t b = next.fetch_add(grain, std::memory_order_relaxed);
      if (b >= n) break;
      try {
        call(fn, b, std::min(b + grain, n));
      } catch (...) {  // out of memory: told to the caller of Run, not to std::terminate
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    }
    in_parallel_region = false;
  }

  void Stop() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    start.notify_all();
    for (auto& t : workers) t.join();
  }

  void Work() {
    std::uint64_t seen = 0;
    for (;;) {
      std::unique_lock lock(mutex);
      start.wait(lock, [&] { return stop || epoch != seen; });
      if (stop) return;
      seen = epoch;
      lock.unlock();
      Drain();
      lock.lock();
      if (--running == 0) done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads) : size_(std::max(1, threads)), impl_(std::make_unique<Impl>()) {
  try {
    for (int i = 1; i < size_; ++i) impl_->workers.emplace_back([this] { impl_->Work(); });
  } catch (...) {  // the system gives no more threads: end those that run before it is reported
    impl_->Stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { impl_->Stop(); }

void ThreadPool::Run(std::int64_t n, std::int64_t grain, Call call, void* fn) {
  if (in_parallel_region) return call(fn, 0, n);
  Impl& p = *impl_;
  {
    std::lock_guard lock(p.mutex);
    p.call = call;
    p.fn = fn;
    p.n = n;
    p.grain = std::max<std::int64_t>(1, grain);
    p.next.store(0, std::memory_order_relaxed);
    p.running = size_ - 1;
    ++p.epoch;
  }
  p.start.notify_all();
  p.Drain();
  std::unique_lock lock(p.mutex);
  p.done.wait(lock, [&] { return p.running == 0; });
  if (const auto failure = std::exchange(p.failure, nullptr)) std::rethrow_exception(failure);
}

}  // namespace k3
