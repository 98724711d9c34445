#include "k3/model/tensor_table.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "support/config_fixtures.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using nlohmann::json;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kGolden;
using testing::TempDir;

/// The K3 row of the facts table.
json ReleasedK3() {
  std::vector<int> kda, full;
  for (int i = 1; i <= 93; ++i) (i % 4 == 0 || i == 93 ? full : kda).push_back(i);
  json j = testing::TinyK3({{"vocab_size", 163840},
                            {"hidden_size", 7168},
                            {"num_hidden_layers", 93},
                            {"num_attention_heads", 96},
                            {"intermediate_size", 33792},
                            {"attn_res_block_size", 12},
                            {"num_experts", 896},
                            {"num_experts_per_token", 16},
                            {"moe_intermediate_size", 3072},
                            {"routed_expert_hidden_size", 3584},
                            {"q_lora_rank", 1536},
                            {"kv_lora_rank", 512},
                            {"qk_nope_head_dim", 128},
                            {"qk_rope_head_dim", 64},
                            {"v_head_dim", 128},
                            {"linear_attn_config", {{"num_heads", 96}, {"head_dim", 128}}}});
  j["text_config"]["linear_attn_config"]["kda_layers"] = kda;
  j["text_config"]["linear_attn_config"]["full_attn_layers"] = full;
  return j;
}

TEST(TensorTable, CountsOfTheReleasedModel) {
  const auto c = testing::ParseConfig(ReleasedK3());
  ASSERT_TRUE(c.ok()) << c.message();
  const auto start = std::chrono::steady_clock::now();
  std::int64_t tensors = 0, expert_weights = 0, trunk = 0;
  const Status s = ForEachTensor(*c, [&](const TensorSpec& spec) {
    const bool expert = spec.role == TensorRole::kRoutedExpert;
    tensors += expert ? 2 : 1;  // packed: codes and scales
    (expert ? expert_weights : trunk) += spec.elements();
    return Status();
  });
  ASSERT_TRUE(s.ok());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(tensors, 497220 - 168);  // the index of the release without the vision tensors
  EXPECT_EQ(expert_weights, std::int64_t{92} * 896 * 33030144);
  // 56,743,648,000 in the release, whose 69 A_log have 32 zeros of padding each.
  EXPECT_EQ(trunk, 56743648000 - 69 * 32);
  EXPECT_LT(took.count(), 5.0);
}

/// Every golden checkpoint is complete, has nothing extra and needs no warning.
TEST(CheckTensors, GoldenCheckpoints) {
  std::vector<std::string> dirs{"tiny-k3", "tiny-linear"};
  for (const auto& e : std::filesystem::directory_iterator(kGolden + "variants")) {
    if (e.is_directory()) dirs.push_back("variants/" + e.path().filename().string());
  }
  ASSERT_GE(dirs.size(), 18u);
  for (const auto& dir : dirs) {
    SCOPED_TRACE(dir);
    const auto config = ReadModelConfig(kGolden + dir);
    ASSERT_TRUE(config.ok()) << config.message();
    const auto checkpoint = Checkpoint::Open(kGolden + dir);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.message();
    const auto check = CheckTensors(*config, *checkpoint);
    ASSERT_TRUE(check.ok()) << check.message();
    EXPECT_THAT(config->warnings, IsEmpty());
    EXPECT_THAT(checkpoint->warnings(), IsEmpty());
    EXPECT_THAT(check->warnings, IsEmpty());
    EXPECT_THAT(check->unexpected, IsEmpty());
    EXPECT_EQ(check->prefix, config->nested ? "language_model." : "");
    EXPECT_EQ(check->text_tensors, static_cast<std::int64_t>(checkpoint->tensors().size()));
    EXPECT_TRUE(check->has_head);
    // F32 in the table is what the writer stored.
    for (const TensorSpec& spec : ExpectedTensors(*config)) {
      const TensorRef* t = checkpoint->Find(check->prefix + spec.name);
      if (t) {
        EXPECT_EQ(t->dtype, spec.f32 ? DType::kF32 : DType::kBF16) << spec.name;
      }
    }
  }
}

