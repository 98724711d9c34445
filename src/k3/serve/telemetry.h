// What a dynamic model is doing: which experts it picks, and from which depths it reads.
#pragma once

#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "k3/kernels/exec.h"
#include "k3/model/model.h"
#include "k3/runtime/token_model.h"
#include "k3/serve/drift.h"
#include "k3/serve/json_out.h"

namespace k3::serve {

/// Expert loads of one layer over a window of sampled tokens. Loads count choices: each token makes
/// k of them.
struct ExpertLoad {
  std::int64_t layer = 0;
  std::vector<double> load;           // of each expert
  double tokens = 0;                  // sampled, in the window
  double weight_entropy_bits = 0;     // mean over tokens, of the k weights made to sum to one
  std::size_t per_token = 0;          // experts that a token chooses
  std::int64_t active_last_step = 0;  // distinct experts of the last sampled pass
  std::int64_t tokens_last_step = 0;

  double entropy_bits() const;   // of load / sum; log2(experts) is even
  double max_violation() const;  // max / mean - 1; 0 is even
  std::int64_t dead() const;     // experts with no choice in the window
};

/// Mean softmax weights over depth at one place of the network, oldest row first, the live row
/// last.
struct DepthWeights {
  std::string site;  // as docs/trace.md names it, without "depth_weights."
  std::vector<double> mean;
  double tokens = 0;
};

/// How fast the channels of one KDA layer forget, over a window of sampled tokens: half-lives in
/// tokens, ln 2 / -log_decay, counted in the buckets of DriftDetector.
struct DecaySpread {
  std::int64_t layer = 0;
  std::vector<double> counts;
  double tokens = 0;

  /// The half-life that a share `p` of tokens and channels stays below, to within half an octave;
  /// 0 without tokens.
  double quantile(double p) const;
};

struct TelemetryView {
  std::vector<ExpertLoad> experts;
  std::vector<DepthWeights> depth;
  std::vector<DecaySpread> decay;
  std::uint64_t sampled_passes = 0;
};

/// Adds up what sampled passes report. The window is the last kWindow to 2 kWindow sampled tokens.
/// Record comes from the engine's thread, view from any.
class Telemetry final : public TraceSink {
 public:
  static constexpr double kWindow = 4096;
  static constexpr std::int64_t kDecayTokens = 32;  // of a pass that are looked at for decays

  /// `drift` may be null; it is told the mean entropy of the expert weights and the mean of
  /// -log_decay of each sampled pass.
  explicit Telemetry(std::int64_t n_experts, DriftMonitor* drift = nullptr)
      : n_experts_(n_experts), drift_(drift) {}

  void Record(std::string_view name, const TensorRef& value) override;
  void BeginPass();
  TelemetryView view() const;

 private:
  struct Layer {
    std::vector<double> now, before;  // loads
    double tokens_now = 0, tokens_before = 0, entropy_now = 0, entropy_before = 0;
    std::size_t per_token = 0;
    std::int64_t active = 0, step_tokens = 0;
  };
  struct Site {
    std::string name;
    std::vector<double> now, before;  // sums
    double tokens_now = 0, tokens_before = 0;
  };
  struct Decay {
    std::vector<double> now, before;  // counts
    double tokens_now = 0, tokens_before = 0;
  };
  void Decays(std::size_t layer, const TensorRef& value);
  void Experts(std::size_t layer, const TensorRef& value);
  void Weights(std::size_t layer, const TensorRef& value);
  void Depth(std::string_view site, const TensorRef& value);

  const std::int64_t n_experts_;
  DriftMonitor* const drift_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Layer> layers_;
  std::vector<Site> sites_;
  std::vector<Decay> decays_;  // by layer; empty counts: not KDA
  std::uint64_t passes_ = 0;
  double pass_entropy_ = 0, pass_tokens_ = 0;  // of this pass, all layers
  double pass_decay_ = 0, pass_gates_ = 0;
};

/// A model whose every `every`-th pass is looked into. Costs a few memory reads for each such pass.
class ObservedModel final : public TokenModel {
 public:
  ObservedModel(const Model& model, Exec& exec, Telemetry& telemetry, std::int64_t every)
      : model_(model), exec_(exec), telemetry_(telemetry), every_(every) {}

  std::int64_t vocab() const override { return model_.config().vocab; }
  std::int64_t max_positions() const override { return model_.config().max_positions; }
  std::uint64_t fingerprint() const override { return model_.fingerprint(); }
  MathMode math() const override { return exec_.math; }
  ModelState NewState() const override { return model_.NewState(); }
  Status Forward(std::span<const SequenceInput> batch, std::vector<float>& logits) override {
    const bool look = every_ > 0 && passes_++ % every_ == 0;
    if (look) telemetry_.BeginPass();
    return model_.Forward(batch, exec_, logits, look ? &telemetry_ : nullptr);
  }
  ThreadPool* pool() override { return &exec_.pool; }

 private:
  const Model& model_;
  Exec& exec_;
  Telemetry& telemetry_;
  const std::int64_t every_;
  std::int64_t passes_ = 0;
};

/// Everything, for /v1/k3/telemetry.
Json TelemetryJson(const TelemetryView& view);

}  // namespace k3::serve
