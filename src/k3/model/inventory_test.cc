#include "k3/model/inventory.h"

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "k3/io/json.h"
#include "k3/model/findings.h"
#include "k3/model/weights.h"
#include "support/config_fixtures.h"
#include "support/golden.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using ::testing::Contains;
using testing::GoldenDir;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::string kConfigs = std::string(K3_SOURCE_DIR) + "/tests/configs/";

Inventory Take(const std::string& path) {
  auto i = TakeInventory(path);
  EXPECT_TRUE(i.ok()) << (i.ok() ? "" : i.message());
  return i.ok() ? std::move(*i) : Inventory();
}

std::string Text(const Inventory& i, std::string_view topic) {
  for (const Finding& f : FindFacts(i)) {
    if (f.topic == topic) return f.text;
  }
  return "";
}

/// A copy of tiny-k3 to take apart.
class TinyCopy : public testing::TempDir {
 public:
  TinyCopy() {
    std::filesystem::copy(GoldenDir() + "/tiny-k3", path(),
                          std::filesystem::copy_options::recursive);
    for (const auto& e : std::filesystem::directory_iterator(path())) {
      std::filesystem::permissions(e.path(), std::filesystem::perms::owner_all);
    }
  }
};

// Expected values: spec sections 1 and 14, not this code.
TEST(Inventory, CountsOfTheReleasedConfigs) {
  const Inventory k3 = Take(kConfigs + "k3-text-config.json");
  EXPECT_EQ(k3.source, ShapeSource::kConfig);
  EXPECT_EQ(k3.tensors, 497220 - 168);
  // A config does not show that A_log is padded from 96 to 128 in 69 layers.
  EXPECT_EQ(k3.parameters, 2779484478208 - 69 * 32);
  EXPECT_EQ(k3.active_parameters, 104189614848 - 69 * 32);
  EXPECT_EQ(k3.bytes_per_expert, 17547264);
  EXPECT_EQ(k3.experts, 92 * 896);
  EXPECT_NEAR(static_cast<double>(k3.bytes), 1.56e12, 0.01e12);
  const Inventory linear = Take(kConfigs + "kimi-linear-48b-config.json");
  EXPECT_NEAR(static_cast<double>(linear.parameters), 49.12e9, 0.005e9);
  EXPECT_NEAR(static_cast<double>(linear.active_parameters), 3e9, 0.3e9);
  EXPECT_EQ(Text(linear, "decay"), "unbounded softplus decay");
  EXPECT_EQ(Text(linear, "experts"), "experts run at the full hidden width 2304");
  EXPECT_EQ(Text(linear, "residual"), "plain");
}

TEST(Inventory, FindingsOfTheReleasedConfig) {
  const Inventory k3 = Take(kConfigs + "k3-text-config.json");
  EXPECT_EQ(Text(k3, "key-value compression"), "576 values a token and layer instead of 24576");
  EXPECT_EQ(Text(k3, "experts"),
            "experts run at width 3584, half of hidden, normed after combining");
  EXPECT_EQ(Text(k3, "residual"), "cross-layer residual (attention over depth), block 12");
  EXPECT_EQ(Text(k3, "decay"), "decay bounded at -5");
  EXPECT_EQ(Text(k3, "router"), "router reads the hidden state");
  EXPECT_EQ(Text(k3, "attention"), "layers: 69 KDA + 24 MLA");
  EXPECT_FALSE(CannotBeKnown(k3).empty());
  for (const Finding& f : FindFacts(k3)) {
    EXPECT_NE(f.basis, Basis::kShapes) << f.topic << ": no shape was read";
    EXPECT_FALSE(f.evidence.empty()) << f.topic;
  }
}

