#include "k3/model/config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "support/config_fixtures.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using testing::ExpectRefused;
using testing::kGolden;
using testing::ParseConfig;
using testing::TinyK3;

TEST(ModelConfig, TinyK3) {
  const auto r = ReadModelConfig(kGolden + "tiny-k3");
  ASSERT_TRUE(r.ok()) << r.message();
  const ModelConfig& c = *r;
  EXPECT_TRUE(c.nested);
  EXPECT_FALSE(c.has_variant);
  EXPECT_EQ(c.hidden, 64);
  EXPECT_EQ(c.n_layers, 8);
  EXPECT_EQ(c.vocab, 576);
  EXPECT_EQ(c.act, HiddenAct::kSitu);
  EXPECT_EQ(c.situ_beta, 4.0f);
  EXPECT_EQ(c.situ_linear_beta, 25.0f);
  EXPECT_EQ(c.attention[2], AttentionKind::kKda);
  EXPECT_EQ(c.attention[3], AttentionKind::kMla);
  EXPECT_EQ(c.attention[7], AttentionKind::kMla);
  EXPECT_EQ(c.kda.width(), 96);
  EXPECT_EQ(c.kda.lower_bound, -5.0f);
  EXPECT_TRUE(c.kda.full_rank_gate);
  EXPECT_EQ(c.mla.q_dim(), 24);
  EXPECT_EQ(c.mla.row_dim(), 40);
  EXPECT_EQ(c.mla.norm_eps, 1e-6f);
  EXPECT_TRUE(c.mla.output_gate);
  EXPECT_EQ(c.residual.mode, ResidualMode::kBlockAttnRes);
  EXPECT_EQ(c.residual.block_size, 3);
  EXPECT_EQ(c.moe.n_experts, 16);
  EXPECT_EQ(c.moe.latent, 32);
  EXPECT_TRUE(c.moe.latent_norm);
  EXPECT_FALSE(c.is_moe(0));
  EXPECT_TRUE(c.is_moe(1));
  EXPECT_EQ(c.bos, 320);
  EXPECT_EQ(c.pad, 575);
  EXPECT_THAT(c.eos, ElementsAre(322));
  EXPECT_THAT(c.warnings, IsEmpty());
}

TEST(ModelConfig, TinyLinear) {
  const auto r = ReadModelConfig(kGolden + "tiny-linear/");
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_FALSE(r->nested);
  EXPECT_EQ(r->act, HiddenAct::kSilu);
  EXPECT_FALSE(r->kda.lower_bound.has_value());
  EXPECT_FALSE(r->kda.full_rank_gate);
  EXPECT_EQ(r->mla.q_lora_rank, 0);
  EXPECT_EQ(r->residual.mode, ResidualMode::kPlain);
  EXPECT_EQ(r->moe.latent, 0);
  EXPECT_EQ(r->expert_width(), 64);
  EXPECT_EQ(r->moe.routed_scale, 2.446f);
  EXPECT_THAT(r->warnings, IsEmpty());
}

