#include "k3/model/tensor_table.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <set>

#include "support/config_fixtures.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kGolden;
using testing::TempDir;

TEST(TensorTable, CountsOfTheReleasedModel) {
  const auto c = testing::ParseConfig(testing::ReleasedK3());
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
       "found U8, expected BF16, F16, F32, F8_E4M3 or I8"},
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
  tensors_["model.layers.0.mlp.gate_proj.weight_packed"] = Zeros(DType::kU8, {96, 32});
  ExpectFailure("ambiguous tensor model.layers.0.mlp.gate_proj.weight: it is also there");
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

}  // namespace
}  // namespace k3