/// A golden checkpoint whose tensors can be changed before it is checked.
class CheckTensorsTest : public ::testing::Test {
 protected:
  void Load(const std::string& name) {
    auto config = ReadModelConfig(kGolden + name);
    auto checkpoint = Checkpoint::Open(kGolden + name);
    ASSERT_TRUE(config.ok() && checkpoint.ok());
    config_ = std::move(config).value();
    golden_.emplace(std::move(checkpoint).value());
    tensors_.clear();
    for (const auto& [n, t] : golden_->tensors()) tensors_.emplace(n, t);
  }
  Result<TensorCheck> Check() {
    std::vector<NamedTensor> list;
    for (const auto& [n, t] : tensors_) list.push_back({n, t});
    const Status s = WriteSafetensors(dir_ / "model.safetensors", list);
    if (!s.ok()) return s.error();
    auto checkpoint = Checkpoint::Open(dir_.path());
    if (!checkpoint.ok()) return checkpoint.error();
    return CheckTensors(config_, *checkpoint);
  }
  void ExpectFailure(const std::string& words) {
    const auto r = Check();
    ASSERT_FALSE(r.ok()) << "accepted, expected: " << words;
    EXPECT_THAT(r.message(), HasSubstr(words));
    EXPECT_THAT(r.message(), HasSubstr(dir_.path()));
  }
  TensorRef Zeros(DType dtype, std::vector<std::int64_t> shape) {
    TensorRef t{dtype, std::move(shape), nullptr};
    return WithBytes(t, std::string(static_cast<std::size_t>(t.bytes()), '\0'));
  }
  TensorRef WithBytes(TensorRef t, std::string bytes) {
    owned_.push_back(std::make_unique<std::string>(std::move(bytes)));
    t.data = reinterpret_cast<const std::byte*>(owned_.back()->data());
    return t;
  }
  std::string Bytes(const TensorRef& t) {
    return {reinterpret_cast<const char*>(t.data), static_cast<std::size_t>(t.bytes())};
  }

  ModelConfig config_;
  std::optional<Checkpoint> golden_;
  std::map<std::string, TensorRef> tensors_;
  std::vector<std::unique_ptr<std::string>> owned_;
  TempDir dir_;
};

const std::string kL1 = "language_model.model.layers.1.";
const std::string kW1 = kL1 + "block_sparse_moe.experts.5.w1.weight";

/// Whatever tensor is taken away, it is named.
TEST_F(CheckTensorsTest, EveryKindOfTensorIsNeeded) {
  std::set<std::string> tried;
  for (const char* name : {"variants/mqa", "variants/gated_channel", "variants/block_attn_res_gate",
                           "variants/router_encoder", "variants/norm_scaled", "variants/scaled"}) {
    Load(name);
    const auto all = tensors_;
    for (const auto& [n, t] : all) {
      std::string kind = n;
      std::erase_if(kind, [](char c) { return c >= '0' && c <= '9'; });
      if (!tried.insert(kind).second) continue;
      tensors_.erase(n);
      const std::string plain = n.starts_with("language_model.") ? n.substr(15) : n;
      ExpectFailure("missing tensor " + plain);
      tensors_.emplace(n, t);
    }
  }
}

TEST_F(CheckTensorsTest, WrongShapesAndDTypes) {
  Load("tiny-k3");
  const auto all = tensors_;
  const struct {
    std::string name;
    DType dtype;
    std::vector<std::int64_t> shape;
    std::string words;
  } cases[] = {
      {kL1 + "self_attn.q_proj.weight",
       DType::kBF16,
       {95, 64},
       "wrong shape model.layers.1.self_attn.q_proj.weight: found [95, 64], expected [96, 64]"},
      {kL1 + "self_attn.q_proj.weight", DType::kBF16, {96 * 64}, "found [6144], expected [96, 64]"},
      {kL1 + "self_attn.q_proj.weight",
       DType::kU8,
       {96, 64},
       "found U8, expected BF16, F16 or F32"},
      {kL1 + "self_attn.q_conv1d.weight",
       DType::kF32,
       {96, 3},
       "found [96, 3], expected [96, 1, 4]"},
      {kL1 + "self_attn.q_conv1d.weight", DType::kF32, {4, 96}, "expected [96, 1, 4]"},
      {kL1 + "self_attn.A_log", DType::kF32, {2}, "wrong shape model.layers.1.self_attn.A_log"},
      {kL1 + "self_attn.A_log", DType::kI32, {3}, "wrong dtype model.layers.1.self_attn.A_log"},
      {kL1 + "self_attn.dt_bias", DType::kF32, {1, 96}, "wrong shape"},
      {kW1 + "_packed",
       DType::kU8,
       {64, 15},
       "w1.weight_packed: found [64, 15], expected [64, 16]"},
      {kW1 + "_packed", DType::kI32, {64, 16}, "w1.weight_packed: found I32, expected U8"},
      {kW1 + "_scale", DType::kU8, {1, 64}, "w1.weight_scale: found [1, 64], expected [64, 1]"},
      {kW1 + "_scale", DType::kBF16, {64, 1}, "found BF16, expected U8 or F8_E8M0"},
      {"language_model.lm_head.weight", DType::kBF16, {575, 64}, "wrong shape lm_head.weight"},
  };
  for (const auto& c : cases) {
    tensors_ = all;
    tensors_[c.name] = Zeros(c.dtype, c.shape);
    ExpectFailure(c.words);
  }
}