TEST(ModelConfig, GoldenVariants) {
  const auto read = [](const char* name) {
    auto r = ReadModelConfig(kGolden + "variants/" + name);
    EXPECT_TRUE(r.ok()) << name << ": " << r.message();
    return r.ok() ? std::move(r).value() : ModelConfig();
  };
  EXPECT_EQ(read("released").residual.mode, ResidualMode::kBlockAttnRes);
  EXPECT_EQ(read("plain").residual.mode, ResidualMode::kPlain);
  const ModelConfig scaled = read("scaled");
  EXPECT_EQ(scaled.residual.mode, ResidualMode::kScaled);
  EXPECT_EQ(scaled.residual.alpha_init, 0.5);
  EXPECT_FALSE(scaled.nested);
  const ModelConfig fixed = read("scaled_fixed_bound");
  EXPECT_TRUE(fixed.residual.fixed_depth_alpha);
  EXPECT_EQ(fixed.kda.lower_bound, -2.0f);
  EXPECT_EQ(read("gated").residual.mode, ResidualMode::kGated);
  EXPECT_EQ(read("gated_channel").residual.mode, ResidualMode::kGatedChannel);
  EXPECT_TRUE(read("norm_scaled").residual.attention_only);
  EXPECT_EQ(read("full_attn_res").residual.mode, ResidualMode::kFullAttnRes);
  EXPECT_TRUE(read("block_attn_res_gate").residual.attn_res_gate);
  EXPECT_EQ(read("router_latent").moe.router, RouterSpace::kLatent);
  const ModelConfig encoder = read("router_encoder");
  EXPECT_EQ(encoder.moe.router, RouterSpace::kEncoder);
  EXPECT_EQ(encoder.moe.encoder_dim, 12);
  EXPECT_EQ(encoder.moe.encoder_act, EncoderAct::kTanh);
  EXPECT_EQ(read("experts_hidden").moe.latent, 0);
  EXPECT_FALSE(read("softplus_decay").kda.lower_bound.has_value());
  const ModelConfig mqa = read("mqa");
  EXPECT_THAT(mqa.attention, ElementsAre(AttentionKind::kKda, AttentionKind::kGqa,
                                         AttentionKind::kMla, AttentionKind::kGqa));
  EXPECT_TRUE(mqa.gqa.rope && mqa.gqa.output_gate && mqa.gqa.qk_norm);
  EXPECT_EQ(mqa.gqa.rope_theta, 500.0);
  EXPECT_EQ(mqa.gqa.n_kv_heads, 1);
  const ModelConfig hybrid = read("gqa_hybrid");
  EXPECT_EQ(hybrid.attention[3], AttentionKind::kKda);  // the pattern wraps around
  EXPECT_FALSE(hybrid.gqa.rope);
  const ModelConfig llama = read("gqa_rope");
  EXPECT_TRUE(llama.has_variant);
  EXPECT_TRUE(llama.has(AttentionKind::kGqa) && !llama.has(AttentionKind::kMla));
}

TEST(ModelConfig, DefaultsOfAbsentKeys) {
  const auto r = ParseConfig(
      TinyK3({{"first_k_dense_replace", nullptr},
              {"moe_layer_freq", nullptr},
              {"routed_scaling_factor", nullptr},
              {"moe_renormalize", nullptr},
              {"num_expert_group", nullptr},
              {"topk_group", nullptr},
              {"num_shared_experts", nullptr},
              {"moe_router_activation_func", nullptr},
              {"mla_use_output_gate", nullptr},
              {"latent_moe_use_norm", nullptr},
              {"q_lora_rank", nullptr},
              {"activation_situ_linear_beta", nullptr},
              {"quantization_config", nullptr},
              {"rms_norm_eps", nullptr},
              {"linear_attn_config",
               {{"short_conv_kernel_size", nullptr}, {"use_full_rank_gate", nullptr}}}}));
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r->moe.first_dense, 0);
  EXPECT_EQ(r->moe.layer_freq, 1);
  EXPECT_EQ(r->moe.routed_scale, 1.0f);
  EXPECT_TRUE(r->moe.renormalize);
  EXPECT_EQ(r->moe.n_shared, 0);
  EXPECT_EQ(r->moe.score, ScoreFunction::kSigmoid);
  EXPECT_FALSE(r->mla.output_gate);
  EXPECT_FALSE(r->moe.latent_norm);
  EXPECT_EQ(r->mla.q_lora_rank, 0);
  EXPECT_FALSE(r->situ_linear_beta.has_value());
  EXPECT_EQ(r->kda.conv_kernel, 4);
  EXPECT_FALSE(r->kda.full_rank_gate);
  EXPECT_EQ(r->rms_eps, 1e-5f);
  EXPECT_THAT(r->warnings, ElementsAre(HasSubstr("rms_norm_eps is missing")));
}

TEST(ModelConfig, MissingKeysAreRefusedByName) {
  for (const char* key :
       {"hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads",
        "intermediate_size", "hidden_act", "activation_situ_beta", "num_experts_per_token",
        "moe_intermediate_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim", "linear_attn_config"}) {
    json j = TinyK3();
    j["text_config"].erase(key);
    ExpectRefused(j, fmt::format("{} is missing", key));
  }
  for (const char* key : {"kda_layers", "full_attn_layers", "num_heads", "head_dim"}) {
    json j = TinyK3();
    j["text_config"]["linear_attn_config"].erase(key);
    ExpectRefused(j, fmt::format("linear_attn_config.{} is missing", key));
  }
}

