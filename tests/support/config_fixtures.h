// Configs for tests: the golden ones, patched.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

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

inline void ExpectRefused(const nlohmann::json& j, const std::string& words) {
  const auto r = ParseConfig(j);
  ASSERT_FALSE(r.ok()) << "accepted, expected: " << words;
  EXPECT_THAT(r.message(), ::testing::HasSubstr(words));
  EXPECT_THAT(r.message(), ::testing::HasSubstr("c.json: "));
}

}  // namespace k3::testing
