// The tensors of a checkpoint, bound to the layers that use them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
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

using TensorMap = std::map<std::string, TensorRef, std::less<>>;

/// Matrices stay in the mapped files as stored. Vectors (norms, gates, biases) and convolution
/// weights are decoded to f32 once, into `owned`.
struct ModelWeights {
  /// A mix vector of the attention over depth and the two tensors it is the product of.
  struct Product {
    const float *norm, *proj;
    float* product;
    std::int64_t n;
  };
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
  std::vector<Product> products;
  std::int64_t bytes = 0;         // of all text tensors, as stored
  std::uint64_t fingerprint = 0;  // of settings, names, shapes and sampled contents
  std::vector<std::string> warnings;
};

/// Checks every tensor against the config (model/tensor_table.h), then binds them. The checkpoint
/// must outlive the result.
Result<std::unique_ptr<ModelWeights>> BindWeights(const ModelConfig& config,
                                                  const Checkpoint& checkpoint);

/// Binds f32 tensors that lie in memory, by their names without prefix: exactly those of
/// ExpectedTensors. Nothing but the products is copied, so that weights may be trained in place;
/// after a change RefreshProducts must run.
Result<std::unique_ptr<ModelWeights>> BindTensors(const ModelConfig& config,
                                                  const TensorMap& tensors);
void RefreshProducts(ModelWeights& weights);

}  // namespace k3