TEST(ModelConfig, ImpossibleValuesAreRefusedByName) {
  const struct {
    json patch;
    const char* words;
  } cases[] = {
      {{{"hidden_size", 0}}, "hidden_size is 0"},
      {{{"hidden_size", -64}}, "hidden_size is -64"},
      {{{"hidden_size", 64.0}}, "hidden_size is 64.0"},
      {{{"hidden_size", "64"}}, "hidden_size is \"64\""},
      {{{"hidden_size", 16777217}}, "hidden_size is 16777217"},
      {{{"hidden_size", 18446744073709551615u}}, "hidden_size is 18446744073709551615"},
      {{{"num_hidden_layers", 4097}}, "num_hidden_layers is 4097"},
      {{{"vocab_size", 1 << 25}}, "vocab_size"},
      {{{"num_experts", 65537}}, "num_experts is 65537"},
      {{{"num_experts_per_token", 17}}, "num_experts_per_token is 17, but num_experts is 16"},
      {{{"num_experts_per_token", 0}}, "num_experts_per_token is 0"},
      {{{"num_expert_group", 5}}, "num_expert_group 5"},
      {{{"num_expert_group", 4}, {"topk_group", 5}}, "topk_group is 5"},
      {{{"num_expert_group", 16}, {"topk_group", 2}}, "topk_group leaves only 2"},
      {{{"moe_layer_freq", 0}}, "moe_layer_freq is 0"},
      {{{"rms_norm_eps", 0}}, "rms_norm_eps is 0"},
      {{{"rms_norm_eps", true}}, "rms_norm_eps is true"},
      {{{"hidden_act", "gelu"}}, "hidden_act is \"gelu\", expected situ or silu"},
      {{{"activation_situ_beta", 0.0}}, "activation_situ_beta is 0.0"},
      {{{"moe_router_activation_func", "relu"}}, "moe_router_activation_func is \"relu\""},
      {{{"topk_method", "greedy"}}, "topk_method is \"greedy\""},
      {{{"mla_use_nope", false}}, "mla_use_nope is false"},
      {{{"model_type", "deepseek_v3"}}, "model_type is \"deepseek_v3\""},
      {{{"attn_res_block_size", 0}}, "attn_res_block_size is 0"},
      {{{"tie_word_embeddings", true}}, "tie_word_embeddings is false, but text_config"},
      {{{"linear_attn_config", {{"kda_layers", {1, 2, 3, 5}}}}}, "name layer 6 0 times"},
      {{{"linear_attn_config", {{"kda_layers", {1, 2, 3, 4, 5, 6}}}}}, "name layer 4 2 times"},
      {{{"linear_attn_config", {{"kda_layers", {0, 1}}}}}, "linear_attn_config.kda_layers[0] is 0"},
      {{{"linear_attn_config", {{"full_attn_layers", {9}}}}}, "full_attn_layers[0] is 9"},
      {{{"linear_attn_config", {{"kda_layers", "all"}}}},
       "linear_attn_config.kda_layers is \"all\""},
      {{{"linear_attn_config", {{"gate_lower_bound", 0}}}}, "decay lower_bound must be negative"},
      {{{"linear_attn_config", 3}}, "linear_attn_config is 3, expected an object"},
      {{{"quantization_config", {{"format", "pack-quantized"}}}},
       "quantization_config.format is \"pack-quantized\""},
      {{{"quantization_config", {{"quant_method", "awq"}}}},
       "quantization_config.quant_method is \"awq\""},
      {{{"quantization_config", {{"quant_method", "fp8"}}}},
       "quantization_config.weight_block_size is missing"},
      {{{"quantization_config", {{"quant_method", "fp8"}, {"fmt", "e5m2"}}}},
       "quantization_config.fmt is \"e5m2\""},
      {{{"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {64, 128}}}}},
       "quantization_config.weight_block_size is [64, 128], expected [128, 128]"},
      {{{"quantization_config",
         {{"config_groups", {{"group_0", {{"weights", {{"group_size", 16}}}}}}}}}},
       "quantization_config.config_groups.group_0.weights.group_size is 16"},
  };
  for (const auto& c : cases) ExpectRefused(TinyK3(c.patch), c.words);
  ExpectRefused(TinyK3(json::object(), {{"model_type", "llama"}}), "model_type is \"llama\"");
  ExpectRefused(TinyK3(json::object(), {{"text_config", 7}}), "text_config is 7");
  ExpectRefused(TinyK3(json::object(), {{"eos_token_id", 576}}), "eos_token_id is 576");
  ExpectRefused(TinyK3(json::object(), {{"eos_token_id", {1, -1}}}), "eos_token_id[1] is -1");
  ExpectRefused(TinyK3(json::object(), {{"bos_token_id", {1, 2}}}), "bos_token_id is a list");
  ExpectRefused(TinyK3(json::object(), {{"quantization_config", {{"format", "nvfp4"}}}}),
                "format is \"nvfp4\"");
}

TEST(ModelConfig, DimensionsWhoseProductsWouldOverflowAreRefused) {
  constexpr std::int64_t kBig = 1 << 24;
  ExpectRefused(TinyK3({{"hidden_size", kBig}, {"moe_intermediate_size", kBig}}),
                "parameters, more than");
  ExpectRefused(
      TinyK3({{"hidden_size", kBig}, {"intermediate_size", kBig}, {"first_k_dense_replace", 8}}),
      "parameters, more than");
  ExpectRefused(TinyK3({{"linear_attn_config", {{"num_heads", 65536}, {"head_dim", 65536}}}}),
                "parameters");
  ExpectRefused(
      TinyK3({{"kv_lora_rank", kBig}, {"v_head_dim", 65536}, {"num_attention_heads", 65536}}),
      "parameters");
  std::vector<int> kda(4096);
  for (int i = 0; i < 4096; ++i) kda[static_cast<std::size_t>(i)] = i + 1;
  ExpectRefused(
      TinyK3({{"num_hidden_layers", 4096},
              {"num_experts", 65536},
              {"linear_attn_config", {{"kda_layers", kda}, {"full_attn_layers", json::array()}}}}),
      "experts, more than 1048576");
}

TEST(ModelConfig, IdsComeFromTheRootFirst) {
  auto r = ParseConfig(TinyK3({{"eos_token_id", 5}}, {{"eos_token_id", {7, 8}}}));
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_THAT(r->eos, ElementsAre(7, 8));
  r = ParseConfig(
      TinyK3({{"eos_token_id", 5}}, {{"eos_token_id", nullptr}, {"bos_token_id", nullptr}}));
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_THAT(r->eos, ElementsAre(5));
  r = ParseConfig(TinyK3({{"eos_token_id", nullptr}, {"pad_token_id", nullptr}},
                         {{"eos_token_id", nullptr}, {"pad_token_id", nullptr}}));
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_THAT(r->eos, IsEmpty());
  EXPECT_FALSE(r->pad.has_value());
}

TEST(ModelConfig, TiedEmbeddings) {
  EXPECT_TRUE(
      ParseConfig(TinyK3({{"tie_word_embeddings", true}}, {{"tie_word_embeddings", nullptr}}))
          ->tied_embeddings);
  EXPECT_TRUE(
      ParseConfig(TinyK3({{"tie_word_embeddings", nullptr}}, {{"tie_word_embeddings", true}}))
          ->tied_embeddings);
  EXPECT_FALSE(
      ParseConfig(TinyK3({{"tie_word_embeddings", nullptr}}, {{"tie_word_embeddings", nullptr}}))
          ->tied_embeddings);
}

TEST(ModelConfig, ExtraPredictionLayersGiveAWarning) {
  const auto r = ParseConfig(TinyK3({{"num_nextn_predict_layers", 1}}));
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_THAT(r->warnings, ElementsAre(HasSubstr("num_nextn_predict_layers is 1")));
}

TEST(ModelConfig, FileProblemsNameThePath) {
  const testing::TempDir dir;
  EXPECT_THAT(ReadModelConfig(dir.path()).message(), HasSubstr(dir / "config.json"));
  testing::WriteBytes(dir / "config.json", "");
  EXPECT_THAT(ReadModelConfig(dir.path()).message(), HasSubstr("config.json: not valid JSON"));
  testing::WriteBytes(dir / "config.json", "[1]");
  EXPECT_THAT(ReadModelConfig(dir.path()).message(),
              HasSubstr("is a list of 1, expected an object"));
  std::filesystem::remove(dir / "config.json");
  std::filesystem::create_directory(dir / "config.json");
  EXPECT_THAT(ReadModelConfig(dir.path()).message(), HasSubstr("config.json: is a folder"));
}

}  // namespace
}  // namespace k3