TEST(Inventory, HeadersOfGoldenModelsAgreeWithTheLoadedModel) {
  for (const char* name :
       {"tiny-k3", "tiny-linear", "variants/gqa_rope", "variants/gated_channel"}) {
    const Inventory i = Take(GoldenDir() + "/" + name);
    EXPECT_EQ(i.source, ShapeSource::kHeaders) << name;
    EXPECT_THAT(i.problems, IsEmpty()) << name;
    const auto checkpoint = Checkpoint::Open(GoldenDir() + "/" + name);
    ASSERT_TRUE(checkpoint.ok());
    const auto weights = BindWeights(i.config, *checkpoint);
    ASSERT_TRUE(weights.ok());
    EXPECT_EQ(i.bytes, (*weights)->bytes) << name;
    EXPECT_EQ(i.tensors, static_cast<std::int64_t>(checkpoint->tensors().size())) << name;
  }
}

TEST(Inventory, FindingsOfVariants) {
  const auto text = [](const char* variant, const char* topic) {
    return Text(Take(GoldenDir() + "/variants/" + variant), topic);
  };
  EXPECT_THAT(text("router_latent", "router"), HasSubstr("latent"));
  EXPECT_THAT(text("router_encoder", "router"), HasSubstr("encoder"));
  EXPECT_THAT(text("experts_hidden", "experts"), HasSubstr("full hidden width"));
  EXPECT_THAT(text("gated", "residual"), HasSubstr("one gate a token"));
  EXPECT_THAT(text("gated_channel", "residual"), HasSubstr("one gate a channel"));
  EXPECT_THAT(text("norm_scaled", "residual"), HasSubstr("normed and scaled"));
  EXPECT_THAT(text("full_attn_res", "residual"), HasSubstr("all earlier layers"));
  EXPECT_THAT(text("block_attn_res_gate", "residual gate"), HasSubstr("learned gate"));
  EXPECT_THAT(text("gqa_rope", "grouped queries"), HasSubstr("2 key-value heads for 4"));
  EXPECT_THAT(text("softplus_decay", "decay"), HasSubstr("softplus"));
}

TEST(Inventory, ConfigAndIndexAlone) {
  TinyCopy dir;
  std::int64_t shards = 0;
  const Inventory whole = Take(dir.path());
  for (const ShardInfo& s : whole.shards) shards += std::filesystem::remove(dir / s.file);
  ASSERT_EQ(shards, static_cast<std::int64_t>(whole.shards.size()));
  ASSERT_TRUE(std::filesystem::exists(dir / "model.safetensors.index.json"));
  const Inventory index = Take(dir.path());
  EXPECT_EQ(index.source, ShapeSource::kIndex);
  EXPECT_NEAR(static_cast<double>(index.active_parameters),
              static_cast<double>(whole.active_parameters),
              static_cast<double>(whole.config.n_layers) * 128);
  EXPECT_THAT(index.problems, IsEmpty());
  EXPECT_EQ(index.tensors, whole.tensors);
  EXPECT_NEAR(static_cast<double>(index.parameters), static_cast<double>(whole.parameters),
              static_cast<double>(whole.config.n_layers) * 128);  // padding of A_log
  std::filesystem::remove(dir / "model.safetensors.index.json");
  EXPECT_EQ(Take(dir.path()).source, ShapeSource::kConfig);
}

TEST(Inventory, SomeShardsAndDamagedOnes) {
  TinyCopy dir;
  const Inventory whole = Take(dir.path());
  ASSERT_GE(whole.shards.size(), 2u) << "tiny-k3 has several shards";
  testing::WriteBytes(dir / whole.shards[0].file, "short");
  const Inventory damaged = Take(dir.path());
  EXPECT_EQ(damaged.source, ShapeSource::kSomeHeaders);
  EXPECT_THAT(damaged.problems, Contains(HasSubstr(whole.shards[0].file)));
  EXPECT_EQ(damaged.tensors, whole.tensors);
  std::filesystem::remove(dir / whole.shards[0].file);
  EXPECT_THAT(Take(dir.path()).problems, IsEmpty());  // absent is not damaged
}

