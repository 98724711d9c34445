// generation_config.json: the sampling settings a model's makers recommend.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"

namespace k3 {

/// Every field is optional: an absent key stays empty and the caller's default holds.
struct GenerationConfig {
  std::optional<bool> do_sample;
  std::optional<float> temperature;         // [0, 100]
  std::optional<float> top_p;               // [0, 1]
  std::optional<float> min_p;               // [0, 1]
  std::optional<float> repetition_penalty;  // (0, 100]
  std::optional<std::int64_t> top_k;        // 0: off; a file's -1 is read as 0
  std::optional<std::int64_t> max_new_tokens;
  /// When not empty it replaces the eos ids of config.json.
  std::vector<TokenId> eos;
};

/// Ids must lie in [0, vocab). Unknown keys are ignored. `where` starts every message.
Result<GenerationConfig> ParseGenerationConfig(std::string_view text, std::string_view where,
                                               std::int64_t vocab);

/// Reads DIR/generation_config.json; all fields stay empty when there is no such file.
Result<GenerationConfig> ReadGenerationConfig(const std::string& dir, std::int64_t vocab);

}  // namespace k3
