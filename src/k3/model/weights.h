// The tensors of a checkpoint, bound to the layers that use them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/io/checkpoint.h"
#include "k3/layers/ffn_layer.h"
#include "k3/layers/gqa_layer.h"
#include "k3/layers/kda_layer.h"
#include "k3/layers/mla_layer.h"
#include "k3/layers/residual.h"
#include "k3/model/config.h"

namespace k3 {

/// Matrices stay in the mapped files as stored. Vectors (norms, gates, biases) and convolution
/// weights are decoded to f32 once, into `owned`.
struct ModelWeights {
  struct Layer {
    CVec attn_norm, ffn_norm;
    KdaWeights kda;
    MlaWeights mla;
    GqaWeights gqa;
    DenseWeights dense;
    MoeWeights moe;
  };

  WeightRef embedding;
  std::vector<Layer> layers;
  ResidualWeights residual;
  CVec final_norm;
  WeightRef head;

  std::deque<std::vector<float>> owned;
  std::int64_t bytes = 0;         // of all text tensors, as stored
  std::uint64_t fingerprint = 0;  // of names, shapes and sampled contents
  std::vector<std::string> warnings;
};

/// Checks every tensor against the config (model/tensor_table.h), then binds them. The checkpoint
/// must outlive the result.
Result<std::unique_ptr<ModelWeights>> BindWeights(const ModelConfig& config,
                                                  const Checkpoint& checkpoint);

}  // namespace k3
