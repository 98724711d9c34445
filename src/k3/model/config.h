// What config.json says about a model, checked and with every default applied.
// Keys, defaults and refusals: spec sections 2, 2b and 15.5 (docs/formats.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"

namespace k3 {

enum class AttentionKind : std::uint8_t { kKda, kMla, kGqa };

/// How a sublayer's output joins the stream. kBlockAttnRes is the released K3, kPlain Kimi-Linear.
enum class ResidualMode : std::uint8_t {
  kBlockAttnRes,
  kFullAttnRes,
  kPlain,
  kScaled,
  kGated,
  kGatedChannel,
  kNormScaled,
};
enum class RouterSpace : std::uint8_t { kHidden, kLatent, kEncoder };
enum class EncoderAct : std::uint8_t { kSilu, kTanh, kRelu, kNone };
enum class ScoreFunction : std::uint8_t { kSigmoid, kSoftmax };
enum class HiddenAct : std::uint8_t { kSitu, kSilu };

struct KdaConfig {
  std::int64_t n_heads = 0;
  std::int64_t head_dim = 0;  // of keys and of values
  std::int64_t conv_kernel = 4;
  std::optional<float> lower_bound;  // set: bounded decay; absent: softplus decay
  bool full_rank_gate = false;

  std::int64_t width() const { return n_heads * head_dim; }
};

struct MlaConfig {
  std::int64_t q_lora_rank = 0;  // 0: direct q_proj
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_dim = 0;
  std::int64_t qk_rope_dim = 0;  // carries the name, is never rotated
  std::int64_t v_dim = 0;
  bool output_gate = false;
  float norm_eps = 1e-6f;  // of q_a_layernorm and kv_a_layernorm

  std::int64_t q_dim() const { return qk_nope_dim + qk_rope_dim; }
  std::int64_t row_dim() const { return kv_lora_rank + qk_rope_dim; }  // of a cached row
};

struct GqaConfig {
  std::int64_t n_kv_heads = 0;
  std::int64_t head_dim = 0;
  bool rope = false;
  double rope_theta = 10000.0;
  bool output_gate = false;
  bool qk_norm = false;
};

struct MoeConfig {
  std::int64_t n_experts = 0;  // 0: no mixture anywhere
  std::int64_t top_k = 0;
  std::int64_t n_shared = 0;
  std::int64_t intermediate = 0;
  std::int64_t latent = 0;  // routed_expert_hidden_size; 0: experts work at hidden_size
  bool latent_norm = false;
  bool renormalize = true;
  float routed_scale = 1.0f;
  std::int64_t n_group = 1;
  std::int64_t topk_group = 1;
  ScoreFunction score = ScoreFunction::kSigmoid;
  std::int64_t first_dense = 0;
  std::int64_t layer_freq = 1;
  RouterSpace router = RouterSpace::kHidden;
  std::int64_t encoder_dim = 0;
  EncoderAct encoder_act = EncoderAct::kSilu;
};

struct ResidualConfig {
  ResidualMode mode = ResidualMode::kPlain;
  std::int64_t block_size = 0;     // of kBlockAttnRes
  bool attention_only = false;     // the FFN site is plain
  bool fixed_depth_alpha = false;  // alpha = (2L)^-1/2 instead of a learned one
  double alpha_init = 1.0;         // training only
  bool attn_res_gate = false;      // h = p + gamma (mix - p)
};

struct ModelConfig {
  bool nested = false;  // keys came from text_config; tensor names then start with language_model.
  bool has_variant = false;  // a k3_variant object is present: any model_type, strict tensor list
  std::int64_t hidden = 0;
  std::int64_t n_layers = 0;
  std::int64_t n_heads = 0;  // of MLA and GQA layers
  std::int64_t vocab = 0;
  std::int64_t intermediate = 0;
  std::int64_t max_positions = 0;
  float rms_eps = 1e-5f;
  HiddenAct act = HiddenAct::kSilu;
  float situ_beta = 0.f;                  // set when act is kSitu
  std::optional<float> situ_linear_beta;  // absent: plain up branch
  bool tied_embeddings = false;

  std::vector<AttentionKind> attention;  // one per layer
  KdaConfig kda;
  MlaConfig mla;
  GqaConfig gqa;
  MoeConfig moe;
  ResidualConfig residual;

  std::optional<TokenId> bos, pad;
  std::vector<TokenId> eos;  // of config.json; generation_config.json may override

  std::vector<std::string> warnings;  // for the application to print

  bool is_moe(std::int64_t layer) const {
    return moe.n_experts > 0 && layer >= moe.first_dense && layer % moe.layer_freq == 0;
  }
  bool has(AttentionKind kind) const {
    for (const auto k : attention) {
      if (k == kind) return true;
    }
    return false;
  }
  /// Width the routed experts work at.
  std::int64_t expert_width() const { return moe.latent > 0 ? moe.latent : hidden; }
  /// The residual stream is an attention over depth.
  bool uses_attn_res() const {
    return residual.mode == ResidualMode::kBlockAttnRes ||
           residual.mode == ResidualMode::kFullAttnRes;
  }
};

/// Parses the text of a config.json. `where` (the file's path) starts every error message.
/// Unknown keys outside k3_variant are ignored; missing or impossible ones are refused by name.
Result<ModelConfig> ParseModelConfig(std::string_view text, std::string_view where);

/// Reads DIR/config.json.
Result<ModelConfig> ReadModelConfig(const std::string& dir);

}  // namespace k3
