#include "k3/base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "k3/base/control_group.h"

namespace k3 {
namespace {

thread_local bool in_parallel_region = false;

}  // namespace

int UsableCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int mask = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::max(1,
                  std::min(mask, static_cast<int>(std::ceil(std::min(ControlGroupCpus(), 1e6)))));
}

namespace {

/// How long a thread looks for work, or for the end of it, before it sleeps. Ops of a forward pass
/// follow each other within a few microseconds; waking a sleeper costs tens.
constexpr auto kSpin = std::chrono::microseconds(30);

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// True as soon as `ready` is; false when it was not for `limit`.
template <class F>
bool SpinUntil(std::chrono::microseconds limit, F&& ready) {
  if (ready()) return true;
  if (limit.count() == 0) return false;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

/// A loop is cut into pieces; whoever is awake takes the next one. The caller waits for pieces, not
/// for threads, so a worker that the system has put aside holds nobody up.
struct ThreadPool::Impl {
  // The current loop. A worker may read these while the next loop is being written, hence atomic;
  // it uses them only after it took a piece of the loop that they belong to.
  std::atomic<Call> call{nullptr};
  std::atomic<void*> fn{nullptr};
  std::atomic<std::int64_t> n{0}, grain{1};
  std::atomic<std::uint32_t> pieces{0};
  // Number of the loop (high half) and of the next piece (low half), taken together: a piece of a
  // loop that has ended cannot be taken.
  std::atomic<std::uint64_t> ticket{0};
  std::atomic<std::uint32_t> done{0};  // pieces finished

  std::mutex mutex;
  std::condition_variable start, finished;
  std::exception_ptr failure;  // guarded by mutex; the first one of the current loop
  std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false}, stop{false};
  std::chrono::microseconds spin{0};
  std::vector<std::thread> workers;

  static std::uint32_t LoopOf(std::uint64_t t) { return static_cast<std::uint32_t>(t >> 32); }
  bool HasWork() const {
    const std::uint64_t t = ticket.load();
    return static_cast<std::uint32_t>(t) < pieces.load() || stop.load();
  }

  /// Runs pieces of the current loop until none is left.
  void Drain() {
    in_parallel_region = true;
    for (;;) {
      std::uint64_t t = ticket.load();
      const Call c = call.load();
      void* const f = fn.load();
      const std::int64_t size = n.load(), step = grain.load();
      const std::uint32_t piece = static_cast<std::uint32_t>(t), all = pieces.load();
      if (piece >= all) break;
      if (!ticket.compare_exchange_strong(t, t + 1)) continue;
      const std::int64_t begin = std::int64_t{piece} * step;
      try {
        c(f, begin, std::min(begin + step, size));
      } catch (...) {  // out of memory: told to the caller of Run, not to std::terminate
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
      if (done.fetch_add(1) + 1 == all && caller_sleeps.load()) {
        std::lock_guard lock(mutex);
        finished.notify_one();
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
    while (!stop.load()) {
      if (SpinUntil(spin, [&] { return HasWork(); })) {
        Drain();
        continue;
      }
      std::unique_lock lock(mutex);
      sleepers.fetch_add(1);
      start.wait(lock, [&] { return HasWork(); });
      sleepers.fetch_sub(1);
    }
  }
};

ThreadPool::ThreadPool(int threads) : size_(std::max(1, threads)), impl_(std::make_unique<Impl>()) {
  // More threads than processors: whoever spins keeps another one from working.
  if (size_ <= UsableCpus()) impl_->spin = kSpin;
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
  constexpr std::int64_t kMaxPieces = std::int64_t{1} << 30;
  grain = std::max({std::int64_t{1}, grain, n / kMaxPieces + 1});
  const auto pieces = static_cast<std::uint32_t>((n + grain - 1) / grain);
  // All pieces of the last loop were done when its Run returned. Close it before anything changes.
  p.pieces = 0;
  p.call = call;
  p.fn = fn;
  p.n = n;
  p.grain = grain;
  p.done = 0;
  p.ticket = std::uint64_t{Impl::LoopOf(p.ticket.load()) + 1} << 32;
  p.pieces = pieces;
  if (p.sleepers.load() > 0) {
    {
      std::lock_guard lock(p.mutex);
    }  // a worker between its last look and its sleep
    p.start.notify_all();
  }
  p.Drain();
  auto all_done = [&] { return p.done.load() == pieces; };
  const bool ready = SpinUntil(p.spin, all_done);
  std::unique_lock lock(p.mutex);
  if (!ready) {
    p.caller_sleeps = true;
    p.finished.wait(lock, all_done);
    p.caller_sleeps = false;
  }
  if (const auto failure = std::exchange(p.failure, nullptr)) std::rethrow_exception(failure);
}

}  // namespace k3
