// Whole folders: config, shards and tensor table together.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "k3/io/checkpoint.h"
#include "k3/model/config.h"
#include "k3/model/model.h"
#include "k3/model/tensor_table.h"
#include "support/config_fixtures.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using testing::kGolden;
using testing::ReadBytes;
using testing::TempDir;
using testing::WriteBytes;

/// What opening a folder says: the first error, or all warnings.
struct Outcome {
  bool loads = false;
  std::string text;
};

Outcome OpenModel(const std::string& dir) {
  const auto config = ReadModelConfig(dir);
  if (!config.ok()) return {false, config.message()};
  const auto checkpoint = Checkpoint::Open(dir);
  if (!checkpoint.ok()) return {false, checkpoint.message()};
  const auto check = CheckTensors(*config, *checkpoint);
  if (!check.ok()) return {false, check.message()};
  std::string text = fmt::format("{}", fmt::join(config->warnings, "\n"));
  text += fmt::format("{}\n{}", fmt::join(checkpoint->warnings(), "\n"),
                      fmt::join(check->warnings, "\n"));
  return {true, text};
}

TEST(ModelFolder, AnyWeightChangesTheFingerprint) {
  const TempDir dir;
  std::vector<std::string> shards;
  for (const auto& entry : std::filesystem::directory_iterator(kGolden + "tiny-k3")) {
    const std::string name = entry.path().filename().string();
    WriteBytes(dir / name, ReadBytes(entry.path().string()));
    if (name.ends_with(".safetensors")) shards.push_back(dir / name);
  }
  ASSERT_EQ(shards.size(), 3u);
  const auto original = Model::Load(dir.path());
  ASSERT_TRUE(original.ok()) << original.message();
  for (const std::string& shard : shards) {
    const std::string bytes = ReadBytes(shard);
    std::string changed = bytes;
    changed.back() = static_cast<char>(changed.back() ^ 1);
    WriteBytes(shard, changed);
    const auto other = Model::Load(dir.path());
    ASSERT_TRUE(other.ok()) << other.message();
    EXPECT_NE((*other)->fingerprint(), (*original)->fingerprint()) << shard;
    WriteBytes(shard, bytes);
  }
  EXPECT_EQ((*Model::Load(dir.path()))->fingerprint(), (*original)->fingerprint());
}

TEST(ModelFolder, SettingsThatNoShapeShowsChangeTheFingerprint) {
  const TempDir dir;
  for (const auto& entry : std::filesystem::directory_iterator(kGolden + "tiny-k3")) {
    WriteBytes(dir / entry.path().filename().string(), ReadBytes(entry.path().string()));
  }
  const auto original = Model::Load(dir.path());
  ASSERT_TRUE(original.ok()) << original.message();
  const auto config = nlohmann::json::parse(ReadBytes(dir / "config.json"));
  const std::vector<std::pair<const char*, nlohmann::json>> changes = {
      {"rms_norm_eps", 1e-4},
      {"num_experts_per_token", 1},
      {"routed_scaling_factor", 3.5},
      {"moe_renormalize", false},
      {"activation_situ_beta", 5},
      {"attn_res_block_size", 2},
      {"moe_router_activation_func", "softmax"}};
  for (const auto& [key, value] : changes) {
    auto changed = config;
    ASSERT_NE(changed["text_config"][key], value) << key;
    changed["text_config"][key] = value;
    WriteBytes(dir / "config.json", changed.dump());
    const auto other = Model::Load(dir.path());
    ASSERT_TRUE(other.ok()) << other.message();
    EXPECT_NE((*other)->fingerprint(), (*original)->fingerprint()) << key;
  }
  WriteBytes(dir / "config.json", config.dump(1));
  EXPECT_EQ((*Model::Load(dir.path()))->fingerprint(), (*original)->fingerprint()) << "layout";
}

/// tests/cases/checkpoint: odd folders and what must happen to them.
TEST(CheckpointCases, AllAsExpected) {
  const char* python = "/usr/bin/python3";
  if (::access(python, X_OK) != 0) GTEST_SKIP() << "SKIP: " << python << " is not there";
  const TempDir dir;
  const std::string command =
      fmt::format("{} '{}/tests/cases/checkpoint/make_bad_checkpoints.py' '{}' > /dev/null", python,
                  K3_SOURCE_DIR, dir.path());
  ASSERT_EQ(std::system(command.c_str()), 0);
  const json cases = json::parse(testing::ReadBytes(dir / "expected.json"));
  ASSERT_GE(cases.size(), 30u);
  for (const json& c : cases) {
    const std::string name = c["case"], outcome = c["outcome"];
    SCOPED_TRACE(name);
    const Outcome got = OpenModel(dir / name);
    if (outcome != "either") {
      EXPECT_EQ(got.loads, outcome == "load") << got.text;
    }
    // NaN weights show only when the model runs.
    if (outcome == "load" || name.starts_with("ck20")) continue;
    for (const std::string word : c["mentions"]) EXPECT_THAT(got.text, HasSubstr(word));
  }
}

