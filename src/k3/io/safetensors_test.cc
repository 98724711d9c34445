#include "k3/io/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>

#include "support/temp_dir.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;
using testing::ReadBytes;
using testing::TempDir;
using testing::WriteBytes;

std::string FileBytes(std::string header, std::string_view data) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(header.size() >> (8 * i) & 255u);
  return out + header + std::string(data);
}

std::string One(std::string_view shape, std::string_view offsets, std::string_view dtype = "U8") {
  return "{\"x\":{\"dtype\":\"" + std::string(dtype) + "\",\"shape\":" + std::string(shape) +
         ",\"data_offsets\":" + std::string(offsets) + "}}";
}

TEST(SafetensorsHeader, HostileHeadersAreRefused) {
  const struct {
    std::string json;
    std::uint64_t data;
    std::string words;
  } cases[] = {
      {"", 0, "does not start"},
      {" {}", 0, "does not start"},
      {"[]", 0, "does not start"},
      {"{", 0, "not valid JSON"},
      {"{}", 1, "1 bytes of data, but the tensors end at 0"},
      {R"({"x":3})", 0, "not an object"},
      {R"({"x":{}})", 0, "dtype is missing"},
      {R"({"":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1, "name is empty"},
      {R"({"x":{"dtype":"U8","data_offsets":[0,1]}})", 1, "shape is missing"},
      {R"({"x":{"dtype":"U8","shape":[1]}})", 1, "data_offsets is not a pair"},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}})", 1,
       "unknown key \"more\""},
      {One("[1]", "[0,1]", "F4"), 1, "unknown dtype F4"},
      {One("[1]", "[0,1]", "bf16"), 1, "unknown dtype bf16"},
      {One("[-1]", "[0,1]"), 1, "shape[0] is -1"},
      {One("[1.0]", "[0,1]"), 1, "shape[0] is 1.0"},
      {One("[\"1\"]", "[0,1]"), 1, "shape[0] is \"1\""},
      {One("[4294967296,4294967296]", "[0,0]"), 0, "too many elements"},
      {One("[4294967296,4294967296,0]", "[0,0]"), 0, "too many elements"},
      {One("[18446744073709551615]", "[0,1]"), 1, "shape[0] is 18446744073709551615"},
      {One("[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "9 dimensions"},
      {One("[2]", "[0,1]"), 1, "U8 [2] needs 2 bytes, data_offsets give 1"},
      {One("[1]", "[0,1]", "I64"), 1, "needs 8 bytes"},
      // A zero does not hide that the others overflow.
      {One("[0,1152921504606846976,4]", "[0,0]"), 0, "has too many elements"},
      {One("[1099511627776,1099511627776,0]", "[0,0]"), 0, "has too many elements"},
      {One("[1]", "[1,0]"), 1, "not a pair"},
      {One("[1]", "[0,1,2]"), 1, "not a pair"},
      {One("[1]", "[-1,0]"), 1, "data_offsets[0] is -1"},
      {One("[1]", "[0,1]"), 0, "truncated"},
      {One("[1]", "[1,2]"), 2, "leaving a hole after 0"},
      {One("[1]", "[0,1]"), 2, "2 bytes of data, but the tensors end at 1"},
      {R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
           "y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "overlap"},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
           "x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "duplicate key \"x\""},
      {R"({"__metadata__":[]})", 0, "__metadata__ is not an object"},
      {R"({"__metadata__":{"a":1}})", 0, "__metadata__.a is 1, expected a string"},
  };
  for (const auto& c : cases) {
    const auto r = ParseSafetensorsHeader(c.json, c.data, "some/shard");
    ASSERT_FALSE(r.ok()) << c.json;
    EXPECT_THAT(r.message(), HasSubstr(c.words)) << c.json;
    EXPECT_THAT(r.message(), HasSubstr("some/shard: ")) << c.json;
  }
}

