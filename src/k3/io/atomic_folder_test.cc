#include "k3/io/atomic_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "support/temp_dir.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;
using testing::TempDir;

TEST(AtomicFolder, AppearsWhenItIsComplete) {
  const TempDir dir;
  auto folder = AtomicFolder::Create(dir / "out/");
  ASSERT_TRUE(folder.ok()) << folder.message();
  testing::WriteBytes(folder->temporary() + "/file", "x");
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
  ASSERT_TRUE(folder->Commit().ok());
  EXPECT_EQ(testing::ReadBytes(dir / "out/file"), "x");
  EXPECT_EQ(dir.count(), 1);
}

TEST(AtomicFolder, IsRemovedWithoutCommit) {
  const TempDir dir;
  {
    auto folder = AtomicFolder::Create(dir / "out");
    ASSERT_TRUE(folder.ok());
    std::filesystem::create_directory(folder->temporary() + "/inner");
    testing::WriteBytes(folder->temporary() + "/inner/file", "x");
    AtomicFolder moved(std::move(*folder));
    EXPECT_EQ(dir.count(), 1);
  }
  EXPECT_EQ(dir.count(), 0);
}

TEST(AtomicFolder, NeverReplacesWhatIsThere) {
  const TempDir dir;
  testing::WriteBytes(dir / "file", "x");
  std::filesystem::create_symlink("nowhere", dir / "link");
  for (const char* name : {"file", "link", ""}) {
    EXPECT_THAT(AtomicFolder::Check(dir / name).message(), HasSubstr("exists already")) << name;
  }
  EXPECT_FALSE(AtomicFolder::Create("").ok());
  EXPECT_THAT(AtomicFolder::Create(dir / "a/b").message(), HasSubstr("No such file"));
  auto folder = AtomicFolder::Create(dir / "out");
  ASSERT_TRUE(folder.ok());
  std::filesystem::create_directory(dir / "out");  // someone was faster; even an empty one stays
  EXPECT_FALSE(folder->Commit().ok());
  EXPECT_TRUE(std::filesystem::is_empty(dir / "out"));
}

TEST(FreeDiskBytes, OfFoldersThatExistOrWill) {
  const TempDir dir;
  const auto here = FreeDiskBytes(dir.path()), there = FreeDiskBytes(dir / "not-yet");
  ASSERT_TRUE(here.ok() && there.ok());
  EXPECT_GT(*here, 0);
  EXPECT_GT(*there, 0);
  EXPECT_FALSE(FreeDiskBytes(dir / "a/b/c").ok());
}

}  // namespace
}  // namespace k3
