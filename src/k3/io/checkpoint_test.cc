#include "k3/io/checkpoint.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>

#include "support/temp_dir.h"

namespace k3 {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::TempDir;
using testing::WriteBytes;

constexpr char kIndex[] = "model.safetensors.index.json";

class CheckpointTest : public ::testing::Test {
 protected:
  /// A shard whose U8 tensors have one byte each, `value`.
  void Shard(const std::string& file, const std::vector<std::string>& names, std::uint8_t value) {
    const std::byte b[1] = {std::byte{value}};
    std::vector<NamedTensor> tensors;
    for (const auto& n : names) tensors.push_back({n, {DType::kU8, {1}, b}});
    ASSERT_TRUE(WriteSafetensors(dir_ / file, tensors).ok());
  }
  void Index(std::string_view weight_map) {
    WriteBytes(dir_ / kIndex, fmt::format("{{\"weight_map\":{}}}", weight_map));
  }
  std::string Failure() {
    const auto r = Checkpoint::Open(dir_.path());
    return r.ok() ? "" : r.message();
  }
  static int Value(const TensorRef* t) { return t ? std::to_integer<int>(*t->data) : -1; }

  TempDir dir_;
};

TEST_F(CheckpointTest, IndexedShardsAndAStrayFile) {
  Shard("s1", {"a", "b"}, 1);
  Shard("s2", {"c"}, 2);
  Shard("model.safetensors", {"a"}, 9);
  Index(R"({"a":"s1","b":"s1","c":"s2"})");
  const auto r = Checkpoint::Open(dir_.path() + "/");
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(Value(r->Find("a")), 1);
  EXPECT_EQ(Value(r->Find("c")), 2);
  EXPECT_EQ(r->Find("d"), nullptr);
  EXPECT_EQ(r->tensors().size(), 3u);
  EXPECT_EQ(r->shard_count(), 2u);
  EXPECT_THAT(r->FileOf("c"), HasSubstr("/s2"));
  EXPECT_THAT(r->warnings(), IsEmpty());
}

TEST_F(CheckpointTest, SingleFileWithoutIndex) {
  Shard("model.safetensors", {"a"}, 9);
  for (const auto residence : {Residence::kMapped, Residence::kCopied, Residence::kAuto}) {
    const auto r = Checkpoint::Open(dir_.path(), residence);
    ASSERT_TRUE(r.ok()) << r.message();
    EXPECT_EQ(Value(r->Find("a")), 9);
    if (residence == Residence::kCopied) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(r->Find("a")->data) % 64, 0u);
    }
  }
}

TEST_F(CheckpointTest, WrongShardAndUnlistedTensorsAreUsedWithAWarning) {
  Shard("s1", {"a"}, 1);
  Shard("s2", {"b", "c"}, 2);
  Index(R"({"a":"s1","b":"s1","c":"s2"})");
  auto r = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(Value(r->Find("b")), 2);
  EXPECT_THAT(r->warnings(), ElementsAre(HasSubstr("tensor b is in s2, not in s1")));
  Index(R"({"a":"s1","c":"s2"})");
  r = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(Value(r->Find("b")), 2);
  EXPECT_THAT(r->warnings(), ElementsAre(HasSubstr("tensor b is in s2 but not in the index")));
}

TEST_F(CheckpointTest, CopiesInTwoShards) {
  Shard("s1", {"a", "x"}, 1);
  Shard("s2", {"b", "x"}, 2);
  Index(R"({"a":"s1","b":"s2","x":"s2"})");
  const auto r = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(Value(r->Find("x")), 2);
  EXPECT_THAT(r->warnings(), ElementsAre(HasSubstr("another copy of x in s1 is ignored")));
  Index(R"({"a":"s1","b":"s2"})");
  EXPECT_THAT(Failure(), HasSubstr("duplicate tensor x in s1 and s2"));
}

TEST_F(CheckpointTest, ManyWarningsAreCounted) {
  std::vector<std::string> names{"a"};
  for (int i = 0; i < 200; ++i) names.push_back(fmt::format("t{}", i));
  Shard("s1", names, 1);
  Index(R"({"a":"s1"})");
  const auto r = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r->warnings().size(), Checkpoint::kMaxWarnings + 1);
  EXPECT_THAT(r->warnings().back(), HasSubstr("150 more"));
}

