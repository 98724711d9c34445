#include "k3/base/memory.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include <gtest/gtest.h>

#include "support/temp_dir.h"

namespace k3 {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

class FakeRoot : public testing::TempDir {
 public:
  void Put(const std::string& name, const std::string& text) {
    const std::string path = *this / name;
    std::filesystem::create_directories(path.substr(0, path.rfind('/')));
    std::ofstream(path) << text;
  }
  void Machine() { Put("proc/meminfo", "MemTotal:  2048 kB\nMemAvailable:  1024 kB\n"); }
};

TEST(Memory, WithoutGroupsItIsWhatTheMachineHasLeft) {
  FakeRoot root;
  root.Machine();
  const MemoryLimit m = UsableMemory(root.path());
  EXPECT_EQ(m.bytes, kMiB);
  EXPECT_EQ(m.machine_total, 2 * kMiB);
  EXPECT_EQ(m.group_limit, -1);
  EXPECT_EQ(m.source, "MemAvailable");
}

TEST(Memory, TheTightestGroupOnTheWayUpCounts) {
  FakeRoot root;
  root.Machine();
  root.Put("proc/self/cgroup", "0::/a/b\n");
  root.Put("sys/fs/cgroup/a/b/memory.max", "max\n");
  root.Put("sys/fs/cgroup/a/memory.max", "800000\n");
  root.Put("sys/fs/cgroup/a/memory.current", "300000\n");
  root.Put("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 100000\nactive_file 50000\n");
  const MemoryLimit m = UsableMemory(root.path());
  EXPECT_EQ(m.group_limit, 800000);
  EXPECT_EQ(m.bytes, 800000 - (300000 - 150000));  // file pages can be dropped
  EXPECT_EQ(m.source, "control group");
}

TEST(Memory, AFullGroupLeavesNextToNothingNotTheUnknown) {
  FakeRoot root;
  root.Machine();
  root.Put("proc/self/cgroup", "0::/a\n");
  root.Put("sys/fs/cgroup/a/memory.max", "800000\n");
  root.Put("sys/fs/cgroup/a/memory.current", "800000\n");
  const MemoryLimit m = UsableMemory(root.path());
  EXPECT_EQ(m.bytes, 1);  // 0 stands for "not known", and nothing would be checked
  EXPECT_EQ(m.source, "control group");
}

TEST(Memory, VersionOneAndAPathThatIsNotMounted) {
  FakeRoot root;
  root.Machine();
  root.Put("proc/self/cgroup", "7:cpu:/\n4:memory:/docker/123\n");
  root.Put("sys/fs/cgroup/memory/memory.limit_in_bytes", "500000\n");
  EXPECT_EQ(UsableMemory(root.path()).bytes, 500000);
  root.Put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");  // no limit
  EXPECT_EQ(UsableMemory(root.path()).bytes, kMiB);
}

TEST(Memory, NothingReadable) {
  FakeRoot root;
  EXPECT_EQ(UsableMemory(root.path()).bytes, 0);
  EXPECT_EQ(UsableMemory(root.path()).source, "unknown");
}

TEST(Memory, ThisProcess) {
  EXPECT_GT(UsableMemory().bytes, 0);
  const std::int64_t before = ResidentBytes();
  if (before == 0) GTEST_SKIP() << "/proc/self/status has no VmRSS here";
  std::vector<char> touched(32 << 20, 1);
  EXPECT_GT(ResidentBytes(), before + (30 << 20)) << static_cast<int>(touched.back());
}

TEST(Memory, BytesAsPeopleWriteThem) {
  const auto value = [](const char* text) { return ParseBytes(text).value(); };
  EXPECT_EQ(value("4096"), 4096);
  EXPECT_EQ(value("512M"), 512'000'000);
  EXPECT_EQ(value("1.5G"), 1'500'000'000);
  EXPECT_EQ(value("64Gi"), std::int64_t{64} << 30);
  EXPECT_EQ(value("64GiB"), std::int64_t{64} << 30);
  EXPECT_EQ(value("2TB"), 2'000'000'000'000);
  for (const char* bad : {"", "G", "0", "-1", "1e9", "1X", "1Gx", "1 G", "nan", "inf", "0.1",
                          "9999999T", "99999999999999999999999999999999"}) {
    EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
  }
  EXPECT_EQ(BytesText(612), "612 B");
  EXPECT_EQ(BytesText(27LL << 30), "27.00 GiB");
  EXPECT_EQ(BytesText(434'110'464), "414.0 MiB");
}

}  // namespace
}  // namespace k3
