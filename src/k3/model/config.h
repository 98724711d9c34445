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
#include "k3/kernels/elementwise.h"
#include "k3/layers/config.h"

namespace k3 {

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
  bool packed_experts = false;  // quantization_config names MXFP4; the tensors' names decide

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
  GatedActivation activation() const {
    return {act == HiddenAct::kSitu, situ_beta, situ_linear_beta};
  }
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