TEST_F(CheckpointTest, RefusalsNameThePath) {
  EXPECT_THAT(Failure(), HasSubstr("no weights"));
  Shard("s1", {"a"}, 1);
  Index(R"({"a":"s1","b":"s2"})");
  EXPECT_THAT(Failure(), HasSubstr("/s2: cannot open: No such file"));
  Index(R"({"a":"s1","b":"s1"})");
  EXPECT_THAT(Failure(), HasSubstr("tensor b is missing: the index names s1"));
  std::filesystem::resize_file(dir_ / "s1", std::filesystem::file_size(dir_ / "s1") - 1);
  Index(R"({"a":"s1"})");
  EXPECT_THAT(Failure(), HasSubstr("/s1: tensor a: ends at byte 1"));
  std::filesystem::remove(dir_ / kIndex);
  std::filesystem::create_directory(dir_ / kIndex);
  EXPECT_THAT(Failure(), HasSubstr("index.json: is a folder"));
}

TEST_F(CheckpointTest, FolderProblems) {
  EXPECT_THAT(Checkpoint::Open(dir_ / "none").message(), HasSubstr("none: No such file"));
  EXPECT_THAT(Checkpoint::Open("").message(), HasSubstr("No such file"));
  WriteBytes(dir_ / "file", "x");
  EXPECT_THAT(Checkpoint::Open(dir_ / "file").message(), HasSubstr("file: is a file"));
  const std::string odd = dir_ / "with space \xc3\xa9";
  std::filesystem::create_directory(odd);
  Shard("with space \xc3\xa9/model.safetensors", {"a"}, 3);
  EXPECT_TRUE(Checkpoint::Open(odd).ok());
  std::filesystem::create_symlink(odd, dir_ / "link");
  EXPECT_TRUE(Checkpoint::Open(dir_ / "link").ok());
}

TEST_F(CheckpointTest, FolderWithoutPermission) {
  if (::geteuid() == 0) GTEST_SKIP() << "SKIP: root may enter every folder";
  const std::string locked = dir_ / "locked";
  std::filesystem::create_directory(locked);
  ::chmod(locked.c_str(), 0);
  EXPECT_THAT(Checkpoint::Open(locked).message(), HasSubstr("Permission denied"));
  ::chmod(locked.c_str(), 0700);
}

TEST(ParseIndex, RefusesHostileText) {
  const struct {
    const char *text, *words;
  } cases[] = {
      {"", "not valid JSON"},
      {"[]", "not a JSON object"},
      {"{}", "key weight_map is missing"},
      {R"({"weight_map":[]})", "weight_map is a list of 0"},
      {R"({"weight_map":{}})", "names no tensor"},
      {R"({"weight_map":{"a":"../x"}})", "puts a into \"../x\""},
      {R"({"weight_map":{"a":"/etc/passwd"}})", "not the name of a file"},
      {R"({"weight_map":{"a":".."}})", "not the name of a file"},
      {R"({"weight_map":{"a":"d/x"}})", "not the name of a file"},
      {R"({"weight_map":{"a":"x\u0000y"}})", "not the name of a file"},
      {R"({"weight_map":{"a":""}})", "not the name of a file"},
      {R"({"weight_map":{"a":null}})", "puts a into null"},
      {R"({"weight_map":{"a":3}})", "puts a into 3"},
      {R"({"weight_map":{"a":"x","a":"y"}})", "duplicate key \"a\""},
  };
  for (const auto& c : cases) {
    const auto r = ParseIndex(c.text, "i.json");
    ASSERT_FALSE(r.ok()) << c.text;
    EXPECT_THAT(r.message(), HasSubstr(c.words));
    EXPECT_THAT(r.message(), HasSubstr("i.json: "));
  }
}

/// As many tensors and shards as the released model has.
TEST_F(CheckpointTest, OpensAReleaseSizedFolderInSeconds) {
  std::string map = "{";
  for (int s = 0; s < 96; ++s) {
    std::vector<std::string> names;
    for (int i = 0; i < 5200; ++i) {
      names.push_back(fmt::format(
          "language_model.model.layers.{}.block_sparse_moe.experts.{}.w1.weight_packed", s, i));
      map += fmt::format("{}\"{}\":\"s{}\"", map.size() > 1 ? "," : "", names.back(), s);
    }
    Shard(fmt::format("s{}", s), names, 1);
  }
  Index(map + "}");
  const std::clock_t start = std::clock();  // processor time: other programs do not count
  const auto r = Checkpoint::Open(dir_.path());
  const double took = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r->tensors().size(), 96u * 5200u);
  RecordProperty("seconds", std::to_string(took));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // those take ten times as long
  EXPECT_LT(took, 30.0) << "takes 2 to 4 s in a release build";
#endif
}

}  // namespace
}  // namespace k3