TEST(SafetensorsHeader, OddButLegal) {
  EXPECT_TRUE(ParseSafetensorsHeader("{}", 0, "f").ok());
  EXPECT_TRUE(ParseSafetensorsHeader(R"({"__metadata__":{}})", 0, "f").ok());
  EXPECT_EQ(ParseSafetensorsHeader(R"({"__metadata__":{"a":"b"}})", 0, "f")->metadata.at("a"), "b");
  EXPECT_TRUE(ParseSafetensorsHeader(One("[]", "[0,4]", "F32"), 4, "f").ok());
  EXPECT_TRUE(ParseSafetensorsHeader(One("[3,0]", "[0,0]", "F32"), 0, "f").ok());
  EXPECT_TRUE(ParseSafetensorsHeader(One("[1]", "[0,1]", "F8_E8M0") + "  \n ", 1, "f").ok());
  // An empty tensor may stand anywhere, also between the bytes of others.
  EXPECT_TRUE(ParseSafetensorsHeader(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},
    "b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
                                     2, "f")
                  .ok());
}

TEST(SafetensorsFile, HeaderLengthIsCheckedBeforeUse) {
  const TempDir dir;
  const std::string good = FileBytes(One("[4]", "[0,4]"), "abcd");
  std::string wraps = good, over = good;
  wraps.replace(0, 8, "\xfb\xff\xff\xff\xff\xff\xff\xff");
  over[0] = static_cast<char>(good.size() - 7);
  const struct {
    std::string bytes, words;
  } cases[] = {{"", "0 bytes, too short"},
               {"1234567", "7 bytes, too short"},
               {std::string(8, '\0'), "does not start"},
               {wraps, "18446744073709551611"},
               {over, "header of"},
               {std::string("\x01\xe1\xf5\x05\0\0\0\0", 8) + "{", "the limit is 100000000"},
               {good.substr(0, good.size() - 1), "truncated"},
               {good + "x", "5 bytes of data"}};
  for (const auto& c : cases) {
    WriteBytes(dir / "f.safetensors", c.bytes);
    const auto r = SafetensorsFile::Open(dir / "f.safetensors");
    ASSERT_FALSE(r.ok()) << c.words;
    EXPECT_THAT(r.message(), HasSubstr(c.words));
    EXPECT_THAT(r.message(), HasSubstr("f.safetensors"));
  }
  // A file that is large enough for a header over the limit, without its blocks.
  WriteBytes(dir / "large.safetensors", std::string("\x01\xe1\xf5\x05\0\0\0\0", 8) + "{");
  ASSERT_EQ(::truncate((dir / "large.safetensors").c_str(), 200'000'000), 0);
  const auto large = SafetensorsFile::Open(dir / "large.safetensors");
  ASSERT_FALSE(large.ok());
  EXPECT_THAT(large.message(), HasSubstr("header of 100000001 bytes"));

  WriteBytes(dir / "f.safetensors", good);
  const auto r = SafetensorsFile::Open(dir / "f.safetensors");
  ASSERT_TRUE(r.ok()) << r.message();
  const TensorRef& t = r->tensors().at("x");
  EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(t.data), 4), "abcd");
}

/// The goldens come from the Python writer: reading and writing again must give the same bytes.
TEST(WriteSafetensors, EqualsThePythonWriterByteForByte) {
  const TempDir dir;
  int files = 0;
  const std::string golden = std::string(K3_SOURCE_DIR) + "/tests/golden";
  for (const auto& e : std::filesystem::recursive_directory_iterator(golden)) {
    if (e.path().extension() != ".safetensors") continue;
    ++files;
    const auto r = SafetensorsFile::Open(e.path().string());
    ASSERT_TRUE(r.ok()) << r.message();
    std::vector<NamedTensor> tensors;
    for (const auto& [name, t] : r->tensors()) tensors.insert(tensors.begin(), {name, t});
    const Status s = WriteSafetensors(dir / "copy", tensors, r->metadata());
    ASSERT_TRUE(s.ok()) << s.message();
    EXPECT_EQ(ReadBytes(dir / "copy"), ReadBytes(e.path().string())) << e.path();
  }
  EXPECT_GT(files, 30);
}