/// tools/make_checkpoint.py writes what CheckTensors asks for, the same bytes each time.
TEST(MakeCheckpoint, EveryLayoutLoads) {
  const char* python = "/usr/bin/python3";
  if (std::system(fmt::format("{} -c 'import numpy' 2> /dev/null", python).c_str()) != 0) {
    GTEST_SKIP() << "SKIP: " << python << " with numpy is not there";
  }
  const TempDir dir;
  const auto make = [&](const std::string& name, const char* out, const char* options) {
    const std::string command = fmt::format(
        "{} '{}/tools/make_checkpoint.py' '{}{}' '{}' --shard-size 200000 {} > /dev/null", python,
        K3_SOURCE_DIR, kGolden, name, dir / out, options);
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  };
  const struct {
    const char *name, *options;
  } cases[] = {{"tiny-k3", ""},
               {"tiny-k3", "--experts bf16"},
               {"tiny-linear", "--experts mxfp4"},
               {"variants/mqa", ""},
               {"variants/norm_scaled", ""},
               {"variants/gated", ""},
               {"variants/experts_hidden", ""}};
  int number = 0;
  for (const auto& c : cases) {
    SCOPED_TRACE(fmt::format("{} {}", c.name, c.options));
    const std::string out = fmt::format("m{}", number++);
    make(c.name, out.c_str(), c.options);
    const Outcome got = OpenModel(dir / out);
    EXPECT_TRUE(got.loads) << got.text;
    EXPECT_THAT(got.text, ::testing::MatchesRegex("\n*"));
  }
  make("tiny-k3", "again", "");
  make("tiny-k3", "other", "--seed 2");
  const auto first_shard = [&](const std::string& out) {
    for (const auto& e : std::filesystem::directory_iterator(dir / out)) {
      const std::string file = e.path().filename().string();
      if (file.starts_with("model-00001-of")) return testing::ReadBytes(e.path().string());
    }
    return std::string();
  };
  EXPECT_EQ(first_shard("m0"), first_shard("again"));
  EXPECT_NE(first_shard("m0"), first_shard("other"));
}

/// One stored tensor of a shard that is written as a header with a hole behind it.
struct Stored {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
};

/// A shard whose data section is a hole in the file: zeros that take no space on the disk.
bool WriteSparseShard(const std::string& path, const std::vector<Stored>& tensors) {
  std::string header = "{";
  std::int64_t at = 0;
  for (const auto& [name, dtype, shape] : tensors) {
    std::int64_t end =
        at + SizeOf(*ParseDType(dtype)) * TensorRef{DType::kU8, shape, nullptr}.bytes();
    header += fmt::format(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                          at > 0 ? "," : "", name, dtype, fmt::join(shape, ","), at, end);
    at = end;
  }
  header += "}";
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i) & 255u);
  testing::WriteBytes(path, bytes + header);
  const auto size = static_cast<off_t>(8 + header.size()) + static_cast<off_t>(at);
  return ::truncate(path.c_str(), size) == 0;
}

/// The released model with its 497,052 text tensors and 1.56e12 bytes, as sparse files.
TEST(ModelFolders, TheReleasedModelOpensInSeconds) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "SKIP: sanitizers leave too little address space for 1.5 TB of mappings";
#endif
  const auto config = testing::ParseConfig(testing::ReleasedK3());
  ASSERT_TRUE(config.ok()) << config.message();
  std::vector<Stored> all;
  for (const TensorSpec& spec : ExpectedTensors(*config)) {
    const std::string name = "language_model." + spec.name;
    if (spec.role != TensorRole::kRoutedExpert) {
      all.push_back({name, spec.f32 ? "F32" : "BF16", spec.shape});
      continue;
    }
    all.push_back({name + "_packed", "U8", {spec.shape[0], spec.shape[1] / 2}});
    all.push_back({name + "_scale", "U8", {spec.shape[0], spec.shape[1] / 32}});
  }
  const TempDir dir;
  std::string map;
  constexpr std::size_t kShards = 96;
  for (std::size_t s = 0; s < kShards; ++s) {
    const auto from = static_cast<std::ptrdiff_t>(all.size() * s / kShards);
    const auto to = static_cast<std::ptrdiff_t>(all.size() * (s + 1) / kShards);
    const std::vector<Stored> part(all.begin() + from, all.begin() + to);
    const std::string file = fmt::format("model-{:05}-of-00096.safetensors", s + 1);
    if (!WriteSparseShard(dir / file, part)) GTEST_SKIP() << "SKIP: no large sparse files here";
    for (const auto& t : part)
      map += fmt::format("{}\"{}\":\"{}\"", map.empty() ? "" : ",", t.name, file);
  }
  testing::WriteBytes(dir / "model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
  const std::clock_t start = std::clock();  // processor time: other programs do not count
  const auto seconds = [start] {
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  };
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.message();
  const double opened = seconds();
  const auto check = CheckTensors(*config, *checkpoint);
  ASSERT_TRUE(check.ok()) << check.message();
  const double checked = seconds();
  RecordProperty("seconds_open", std::to_string(opened));
  RecordProperty("seconds_all", std::to_string(checked));
  EXPECT_LT(checked, 60.0) << "takes about 3 s in a release build";
  EXPECT_EQ(check->text_tensors, 497220 - 168);
  EXPECT_EQ(check->packed_experts, 92 * 896 * 3);
  EXPECT_FALSE(check->scales_checked);  // 85e9 bytes of them
  EXPECT_TRUE(check->warnings.empty());
}

}  // namespace
}  // namespace k3
