// Shapes and switches of one kind of layer, as config.json gives them (spec sections 2 and 15.5).
#pragma once

#include <cstdint>
#include <optional>

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

}  // namespace k3