TEST_F(CheckTensorsTest, LayoutsThatMeanTheSame) {
  Load("tiny-k3");
  for (auto& [n, t] : tensors_) {
    if (n.ends_with("conv1d.weight")) t.shape = {t.shape[0], t.shape[2]};
    if (n.ends_with("weight_scale")) t.dtype = DType::kF8E8M0;
    if (n.ends_with("A_log")) t.shape = {1, 1, 128, 1};
  }
  const auto r = Check();
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r->packed_experts, 7 * 16 * 3);
  EXPECT_TRUE(r->scales_checked);
}

TEST_F(CheckTensorsTest, ALogPaddingMustBeZero) {
  Load("tiny-k3");
  TensorRef& t = tensors_[kL1 + "self_attn.A_log"];
  std::string bytes = Bytes(t);
  bytes[4 * 100 + 2] = 1;
  t = WithBytes(t, bytes);
  ExpectFailure("model.layers.1.self_attn.A_log: found 128 values for 3 heads, and value 100");
}

TEST_F(CheckTensorsTest, NanScalesAreRefused) {
  Load("tiny-k3");
  TensorRef& t = tensors_[kW1 + "_scale"];
  std::string bytes = Bytes(t);
  bytes[7] = '\xff';
  t = WithBytes(t, bytes);
  ExpectFailure("scale 7 of tensor " + kW1 + "_scale is 255");
}

TEST_F(CheckTensorsTest, PackedAndPlainExperts) {
  Load("tiny-k3");
  const auto all = tensors_;
  tensors_[kW1] = Zeros(DType::kBF16, {64, 32});
  ExpectFailure("ambiguous tensor model.layers.1.block_sparse_moe.experts.5.w1.weight");
  tensors_.erase(kW1 + "_packed");
  tensors_.erase(kW1 + "_scale");
  EXPECT_TRUE(Check().ok());  // one plain expert among packed ones
  tensors_ = all;
  tensors_.erase(kW1 + "_packed");
  ExpectFailure("missing tensor model.layers.1.block_sparse_moe.experts.5.w1.weight_packed");
  tensors_ = all;
  tensors_.erase(kW1 + "_scale");
  ExpectFailure("missing tensor model.layers.1.block_sparse_moe.experts.5.w1.weight_scale");
  Load("tiny-linear");
  tensors_["model.layers.1.mlp.gate_proj.weight_packed"] = Zeros(DType::kU8, {96, 32});
  EXPECT_THAT(Check()->unexpected, ElementsAre("model.layers.1.mlp.gate_proj.weight_packed"));
}

TEST_F(CheckTensorsTest, UnexpectedTensors) {
  Load("tiny-k3");
  tensors_[kL1 + "self_attn.k_bias"] = Zeros(DType::kF32, {4});
  tensors_["vision_tower.x"] = Zeros(DType::kBF16, {4});
  tensors_["mm_projector.y"] = Zeros(DType::kBF16, {2});
  auto r = Check();
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r->vision_tensors, 2);
  EXPECT_EQ(r->vision_bytes, 12);
  EXPECT_THAT(r->warnings,
              ElementsAre(HasSubstr("unexpected tensor model.layers.1.self_attn.k_bias")));
  Load("variants/plain");
  tensors_["vision_tower.x"] = Zeros(DType::kBF16, {4});
  tensors_["language_model.rotary.freqs"] = Zeros(DType::kF32, {4});
  r = Check();
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_THAT(r->unexpected, ElementsAre("language_model.rotary.freqs"));
  tensors_[kL1 + "self_attn.k_bias"] = Zeros(DType::kF32, {4});
  ExpectFailure("unexpected tensor model.layers.1.self_attn.k_bias");
}

TEST_F(CheckTensorsTest, TiedEmbeddings) {
  Load("tiny-linear");
  config_.tied_embeddings = true;
  auto r = Check();
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_TRUE(r->has_head);
  EXPECT_THAT(r->warnings, ElementsAre(HasSubstr("lm_head.weight is there with its own values")));
  tensors_["lm_head.weight"] = tensors_["model.embed_tokens.weight"];
  EXPECT_THAT(Check()->warnings, IsEmpty());
  tensors_.erase("lm_head.weight");
  r = Check();
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_FALSE(r->has_head);
  config_.tied_embeddings = false;
  ExpectFailure("missing tensor lm_head.weight");
}

TEST_F(CheckTensorsTest, PrefixThatDisagreesWithTheConfig) {
  Load("tiny-k3");
  config_.nested = false;
  const auto r = Check();
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r->prefix, "language_model.");
  EXPECT_THAT(r->warnings, Contains(HasSubstr("config.json is flat")));
}

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

}  // namespace
}  // namespace k3
