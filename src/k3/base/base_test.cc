#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "k3/base/rng.h"
#include "k3/base/status.h"
#include "k3/base/threads.h"
#include "k3/base/workspace.h"

namespace k3 {
namespace {

Result<int> Half(int x) {
  if (x % 2) return Error{Code::kInvalidArgument, "odd"};
  return x / 2;
}
Result<int> Quarter(int x) {
  K3_ASSIGN(const int h, Half(x));
  K3_ASSIGN(const int q, Half(h));
  return q;
}

TEST(Status, AssignReturnsEarly) {
  EXPECT_EQ(*Quarter(12), 3);
  EXPECT_FALSE(Quarter(6).ok());
  EXPECT_EQ(Quarter(6).message(), "odd");
  EXPECT_TRUE(Status().ok());
}

TEST(Threads, EveryItemOnce) {
  for (const int threads : {1, 2, 7}) {
    ThreadPool pool(threads);
    for (int repeat = 0; repeat < 200; ++repeat) {
      std::vector<std::atomic<int>> hits(101);
      pool.ParallelFor(101, 3, [&](std::int64_t b, std::int64_t e) {
        for (auto i = b; i < e; ++i) hits[static_cast<std::size_t>(i)]++;
      });
      for (const auto& h : hits) ASSERT_EQ(h, 1);
    }
  }
}

TEST(ThreadPool, MemoryThatRanOutInAWorkerReachesTheCaller) {
  ThreadPool pool(4);
  const auto fails = [&] {
    pool.ParallelFor(100, 1, [](auto begin, auto) {
      if (begin % 10 == 7) throw std::bad_alloc();
    });
  };
  for (int i = 0; i < 3; ++i) EXPECT_THROW(fails(), std::bad_alloc);
  std::atomic<int> count = 0;
  pool.ParallelFor(100, 1, [&](auto, auto) { ++count; });
  EXPECT_EQ(count, 100);
}

TEST(Threads, ThousandsOfTinyLoopsWithPausesBetween) {
  // Loops of changing shape follow each other closely, so late workers meet the next loop; the
  // pauses are longer than the spin, so they also meet sleep and waking.
  for (const int threads : {2, 3, 8}) {
    ThreadPool pool(threads);
    for (std::int64_t loop = 0; loop < 3000; ++loop) {
      const std::int64_t n = 1 + loop % 13, grain = 1 + loop % 3;
      std::vector<std::int64_t> seen(static_cast<std::size_t>(n));  // not atomic: for TSan
      pool.ParallelFor(n, grain, [&](std::int64_t b, std::int64_t e) {
        for (std::int64_t i = b; i < e; ++i) seen[static_cast<std::size_t>(i)] += loop + i;
      });
      for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(seen[static_cast<std::size_t>(i)], loop + i);
      if (loop % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
}

TEST(Threads, PoolsComeAndGo) {
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(1 + i % 4);
    std::atomic<int> sum{0};
    if (i % 2 == 0) {
      pool.ParallelFor(7, 1,
                       [&](std::int64_t b, std::int64_t e) { sum += static_cast<int>(e - b); });
      EXPECT_EQ(sum, 7);
    }
  }
}

TEST(Threads, NestedRunsSerially) {
  ThreadPool pool(2);
  std::atomic<int> whole{0}, other{0};
  pool.ParallelFor(4, 1, [&](std::int64_t, std::int64_t) {
    const auto self = std::this_thread::get_id();
    pool.ParallelFor(10, 1, [&](std::int64_t b, std::int64_t e) {  // one call, of all
      ++(b == 0 && e == 10 && std::this_thread::get_id() == self ? whole : other);
    });
  });
  EXPECT_EQ(whole, 4);
  EXPECT_EQ(other, 0);
  std::atomic<int> calls{0};
  pool.ParallelFor(4, 1, [&](std::int64_t, std::int64_t) { ++calls; });
  EXPECT_EQ(calls, 4) << "the region has ended";
}

TEST(Threads, TheCallerWaitsForAWorkerLongerThanItSpins) {
  for (const int threads : {2, 3}) {
    ThreadPool pool(threads);
    const auto self = std::this_thread::get_id();
    for (int loop = 0; loop < 20; ++loop) {
      std::atomic<int> begun{0}, ended{0};
      pool.ParallelFor(2, 1, [&](std::int64_t, std::int64_t) {
        ++begun;
        while (begun < 2) std::this_thread::yield();  // so each is on a thread of its own
        if (std::this_thread::get_id() != self) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        ++ended;
      });
      ASSERT_EQ(ended, 2);
    }
  }
}

double ProcessorSeconds() {
  timespec t = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

TEST(Threads, IdleOnesSleep) {
  for (const int threads : {2, UsableCpus() + 2}) {
    ThreadPool pool(threads);
    std::atomic<std::int64_t> sum{0};
    const double start = ProcessorSeconds();
    for (int loop = 0; loop < 20; ++loop) {
      pool.ParallelFor(threads, 1, [&](std::int64_t b, std::int64_t e) { sum += e - b; });
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    // Spinning takes 30 us of the 10 ms, and waking some more.
    EXPECT_LT(ProcessorSeconds() - start, 0.04) << threads << " threads";
    EXPECT_EQ(sum, 20 * threads);
  }
}

TEST(Workspace, MarkGivesMemoryBack) {
  Workspace ws;
  float* a = ws.Alloc<float>(100);
  float* b = nullptr;
  {
    const Workspace::Mark mark(ws);
    b = ws.Alloc<float>(5'000'000);
    b[4'999'999] = 1.f;
  }
  const auto before = ws.reserved_bytes();
  ws.Reset();
  EXPECT_EQ(ws.Alloc<float>(100), a);
  EXPECT_EQ(ws.Alloc<float>(5'000'000), b);
  EXPECT_EQ(ws.reserved_bytes(), before);
}

TEST(Workspace, EveryArrayStartsOnACacheLine) {
  Workspace ws;
  for (const std::int64_t n : {1, 3, 64, 65, 3'000'000, 0, 7}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(ws.Alloc<char>(n)) % 64, 0u) << n;
  }
}

TEST(Rng, IsTheKnownSequence) {  // SplitMix64 from seed 0, values published with the algorithm
  Rng rng(0);
  EXPECT_EQ(rng.Next(), 0xE220A8397B1DCDAFull);
  EXPECT_EQ(rng.Next(), 0x6E789E6AA1B965F4ull);
}

}  // namespace
}  // namespace k3
