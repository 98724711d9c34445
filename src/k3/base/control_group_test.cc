#include "k3/base/control_group.h"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "support/temp_dir.h"

namespace k3 {
namespace {

class ControlGroupTest : public ::testing::Test {
 protected:
  void Put(const std::string& name, const std::string& text) {
    const std::string path = root_ / name;
    std::filesystem::create_directories(path.substr(0, path.rfind('/')));
    std::ofstream(path) << text;
  }
  double Cpus() { return ControlGroupCpus(root_.path()); }

  testing::TempDir root_;
};

constexpr double kMany = 1e6;

TEST_F(ControlGroupTest, NoGroupsNoLimit) { EXPECT_GE(Cpus(), kMany); }

TEST_F(ControlGroupTest, AQuotaOfAServiceOnAHostCounts) {  // CPUQuota=50% of a systemd unit
  Put("proc/self/cgroup", "0::/system.slice/k3.service\n");
  Put("sys/fs/cgroup/system.slice/k3.service/cpu.max", "50000 100000\n");
  EXPECT_EQ(Cpus(), 0.5);
}

TEST_F(ControlGroupTest, TheTightestOnTheWayUpCounts) {
  Put("proc/self/cgroup", "0::/a/b/c\n");
  Put("sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n");
  Put("sys/fs/cgroup/a/b/cpu.max", "400000 100000\n");
  Put("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  EXPECT_EQ(Cpus(), 1.5);
  Put("sys/fs/cgroup/a/b/c/cpu.max", "20000 100000\n");
  EXPECT_EQ(Cpus(), 0.2);
}

TEST_F(ControlGroupTest, InAContainerTheMountShowsItsTop) {
  Put("proc/self/cgroup", "0::/docker/123\n");
  Put("sys/fs/cgroup/cpu.max", "300000 100000\n");
  EXPECT_EQ(Cpus(), 3);
}

TEST_F(ControlGroupTest, VersionOne) {
  Put("proc/self/cgroup", "5:memory:/m\n3:cpuacct,cpu:/x/y\n0::/\n");
  Put("sys/fs/cgroup/cpu/x/y/cpu.cfs_quota_us", "-1\n");
  Put("sys/fs/cgroup/cpu/x/y/cpu.cfs_period_us", "100000\n");
  EXPECT_GE(Cpus(), kMany);
  Put("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "25000\n");
  Put("sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "50000\n");
  EXPECT_EQ(Cpus(), 0.5);
  Put("sys/fs/cgroup/cpu/m/cpu.cfs_quota_us", "1\n");  // another controller's group
  Put("sys/fs/cgroup/cpu/m/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Cpus(), 0.5);
}

TEST_F(ControlGroupTest, WithoutAListTheTopOnes) {
  Put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n");
  Put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Cpus(), 2);
}

TEST_F(ControlGroupTest, NonsenseIsNoLimit) {
  Put("proc/self/cgroup", "nonsense\n0:\n::\n0::/a\n");
  for (const char* text : {"", "max", "0 100000", "100000", "100000 0", "-5 100000", "x y"}) {
    Put("sys/fs/cgroup/a/cpu.max", text);
    EXPECT_GE(Cpus(), kMany) << text;
  }
}

}  // namespace
}  // namespace k3