TEST(Inventory, MissingAndMisshapenTensorsAreProblemsNotErrors) {
  TinyCopy dir;
  auto config = nlohmann::json::parse(testing::ReadBytes(dir / "config.json"));
  config["text_config"]["intermediate_size"] = 77;
  testing::WriteBytes(dir / "config.json", config.dump());
  const Inventory i = Take(dir.path());
  EXPECT_THAT(i.problems, Contains(HasSubstr("wrong shape")));
  EXPECT_THAT(i.problems, Contains(HasSubstr("mlp.gate_proj.weight")));
  EXPECT_LE(i.problems.size(), 51u);
}

TEST(Inventory, NothingThereAndNonsense) {
  testing::TempDir dir;
  EXPECT_THAT(TakeInventory(dir / "absent").message(), HasSubstr("absent"));
  EXPECT_THAT(TakeInventory(dir.path()).message(), HasSubstr("config.json"));
  testing::WriteBytes(dir / "config.json", "[]");
  EXPECT_FALSE(TakeInventory(dir.path()).ok());
}

/// A file with f32 tensors of these names, one after the other, all of one shape.
void WriteTensors(const std::string& path, const std::vector<std::string>& names,
                  const std::vector<std::int64_t>& shape) {
  std::int64_t size = 4;
  for (const std::int64_t d : shape) size *= d;
  nlohmann::json header;
  std::int64_t at = 0;
  for (const std::string& name : names) {
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {at, at + size}}};
    at += size;
  }
  const std::string text = header.dump();
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(text.size() & 0xff);
  bytes[1] = static_cast<char>(text.size() >> 8);
  testing::WriteBytes(path, bytes + text + std::string(static_cast<std::size_t>(at), '\0'));
}

// Names of other parts may end like those of the text model; their shapes may be unknown.
TEST(Inventory, TensorsTheConfigDoesNotNameProveNothing) {
  testing::TempDir dir;
  const nlohmann::json patch{{"first_k_dense_replace", 0}, {"attn_res_block_size", nullptr}};
  testing::WriteBytes(dir / "config.json", testing::TinyK3(patch).dump());
  nlohmann::json index;
  for (const char* name : {"vision_tower.blocks.0.mlp.gate_proj.weight",
                           "language_model.model.layers.0.self_attention_res_gate.weight",
                           "language_model.model.layers.0.self_attn.A_log",
                           "audio.self_attn.g_a_proj.weight", "\x1b[2J\nproblems"}) {
    index["weight_map"][name] = "model.safetensors";
  }
  testing::WriteBytes(dir / "model.safetensors.index.json", index.dump());
  const Inventory i = Take(dir.path());
  EXPECT_EQ(Text(i, "dense layers"), "");
  EXPECT_EQ(Text(i, "residual"), "plain");
  EXPECT_EQ(Text(i, "KDA output gate"), "full rank");
  EXPECT_THAT(Text(i, "vision"), HasSubstr("1 tensors"));
  EXPECT_THAT(Text(i, "extra tensors"), HasSubstr("3 tensors"));
  for (const TensorGroup& g : i.groups) EXPECT_EQ(g.pattern, Printable(g.pattern));
}

