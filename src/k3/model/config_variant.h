// The k3_variant part of config.json (spec 15.5). Internal to config parsing.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"
#include "k3/io/json.h"
#include "k3/model/config.h"

namespace k3::config_internal {

// Limits far above any model that keep every product of two or three dimensions inside 64 bits.
inline constexpr std::int64_t kMaxDim = std::int64_t{1} << 24;
inline constexpr std::int64_t kMaxHeads = 1 << 16;
inline constexpr std::int64_t kMaxHeadDim = 1 << 16;
inline constexpr std::int64_t kMaxLayers = 4096;

/// What k3_variant says, checked key by key but not yet against the rest of the config. An absent
/// key is nullopt.
struct Variant {
  std::optional<ResidualMode> mode;
  std::optional<bool> attention_only;
  std::optional<bool> fixed_depth;
  std::optional<double> alpha_init;
  std::optional<bool> attn_res_gate;

  std::optional<RouterSpace> router;
  std::optional<std::int64_t> encoder_dim;
  std::optional<EncoderAct> encoder_act;

  std::optional<bool> width_latent;  // experts.width: true latent, false hidden

  std::optional<bool> decay_bounded;
  std::optional<double> lower_bound;

  std::optional<std::vector<AttentionKind>> layers, pattern;
  bool has_gqa = false;
  std::optional<std::int64_t> n_kv_heads, gqa_head_dim;
  std::optional<bool> rope;
  std::optional<double> rope_theta;
  std::optional<bool> output_gate, qk_norm;
};

std::string_view Word(ResidualMode mode);

/// Refuses unknown keys and values of the wrong kind.
Result<Variant> ParseVariant(const nlohmann::json& value, std::string_view where);

/// Fills the residual, router, attention, GQA and decay settings of `c`, whose other fields are
/// read already, and refuses combinations that contradict each other. `linear` is
/// linear_attn_config, if any, and `block_size` attn_res_block_size.
Status ApplyVariant(const Variant& v, const std::optional<JsonReader>& linear,
                    std::optional<std::int64_t> block_size, std::string_view where, ModelConfig* c);

}  // namespace k3::config_internal
