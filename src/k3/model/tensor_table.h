// Which tensors a model of a given config has, and whether a checkpoint holds exactly those.
// Names, shapes and dtypes: spec sections 14 and 15.5 (docs/formats.md).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"
#include "k3/io/checkpoint.h"
#include "k3/model/config.h"
#include "k3/tensor/tensor_ref.h"

namespace k3 {

enum class TensorRole : std::uint8_t {
  kEmbedding,
  kHead,
  kNorm,       // input, post-attention and final norms
  kResidual,   // everything of the residual stream: mix norms and queries, alphas, gates
  kAttention,  // all of self_attn
  kDense,      // mlp of a layer without experts
  kRouter,     // gate, its bias, router_encoder
  kLatent,     // routed_expert_{down,up}_proj and routed_expert_norm
  kSharedExpert,
  kRoutedExpert,  // w1, w2, w3
};

std::string_view Name(TensorRole role);  // "routed expert"

/// One tensor as the tables define it. Matrices carry their plain `.weight` name; a checkpoint may
/// store codes and scales instead (model/matrix_form.h).
struct TensorSpec {
  std::string name;  // without the language_model. prefix
  std::vector<std::int64_t> shape;
  TensorRole role = TensorRole::kNorm;
  std::int32_t layer = -1;
  std::int32_t expert = -1;
  bool f32 = false;  // the release stores F32, else BF16; a loader accepts both

  std::int64_t elements() const {
    std::int64_t n = 1;
    for (const auto d : shape) n *= d;
    return n;
  }
};

/// Calls `visit` for every text tensor of the config: embedding, layers in order, final norms,
/// head. Stops and returns the first error. lm_head.weight is left out when the embeddings are
/// tied. The spec is reused between calls. K3 has about 250,000 of them.
Status ForEachTensor(const ModelConfig& config,
                     const std::function<Status(const TensorSpec&)>& visit);

/// The same as a list.
std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config);

/// What CheckTensors found.
struct TensorCheck {
  std::string prefix;               // "language_model." or ""
  bool has_head = true;             // false: no lm_head.weight, the embedding is the output layer
  std::int64_t text_tensors = 0;    // in the checkpoint; codes and scales count as two
  std::int64_t packed_experts = 0;  // expert matrices stored as MXFP4
  std::int64_t vision_tensors = 0;  // vision_tower.* and mm_projector.*, not used
  std::int64_t vision_bytes = 0;
  std::int64_t scale_bytes = 0;
  std::int64_t e4m3_bytes = 0;
  bool scales_checked = false;          // false: too many. NaN there ends a pass with an error
  bool codes_checked = false;           // the same for the NaN codes of e4m3
  std::vector<std::string> unexpected;  // names in the checkpoint that nothing uses
  std::vector<std::string> warnings;
};

/// Compares a checkpoint with its config. Refuses missing tensors, wrong shapes or dtypes, A_log
/// entries past the heads that are not zero, scales no writer may give and NaN codes of e4m3 (as
/// long as all scales, and all codes, together stay under 256 MiB) and, when the config has a
/// k3_variant, text tensors the tables do not name; without one such tensors give a warning. Reads
/// the headers and the small tensors named here, no weights.
Result<TensorCheck> CheckTensors(const ModelConfig& config, const Checkpoint& checkpoint);

/// Refuses E8M0 scales that hold the NaN code 255, and F32 or BF16 scales that are not positive
/// numbers up to 2^120 (beyond it a product with a code could leave f32). `name` and `where` are
/// for the message.
Status CheckScales(const TensorRef& scales, std::string_view name, std::string_view where);

/// Refuses e4m3 codes 0x7F and 0xFF, which are NaN.
Status CheckE4m3(const TensorRef& codes, std::string_view name, std::string_view where);

}  // namespace k3
