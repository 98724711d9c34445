// Configs for tests: the golden ones, patched.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "k3/model/config.h"
#include "support/temp_dir.h"

namespace k3::testing {

inline const std::string kGolden = std::string(K3_SOURCE_DIR) + "/tests/golden/";

inline nlohmann::json GoldenConfig(const std::string& name) {
  return nlohmann::json::parse(ReadBytes(kGolden + name + "/config.json"));
}

inline Result<ModelConfig> ParseConfig(const nlohmann::json& j) {
  return ParseModelConfig(j.dump(), "c.json");
}

/// tiny-k3 with `patch` merged into text_config and `outer` into the root; null removes a key.
inline nlohmann::json TinyK3(const nlohmann::json& patch = nlohmann::json::object(),
                             const nlohmann::json& outer = nlohmann::json::object()) {
  nlohmann::json j = GoldenConfig("tiny-k3");
  j["text_config"].merge_patch(patch);
  j.merge_patch(outer);
  return j;
}

/// The `released` golden (block AttnRes, 4 layers kda kda kda mla, 8 experts, latent 16) with a
/// k3_variant and `patch` merged into text_config.
inline nlohmann::json Released(const nlohmann::json& variant,
                               const nlohmann::json& patch = nlohmann::json::object()) {
  nlohmann::json j = GoldenConfig("variants/released");
  j["text_config"]["k3_variant"] = variant;
  j["text_config"].merge_patch(patch);
  return j;
}

/// The K3 row of the facts table.
inline nlohmann::json ReleasedK3() {
  std::vector<int> kda, full;
  for (int i = 1; i <= 93; ++i) (i % 4 == 0 || i == 93 ? full : kda).push_back(i);
  nlohmann::json j = TinyK3({{"vocab_size", 163840},
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

inline void ExpectRefused(const nlohmann::json& j, const std::string& words) {
  const auto r = ParseConfig(j);
  ASSERT_FALSE(r.ok()) << "accepted, expected: " << words;
  EXPECT_THAT(r.message(), ::testing::HasSubstr(words));
  EXPECT_THAT(r.message(), ::testing::HasSubstr("c.json: "));
}

}  // namespace k3::testing
