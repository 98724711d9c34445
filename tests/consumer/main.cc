// Uses a little of libk3 the way a stranger's program would.
#include <atomic>
#include <cstdio>

#include "k3/base/threads.h"
#include "k3/kernels/devices.h"

int main() {
  k3::ThreadPool pool(2);
  std::atomic<int> sum = 0;
  pool.ParallelFor(100, 10, [&](auto begin, auto end) {
    for (auto i = begin; i < end; ++i) sum += static_cast<int>(i);
  });
  std::printf("sum %d, devices %zu\n", sum.load(), k3::ListGpuDevices().size());
  return sum == 4950 ? 0 : 1;
}
