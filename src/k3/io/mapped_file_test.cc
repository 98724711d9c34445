#include "k3/io/mapped_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/temp_dir.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;
using testing::ReadBytes;
using testing::TempDir;
using testing::WriteBytes;

TEST(MappedFile, MapsMovesAndRegisters) {
  const TempDir dir;
  WriteBytes(dir / "a", "hello");
  const void* address = nullptr;
  {
    auto r = MappedFile::Open(dir / "a");
    ASSERT_TRUE(r.ok()) << r.message();
    MappedFile a = std::move(r).value();
    MappedFile b = std::move(a);
    EXPECT_EQ(b.text(), "hello");
    EXPECT_FALSE(b.copied());
    address = b.data() + 4;
    ASSERT_NE(MappedFileAt(address), nullptr);
    EXPECT_EQ(MappedFileAt(address), dir / "a");
    EXPECT_EQ(MappedFileAt(b.data() + 5), nullptr);
    MappedFile c;
    c = std::move(b);
    EXPECT_EQ(c.text(), "hello");
  }
  EXPECT_EQ(MappedFileAt(address), nullptr);
  EXPECT_EQ(MappedFileAt(nullptr), nullptr);
}

TEST(MappedFile, EmptyFileIsAnEmptySpan) {
  const TempDir dir;
  WriteBytes(dir / "e", "");
  const auto r = MappedFile::Open(dir / "e");
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->size(), 0u);
}

TEST(MappedFile, CopyHasTheBytesWhereTheyWereAskedFor) {
  const TempDir dir;
  std::string bytes;
  for (int i = 0; i < 3000000; ++i) bytes += static_cast<char>(i * 7 + i / 251);
  WriteBytes(dir / "a", bytes);
  WriteBytes(dir / "empty", "");
  for (const std::size_t at : {0u, 8u, 63u, 64u, 1000u}) {
    auto r = MappedFile::OpenCopy(dir / "a", at);
    ASSERT_TRUE(r.ok()) << r.message();
    const MappedFile moved = std::move(r).value();
    EXPECT_EQ(moved.text(), bytes) << at;
    EXPECT_TRUE(moved.copied());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(moved.data() + at) % 64, 0u) << at;
    EXPECT_EQ(MappedFileAt(moved.data()), nullptr) << "no file page can be missing here";
  }
  EXPECT_EQ(MappedFile::OpenCopy(dir / "empty", 0)->size(), 0u);
  EXPECT_EQ(MappedFile::OpenCopy(dir / "none", 0).error().code, Code::kNotFound);
}

TEST(MappedFile, CopyOutlivesItsFile) {
  const TempDir dir;
  WriteBytes(dir / "a", std::string(100000, 'x'));
  const auto copy = MappedFile::OpenCopy(dir / "a", 0);
  ASSERT_TRUE(copy.ok());
  ASSERT_EQ(::truncate((dir / "a").c_str(), 10), 0);
  EXPECT_EQ(copy->text(), std::string(100000, 'x'));
}

TEST(MappedFile, AFileShorterThanItsSizeIsRefused) {
  const char* path = "/sys/kernel/mm/transparent_hugepage/enabled";  // says 4096, holds a line
  struct stat info = {};
  if (::stat(path, &info) != 0 || info.st_size < 1000) GTEST_SKIP() << "no such file here";
  const auto r = MappedFile::OpenCopy(path, 0);
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.error().code, Code::kCorrupt);
  EXPECT_THAT(r.message(), HasSubstr("then the end"));
}

TEST(MappedFile, ErrorsNameThePathAndTheReason) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  const struct {
    std::string path, words;
  } cases[] = {{dir / "none", "No such file"},
               {dir.path(), "is a folder"},
               {dir / "pipe", "not a regular file"}};
  for (const auto& c : cases) {
    const auto mapped = MappedFile::Open(c.path);
    const auto text = ReadTextFile(c.path);
    ASSERT_FALSE(mapped.ok());
    ASSERT_FALSE(text.ok());
    for (const auto& message : {mapped.message(), text.message()}) {
      EXPECT_THAT(message, HasSubstr(c.path));
      EXPECT_THAT(message, HasSubstr(c.words));
    }
  }
}

TEST(ReadTextFile, UnreadableFile) {
  if (::geteuid() == 0) GTEST_SKIP() << "SKIP: root may read everything";
  const TempDir dir;
  WriteBytes(dir / "secret", "x");
  ::chmod((dir / "secret").c_str(), 0);
  const auto r = ReadTextFile(dir / "secret");
  ASSERT_FALSE(r.ok());
  EXPECT_THAT(r.message(), HasSubstr("Permission denied"));
}

TEST(ReadTextFile, KeepsToItsLimit) {
  const TempDir dir;
  WriteBytes(dir / "f", std::string(100, 'x'));
  EXPECT_EQ(ReadTextFile(dir / "f", 100)->size(), 100u);
  const auto r = ReadTextFile(dir / "f", 99);
  ASSERT_FALSE(r.ok());
  EXPECT_THAT(r.message(), HasSubstr("more than the 99 bytes"));
}

TEST(WriteFileAtomically, ReplacesOrLeavesAlone) {
  const TempDir dir;
  ASSERT_TRUE(WriteFileAtomically(dir / "f", "one").ok());
  ASSERT_TRUE(WriteFileAtomically(dir / "f", "two").ok());
  EXPECT_EQ(ReadBytes(dir / "f"), "two");
  EXPECT_EQ(dir.count(), 1);
  const Status s = WriteFileAtomically(dir / "missing/f", "x");
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.message(), HasSubstr("missing/f"));
}

TEST(WriteFileAtomically, ReplacesOnlyRegularFilesAndFollowsLinks) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  const Status s = WriteFileAtomically(dir / "pipe", "x");
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.message(), HasSubstr("pipe: is not a regular file"));
  ASSERT_TRUE(WriteFileAtomically(dir / "f", "one").ok());
  ASSERT_EQ(::symlink("f", (dir / "link").c_str()), 0);
  ASSERT_TRUE(WriteFileAtomically(dir / "link", "two").ok());
  EXPECT_EQ(ReadBytes(dir / "f"), "two");
  ASSERT_EQ(::symlink("loop", (dir / "loop").c_str()), 0);
  EXPECT_FALSE(WriteFileAtomically(dir / "loop", "x").ok());
  EXPECT_EQ(dir.count(), 4);
}

TEST(WriteFileAtomically, FullDiskLeavesTheOldFile) {
  const TempDir dir;
  ASSERT_TRUE(WriteFileAtomically(dir / "f", "old").ok());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status s = WriteFileAtomically(dir / "f", std::string(100000, 'x'));
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.message(), HasSubstr("File too large"));
  EXPECT_EQ(ReadBytes(dir / "f"), "old");
  EXPECT_EQ(dir.count(), 1);
}

}  // namespace
}  // namespace k3
