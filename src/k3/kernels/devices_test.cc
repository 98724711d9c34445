#include "k3/kernels/devices.h"

#include <gtest/gtest.h>

namespace k3 {
namespace {

TEST(DevicesTest, WithoutCudaTheListIsEmpty) {
  if (BuiltWithCuda()) GTEST_SKIP() << "this build has the CUDA backend";
  EXPECT_TRUE(ListGpuDevices().empty());
}

TEST(DevicesTest, EveryListedDeviceIsDescribed) {
  const auto devices = ListGpuDevices();
  if (devices.empty()) GTEST_SKIP() << "no GPU is visible to this build";
  for (const GpuDevice& device : devices) {
    EXPECT_FALSE(device.name.empty());
    EXPECT_GT(device.memory_bytes, std::size_t{1} << 30);
    EXPECT_GT(device.multiprocessors, 0);
    EXPECT_GE(device.compute_major, 3);
    EXPECT_GE(device.compute_minor, 0);
  }
}

TEST(DevicesTest, TwoCallsAgree) {
  const auto first = ListGpuDevices();
  const auto second = ListGpuDevices();
  ASSERT_EQ(first.size(), second.size());
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_EQ(first[i].name, second[i].name);
}

}  // namespace
}  // namespace k3
