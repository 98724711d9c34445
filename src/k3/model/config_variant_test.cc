// k3_variant: every refusal of the specification, with its words.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "k3/model/config.h"
#include "support/config_fixtures.h"

namespace k3 {
namespace {

using nlohmann::json;
using testing::ExpectRefused;
using testing::ParseConfig;
using testing::Released;
using testing::TinyK3;

TEST(Variant, AbsentNullAndEmptyMeanTheReleasedModel) {
  for (const char* text :
       {"null", "{}", R"({"residual":null,"decay":{}})",
        R"({"residual":{"mode":null},"attention":{"gqa":null,"layers":null}})"}) {
    const auto r = ParseConfig(Released(json::parse(text)));
    ASSERT_TRUE(r.ok()) << text << ": " << r.message();
    EXPECT_EQ(r->residual.mode, ResidualMode::kBlockAttnRes);
    EXPECT_EQ(r->kda.lower_bound, -5.0f);
  }
}

TEST(Variant, UnknownKeysAndBadValues) {
  const struct {
    const char *variant, *words;
  } cases[] = {
      {R"(3)", "bad value k3_variant"},
      {R"([])", "bad value k3_variant"},
      {R"({"foo":1})", "unknown key k3_variant.foo"},
      {R"({"foo":null})", "unknown key k3_variant.foo"},
      {R"({"residual":3})", "bad value k3_variant.residual"},
      {R"({"residual":{"beta":1}})", "unknown key k3_variant.residual.beta"},
      {R"({"residual":{"mode":"sum"}})", "bad value k3_variant.residual.mode"},
      {R"({"residual":{"mode":1}})", "bad value k3_variant.residual.mode"},
      {R"({"residual":{"sites":"ffn"}})", "bad value k3_variant.residual.sites"},
      {R"({"residual":{"alpha_schedule":"linear"}})",
       "bad value k3_variant.residual.alpha_schedule"},
      {R"({"residual":{"alpha_init":"1"}})", "bad value k3_variant.residual.alpha_init"},
      {R"({"residual":{"alpha_init":true}})", "bad value k3_variant.residual.alpha_init"},
      {R"({"residual":{"attn_res_gate":1}})", "bad value k3_variant.residual.attn_res_gate"},
      {R"({"router":[]})", "bad value k3_variant.router"},
      {R"({"router":{"space":"full"}})", "bad value k3_variant.router.space"},
      {R"({"router":{"encoder_dim":0}})", "bad value k3_variant.router.encoder_dim"},
      {R"({"router":{"encoder_dim":-3}})", "bad value k3_variant.router.encoder_dim"},
      {R"({"router":{"encoder_dim":4.0}})", "bad value k3_variant.router.encoder_dim"},
      {R"({"router":{"encoder_dim":99999999999}})", "bad value k3_variant.router.encoder_dim"},
      {R"({"router":{"encoder_act":"gelu"}})", "bad value k3_variant.router.encoder_act"},
      {R"({"router":{"dim":3}})", "unknown key k3_variant.router.dim"},
      {R"({"experts":{"width":16}})", "bad value k3_variant.experts.width"},
      {R"({"experts":{"count":16}})", "unknown key k3_variant.experts.count"},
      {R"({"decay":{"form":"clamp"}})", "bad value k3_variant.decay.form"},
      {R"({"decay":{"lower_bound":"-5"}})", "bad value k3_variant.decay.lower_bound"},
      {R"({"decay":{"lower_bound":-1e300}})", "bad value k3_variant.decay.lower_bound"},
      {R"({"decay":{"bound":-5}})", "unknown key k3_variant.decay.bound"},
      {R"({"attention":{"layers":[]}})", "bad value k3_variant.attention.layers"},
      {R"({"attention":{"layers":"kda"}})", "bad value k3_variant.attention.layers"},
      {R"({"attention":{"pattern":[]}})", "bad value k3_variant.attention.pattern"},
      {R"({"attention":{"pattern":["kda","mha"]}})", "bad value k3_variant.attention.pattern"},
      {R"({"attention":{"gqa":3}})", "bad value k3_variant.attention.gqa"},
      {R"({"attention":{"gqa":{"num_kv_heads":0}}})",
       "bad value k3_variant.attention.gqa.num_kv_heads"},
      {R"({"attention":{"gqa":{"head_dim":true}}})", "bad value k3_variant.attention.gqa.head_dim"},
      {R"({"attention":{"gqa":{"head_dim":99999999}}})",
       "bad value k3_variant.attention.gqa.head_dim"},
      {R"({"attention":{"gqa":{"rope":"yarn"}}})", "bad value k3_variant.attention.gqa.rope"},
      {R"({"attention":{"gqa":{"rope_theta":0}}})",
       "bad value k3_variant.attention.gqa.rope_theta"},
      {R"({"attention":{"gqa":{"rope_theta":"x"}}})",
       "bad value k3_variant.attention.gqa.rope_theta"},
      {R"({"attention":{"gqa":{"output_gate":0}}})",
       "bad value k3_variant.attention.gqa.output_gate"},
      {R"({"attention":{"gqa":{"qk_norm":"no"}}})", "bad value k3_variant.attention.gqa.qk_norm"},
      {R"({"attention":{"gqa":{"window":4}}})", "unknown key k3_variant.attention.gqa.window"},
      {R"({"attention":{"heads":4}})", "unknown key k3_variant.attention.heads"},
      {R"({"balancing":{}})", "unknown key k3_variant.balancing"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.variant);
    ExpectRefused(Released(json::parse(c.variant)), c.words);
  }
}

TEST(Variant, ContradictionsAreRefusedWithTheirWords) {
  const json no_block = {{"attn_res_block_size", nullptr}};
  const json dense = {{"num_experts", nullptr},
                      {"num_experts_per_token", nullptr},
                      {"routed_expert_hidden_size", nullptr},
                      {"latent_moe_use_norm", nullptr}};
  const json no_latent = {{"routed_expert_hidden_size", nullptr}, {"latent_moe_use_norm", nullptr}};
  const json norm_only = {{"routed_expert_hidden_size", nullptr}};
  const json no_kda = {{"linear_attn_config", nullptr}};
  const json none = json::object();
  const struct {
    const char* variant;
    json patch;
    const char* words;
  } cases[] = {
      {R"({"residual":{"mode":"block_attn_res"}})", no_block,
       "attn_res_block_size required by residual mode block_attn_res"},
      {R"({"residual":{"mode":"plain"}})", none,
       "attn_res_block_size conflicts with residual mode plain"},
      {R"({"residual":{"mode":"full_attn_res"}})", none,
       "attn_res_block_size conflicts with residual mode full_attn_res"},
      {R"({"residual":{"mode":"norm_scaled"}})", none,
       "attn_res_block_size conflicts with residual mode norm_scaled"},
      {R"({"residual":{"sites":"attention"}})", none,
       "residual sites attention conflicts with residual mode block_attn_res"},
      {R"({"residual":{"sites":"attention"}})", no_block,
       "residual sites attention conflicts with residual mode plain"},
      {R"({"residual":{"mode":"full_attn_res","sites":"attention"}})", no_block,
       "residual sites attention conflicts with residual mode full_attn_res"},
      {R"({"residual":{"mode":"gated","alpha_schedule":"learned"}})", no_block,
       "alpha_schedule needs residual mode scaled or norm_scaled"},
      {R"({"residual":{"mode":"gated","alpha_init":1}})", no_block,
       "alpha_init needs a learned residual alpha"},
      {R"({"residual":{"mode":"scaled","alpha_schedule":"fixed_depth","alpha_init":1}})", no_block,
       "alpha_init needs a learned residual alpha"},
      {R"({"residual":{"mode":"scaled","attn_res_gate":true}})", no_block,
       "attn_res_gate needs residual mode block_attn_res"},
      {R"({"residual":{"mode":"full_attn_res","attn_res_gate":true}})", no_block,
       "attn_res_gate needs residual mode block_attn_res"},
      {R"({"router":{"space":"latent"}})", dense, "router latent needs num_experts"},
      {R"({"router":{"space":"encoder","encoder_dim":4}})", dense,
       "router encoder needs num_experts"},
      {R"({"router":{"space":"latent"}})", no_latent,
       "router latent needs routed_expert_hidden_size"},
      {R"({"router":{"space":"encoder"}})", none, "router encoder needs encoder_dim"},
      {R"({"router":{"encoder_dim":4}})", none, "encoder settings need router encoder"},
      {R"({"router":{"space":"latent","encoder_act":"relu"}})", none,
       "encoder settings need router encoder"},
      {R"({"experts":{"width":"hidden"}})", dense, "experts width needs num_experts"},
      {R"({"experts":{"width":"latent"}})", no_latent,
       "experts width latent needs routed_expert_hidden_size"},
      {R"({"experts":{"width":"hidden"}})", none,
       "experts width hidden conflicts with routed_expert_hidden_size"},
      {R"({"experts":{"width":"hidden"}})", norm_only,
       "experts width hidden conflicts with latent_moe_use_norm"},
      {R"({"attention":{"layers":["kda"],"pattern":["kda"]}})", none,
       "attention layers and pattern exclude each other"},
      {R"({"attention":{"layers":["kda","kda","mla"]}})", none,
       "attention layers has 3 entries, expected 4"},
      {R"({"attention":{"pattern":["kda","mla"]}})", none,
       "attention conflicts with linear_attn_config"},
      {R"({"attention":{"pattern":["mla"]}})",
       {{"linear_attn_config", {{"full_attn_layers", nullptr}}}},
       "attention conflicts with linear_attn_config"},
      {R"({"attention":{"pattern":["kda"]}})", no_kda, "kda layer needs linear_attn_config"},
      {R"({"attention":{"pattern":["mla"]}})",
       {{"linear_attn_config", nullptr}, {"kv_lora_rank", nullptr}},
       "mla layer needs kv_lora_rank"},
      {R"({"attention":{"gqa":{}}})", none, "gqa settings without a gqa layer"},
      {R"({"attention":{"pattern":["gqa"]}})", no_kda, "gqa layer needs num_kv_heads and head_dim"},
      {R"({"attention":{"pattern":["gqa"],"gqa":{"head_dim":4}}})", no_kda,
       "gqa layer needs num_kv_heads and head_dim"},
      {R"({"attention":{"pattern":["gqa"],"gqa":{"head_dim":4,"num_kv_heads":3}}})", no_kda,
       "num_attention_heads is not a multiple of gqa num_kv_heads"},
      {R"({"attention":{"pattern":["gqa"],"gqa":{"head_dim":4,"num_kv_heads":8}}})", no_kda,
       "num_attention_heads is not a multiple of gqa num_kv_heads"},
      {R"({"attention":{"pattern":["gqa"],"gqa":{"head_dim":5,"num_kv_heads":2,"rope":"neox"}}})",
       no_kda, "gqa rope needs an even head_dim"},
      {R"({"attention":{"pattern":["gqa"],"gqa":{"head_dim":4,"num_kv_heads":2,"rope_theta":10}}})",
       no_kda, "rope_theta needs gqa rope neox"},
      {R"({"attention":{"pattern":["mla"]},"decay":{"form":"softplus"}})", no_kda,
       "decay settings without a kda layer"},
      {R"({"attention":{"pattern":["mla"]},"decay":{"lower_bound":-1}})", no_kda,
       "decay settings without a kda layer"},
      {R"({"decay":{"form":"softplus","lower_bound":-1}})", none,
       "decay lower_bound conflicts with form softplus"},
      {R"({"decay":{"lower_bound":0}})", none, "decay lower_bound must be negative"},
      {R"({"decay":{"lower_bound":2.5}})", none, "decay lower_bound must be negative"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.variant);
    ExpectRefused(Released(json::parse(c.variant), c.patch), c.words);
  }
}

// Spec section 15.5: what holds when a key is absent.
TEST(Variant, DefaultsOfTheSettings) {
  const json gqa{{"num_kv_heads", 2}, {"head_dim", 4}, {"rope", "neox"}};
  const json variant{{"attention", {{"pattern", {"gqa"}}, {"gqa", gqa}}},
                     {"router", {{"space", "encoder"}, {"encoder_dim", 4}}},
                     {"residual", {{"mode", "scaled"}}}};
  const json patch{{"attn_res_block_size", nullptr}, {"linear_attn_config", nullptr}};
  const auto c = ParseConfig(Released(variant, patch));
  ASSERT_TRUE(c.ok()) << c.message();
  EXPECT_EQ(c->gqa.rope_theta, 10000.0);
  EXPECT_FALSE(c->gqa.output_gate || c->gqa.qk_norm);
  EXPECT_EQ(c->moe.encoder_act, EncoderAct::kSilu);
  EXPECT_EQ(c->residual.alpha_init, 1.0);
  EXPECT_FALSE(c->residual.fixed_depth_alpha || c->residual.attention_only);
  const json softplus{{"linear_attn_config", {{"gate_lower_bound", nullptr}}}};
  EXPECT_EQ(ParseConfig(Released(json::object(), softplus))->kda.lower_bound, std::nullopt);
  const json bounded{{"decay", {{"form", "bounded"}}}};
  EXPECT_EQ(ParseConfig(Released(bounded, softplus))->kda.lower_bound, -5.0f);
}

TEST(Variant, BesideATextConfig) {
  ExpectRefused(TinyK3(json::object(), {{"k3_variant", json::object()}}),
                "k3_variant belongs inside text_config");
}

TEST(Variant, AnyModelTypeIsAcceptedWithAVariant) {
  EXPECT_TRUE(ParseConfig(Released(json::object(), {{"model_type", "qwen3"}})).ok());
  ExpectRefused(Released(nullptr, {{"model_type", "qwen3"}}), "model_type is \"qwen3\"");
}

TEST(Variant, DecayOverridesTheLinearConfig) {
  EXPECT_FALSE(
      ParseConfig(Released({{"decay", {{"form", "softplus"}}}}))->kda.lower_bound.has_value());
  EXPECT_EQ(ParseConfig(Released({{"decay", {{"lower_bound", -2}}}}))->kda.lower_bound, -2.0f);
  EXPECT_EQ(ParseConfig(Released({{"decay", {{"form", "bounded"}}}},
                                 {{"linear_attn_config", {{"gate_lower_bound", nullptr}}}}))
                ->kda.lower_bound,
            -5.0f);
}

}  // namespace
}  // namespace k3