TEST(WriteSafetensors, EscapesNamesAndWritesEmptyAndScalarTensors) {
  const TempDir dir;
  const float one[] = {1.5f};
  const auto* data = reinterpret_cast<const std::byte*>(one);
  const std::string odd = "q\"\\\n\xc3\xa9";
  const Status s = WriteSafetensors(
      dir / "f", {{"empty", {DType::kF32, {0, 3}, nullptr}}, {odd, {DType::kF32, {}, data}}}, {});
  ASSERT_TRUE(s.ok()) << s.message();
  const auto r = SafetensorsFile::Open(dir / "f");
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r->tensors().at(odd).bytes(), 4);
  EXPECT_EQ(r->tensors().at("empty").shape, (std::vector<std::int64_t>{0, 3}));
}

TEST(WriteSafetensors, RefusesWhatCannotBeRead) {
  const TempDir dir;
  const std::byte b[1] = {};
  const TensorRef t{DType::kU8, {1}, b};
  EXPECT_THAT(WriteSafetensors(dir / "f", {{"a", t}, {"a", t}}).message(), HasSubstr("duplicate"));
  EXPECT_FALSE(WriteSafetensors(dir / "f", {{"", t}}).ok());
  EXPECT_FALSE(WriteSafetensors(dir / "f", {{"__metadata__", t}}).ok());
  EXPECT_FALSE(WriteSafetensors(dir / "f", {{"n", {DType::kU8, {-1}, b}}}).ok());
  EXPECT_FALSE(WriteSafetensors(dir / "f", {{"n", {DType::kU8, {1}, nullptr}}}).ok());
  EXPECT_EQ(dir.count(), 0);
}

TEST(WriteSafetensors, FullDiskLeavesNoFile) {
  const TempDir dir;
  const std::vector<std::byte> bytes(1 << 20);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 1 << 16;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status s = WriteSafetensors(dir / "f", {{"a", {DType::kU8, {1 << 20}, bytes.data()}}});
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.message(), HasSubstr(dir / "f"));
  EXPECT_EQ(dir.count(), 0);
}

TEST(SafetensorsWriter, PiecesGiveTheSameFile) {
  const testing::TempDir dir;
  const std::string bytes(48, 'x');
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  const std::vector<NamedTensor> tensors{{"codes", {DType::kI8, {4, 8}, data}},
                                         {"scales", {DType::kBF16, {4, 1}, data}},
                                         {"blocks", {DType::kF8E4M3, {0, 3}, data}}};
  ASSERT_TRUE(WriteSafetensors(dir / "whole", tensors, {{"format", "pt"}}).ok());
  {
    auto writer = SafetensorsWriter::Create(dir / "pieces", tensors, {{"format", "pt"}});
    ASSERT_TRUE(writer.ok()) << writer.message();
    EXPECT_EQ(writer->order()[0].name, "scales");  // larger elements come first
    for (int i = 0; i < 8; ++i) ASSERT_TRUE(writer->Write(bytes.data(), 5).ok());
    EXPECT_FALSE(std::filesystem::exists(dir / "pieces"));
    ASSERT_TRUE(writer->Commit().ok());
  }
  EXPECT_EQ(testing::ReadBytes(dir / "pieces"), testing::ReadBytes(dir / "whole"));
  {
    EXPECT_TRUE(SafetensorsWriter::Create(dir / "left", tensors).ok());
  }
  EXPECT_EQ(dir.count(), 2) << "without Commit nothing stays";
  const auto file = SafetensorsFile::Open(dir / "pieces");
  ASSERT_TRUE(file.ok()) << file.message();
  EXPECT_EQ(file->tensors().at("codes").dtype, DType::kI8);
  EXPECT_EQ(file->tensors().at("blocks").dtype, DType::kF8E4M3);
}

}  // namespace
}  // namespace k3
