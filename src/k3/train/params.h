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

/// What the model computes with in place of the masters. Gradients go to the masters unchanged.
struct ComputeOptions {
  bool bf16 = false;   // matrices rounded to bf16, except the router's
  bool mxfp4 = false;  // routed experts may be rounded to MXFP4: RoundExperts
};

/// Whether a matrix enters products that may be rounded to bf16.
bool IsRoundedInBf16(const TensorSpec& spec);
/// Whether it is exported as MXFP4 (ExportOptions::pack_experts): a routed expert with rows of
/// whole blocks.
bool PacksAsMxfp4(const TensorSpec& spec);

/// One tensor of ExpectedTensors.
struct Parameter {
  TensorSpec spec;
  float* value = nullptr;
  float* grad = nullptr;
  float* used = nullptr;  // what the model reads: `value` itself, or its rounded copy

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

/// Owns masters, gradients and a Model that reads the masters, or rounded copies, in place. Not
/// copyable or movable: the model points into it.
class Parameters {
 public:
  /// All zeros. Refuses nothing: the config was checked when it was parsed.
  static Result<std::unique_ptr<Parameters>> Create(const ModelConfig& config,
                                                    const ComputeOptions& compute = {});
  /// From a checkpoint folder; packed experts are decoded.
  static Result<std::unique_ptr<Parameters>> Load(const std::string& dir,
                                                  const ComputeOptions& compute = {});

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
  const ComputeOptions& compute() const { return compute_; }
  /// After values changed, before the next pass.
  void Refresh();
  /// From now on the model reads routed experts as Export packs them, or no longer does.
  void RoundExperts(bool on);
  /// Floats of the rounded copies.
  static std::int64_t CopiedFloats(const ModelConfig& config, const ComputeOptions& compute);

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
  Parameters(const ModelConfig& config, const ComputeOptions& compute)
      : config_(config), compute_(compute) {}

  ModelConfig config_;
  ComputeOptions compute_;
  bool rounds_experts_ = false;
  std::vector<float> values_, grads_, rounded_;
  std::vector<Parameter> list_;
  std::vector<std::vector<float>> product_grads_;
  std::unique_ptr<Model> model_;
};

}  // namespace k3