// A header may give any shape to a tensor of the model: a problem, and nothing is read from it.
TEST(Inventory, ScalarsWhereMatricesBelongGiveNoFindings) {
  struct Case {
    const char *variant, *tensor, *topic;
  };
  const Case cases[] = {
      {"released", "layers.0.mlp.gate_proj.weight", "dense layers"},
      {"gated", "layers.0.self_attention_res_gate.weight", "residual"},
      {"released", "layers.3.self_attn.q_a_proj.weight", "query compression"},
      {"released", "layers.2.block_sparse_moe.gate.weight", "router"},
      {"released", "layers.2.block_sparse_moe.shared_experts.gate_proj.weight", "shared experts"}};
  for (const Case& c : cases) {
    testing::TempDir dir;
    const nlohmann::json config = testing::GoldenConfig(std::string("variants/") + c.variant);
    testing::WriteBytes(dir / "config.json", config.dump());
    const std::string prefix = config.contains("text_config") ? "language_model." : "";
    WriteTensors(dir / "model.safetensors", {prefix + "model." + c.tensor}, {});
    const Inventory i = Take(dir.path());
    const std::string suffix = std::string(c.tensor).substr(std::string("layers.0.").size());
    ASSERT_NE(i.Find(suffix), nullptr) << c.tensor;
    EXPECT_THAT(i.Find(suffix)->shape, IsEmpty()) << c.tensor;
    EXPECT_THAT(i.problems, Not(IsEmpty())) << c.tensor;
    EXPECT_EQ(i.parameters, 1) << "what is missing counts nothing";
    EXPECT_EQ(i.active_parameters, 1);
    EXPECT_THAT(Text(i, c.topic), Not(HasSubstr("width"))) << c.tensor;
    EXPECT_THAT(Text(i, c.topic), Not(HasSubstr("gate"))) << c.tensor;
  }
}

TEST(Inventory, ExpertsInOnePieceAndInPieces) {
  const std::string base = "language_model.model.layers.2.block_sparse_moe.experts.";
  const std::vector<std::string> together{base + "0.w1.weight", base + "0.w2.weight",
                                          base + "0.w3.weight", base + "1.w1.weight",
                                          base + "1.w2.weight", base + "1.w3.weight"};
  std::vector<std::string> mixed = together;
  std::swap(mixed[2], mixed[3]);
  for (const auto& [names, whole] : {std::pair(together, 2), std::pair(mixed, 0)}) {
    testing::TempDir dir;
    testing::WriteBytes(dir / "config.json", testing::GoldenConfig("variants/released").dump());
    WriteTensors(dir / "model.safetensors", names, {16, 16});
    const Inventory i = Take(dir.path());
    EXPECT_EQ(i.experts, 2);
    EXPECT_EQ(i.contiguous_experts, whole);
    EXPECT_EQ(i.bytes_per_expert, 3 * 16 * 16 * 4);
  }
}

TEST(Inventory, DecayOfTooFewHeadsIsAProblem) {
  testing::TempDir dir;
  testing::WriteBytes(dir / "config.json", testing::GoldenConfig("variants/released").dump());
  WriteTensors(dir / "model.safetensors", {"language_model.model.layers.0.self_attn.A_log"}, {1});
  EXPECT_THAT(Take(dir.path()).problems, Contains(HasSubstr("A_log: wrong shape: found [1]")));
}

// The same keys in text_config and in a flat config mean the same.
TEST(Inventory, DiffOfANestedAndAFlatConfigIsTheNesting) {
  testing::TempDir nested, flat;
  const nlohmann::json config = testing::GoldenConfig("variants/released");
  testing::WriteBytes(nested / "config.json", config.dump());
  testing::WriteBytes(flat / "config.json", config["text_config"].dump());
  const auto lines = DiffInventories(Take(nested.path()), Take(flat.path()));
  EXPECT_THAT(lines, Contains(HasSubstr("layout")));
  EXPECT_THAT(lines, Not(Contains(HasSubstr("hidden_size"))));
}

TEST(Inventory, DiffNamesWhatDiffersAndNothingElse) {
  const Inventory a = Take(GoldenDir() + "/variants/released");
  EXPECT_THAT(DiffInventories(a, a), IsEmpty());
  const auto lines = DiffInventories(a, Take(GoldenDir() + "/variants/router_latent"));
  EXPECT_THAT(lines, Contains(HasSubstr("k3_variant.router")));
  EXPECT_THAT(lines, Contains(HasSubstr("block_sparse_moe.gate.weight")));
  EXPECT_THAT(lines, Not(Contains(HasSubstr("self_attn"))));
}

}  // namespace
}  // namespace k3
