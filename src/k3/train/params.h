// The trained weights of a model: f32 masters and gradients by tensor name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"
#include "k3/model/config.h"
#include "k3/model/model.h"
#include "k3/model/tensor_table.h"
#include "k3/train/shadow_map.h"

namespace k3 {

/// One tensor of ExpectedTensors.
struct Parameter {
  TensorSpec spec;
  float* value = nullptr;
  float* grad = nullptr;

  std::int64_t size() const { return spec.elements(); }
  /// [rows, cols] of the matrix it is used as: trailing dimensions folded into columns.
  std::int64_t rows() const { return spec.shape.size() > 1 ? spec.shape[0] : 1; }
  std::int64_t cols() const { return size() / rows(); }
  /// The router bias is set by the balancer; the optimiser never touches it.
  bool is_router_bias() const { return spec.name.ends_with("e_score_correction_bias"); }
};

/// What initialisation depends on (docs/training.md).
struct InitOptions {
  std::uint64_t seed = 0;
  double std = 0.02;  // of every matrix
};

struct ExportOptions {
  std::string config_json;    // text of the config.json the model was made from
  std::string tokenizer_dir;  // its tokenizer files are copied; empty: none
  bool pack_experts = true;   // routed experts as MXFP4 where their rows are whole blocks of 32
};

/// Owns masters, gradients and a Model that reads the masters in place. Not copyable or movable:
/// the model points into it.
class Parameters {
 public:
  /// All zeros. Refuses nothing: the config was checked when it was parsed.
  static Result<std::unique_ptr<Parameters>> Create(const ModelConfig& config);
  /// From a checkpoint folder; packed experts are decoded.
  static Result<std::unique_ptr<Parameters>> Load(const std::string& dir);

  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  /// Every tensor's starting value from scratch. The stream of random numbers of a tensor depends
  /// on its name and the seed alone, so that arms of an ablation share what they have in common.
  void Initialise(const InitOptions& options);

  std::vector<Parameter>& list() { return list_; }
  const std::vector<Parameter>& list() const { return list_; }
  /// nullptr when there is none.
  Parameter* Find(std::string_view name);

  const ModelConfig& config() const { return config_; }
  const Model& model() const { return *model_; }
  /// After values changed, before the next pass.
  void Refresh() { model_->RefreshWeights(); }

  std::int64_t total() const { return static_cast<std::int64_t>(values_.size()); }
  float* values() { return values_.data(); }
  float* grads() { return grads_.data(); }
  void ZeroGrads();

  /// Tells the map where gradients go.
  void Register(ShadowMap& shadows);
  /// Moves the gradients of products norm * proj to their factors. After every backward pass.
  void SplitProducts();

  /// Writes a model folder in the release's layout that k3 run loads: bf16 and f32 as the table
  /// says. The folder appears under its name when complete; an older one is replaced then.
  Status Export(const std::string& dir, const ExportOptions& options) const;

 private:
  explicit Parameters(const ModelConfig& config) : config_(config) {}

  ModelConfig config_;
  std::vector<float> values_, grads_;
  std::vector<Parameter> list_;
  std::vector<std::vector<float>> product_grads_;
  std::unique_ptr<Model> model_;
};

}  // namespace k3
