// Keeps the experts of a mixture equally busy while it trains. Spec section 14b, docs/training.md.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/train/params.h"
#include "k3/train/tape.h"

namespace k3 {

enum class BalanceMethod : std::uint8_t {
  kNone,
  kQuantile,         // b = the bias at which every expert would have got its share of this step
  kSlidingQuantile,  // thresholds that follow the quantile of raw scores with a decay
  kSign,             // b += step * sign(share - load)
  kAuxLoss,          // a loss term; the bias stays as it is
};

struct BalanceOptions {
  BalanceMethod method = BalanceMethod::kQuantile;
  bool exact = false;        // kQuantile: order statistics instead of a histogram
  std::int64_t bins = 1000;  // of the histogram
  double rate = 1.0;         // kQuantile: share of the way to the new bias
  /// The quantile rules: false pools what all passes of a step saw; true lets every pass find its
  /// own answer and takes the mean, as replicas without an exchange of counts would.
  bool local = false;
  // kSlidingQuantile. decay and capacity go linearly to their ends over the run.
  double decay = 0.3;         // weight of the newest quantile
  double decay_end = -1;      // negative: as decay
  double capacity = 1.0;      // an expert may take this many times its share
  double capacity_end = -1;   // negative: as capacity
  std::int64_t window = 1;    // quantiles of so many latest updates are averaged
  bool within_batch = false;  // after every pass instead of after the step
  double step = 1e-3;         // kSign
  double weight = 1e-2;       // kAuxLoss

  Status Check() const;
};

// The rules themselves. scores [m, n] are the unbiased ones, b [n] the bias the batch was routed
// with, k < n. Double in, double out: goldens are float64.
std::vector<double> QuantileBias(std::span<const double> scores, std::span<const double> bias,
                                 std::int64_t k, bool center = true, double rate = 1.0);
/// Counts of required biases per expert and bin over [min b - 1, max b + 1]; integers, so that
/// adding the counts of any split of a batch gives the same bias bit for bit.
struct MarginHistogram {
  double lo = 0, width = 0;
  std::int64_t bins = 0, tokens = 0;
  std::vector<std::int64_t> counts;  // [n, bins]

  MarginHistogram() = default;
  MarginHistogram(std::span<const double> bias, std::int64_t n_bins);
  void Add(std::span<const double> scores, std::span<const double> bias, std::int64_t k);
  std::vector<double> Bias(std::int64_t k, bool center = true) const;
};
/// The (q+1)-th largest score of each of n experts, q = capacity m k / n.
std::vector<double> ScoreQuantiles(std::span<const double> scores, std::int64_t n, std::int64_t k,
                                   double capacity = 1.0);
/// tau <- (1 - rate) tau + rate * quantiles; returns the bias mean tau - tau.
std::vector<double> SlidingBias(std::span<const double> quantiles, std::vector<double>& tau,
                                double rate);
std::vector<double> SignBias(std::span<const std::int64_t> load, std::span<const double> bias,
                             double share, double step);
/// weight n/k sum_j f_j P_j; adds factor times its gradient to dlogits when that is set. Rows with
/// counted[t] == 0 are left out (empty: all count).
double AuxLoss(CMat logits, View<const std::int32_t, 2> experts, bool softmax, double weight,
               std::span<const char> counted, double factor, Mat dlogits);

/// How one layer was loaded since the last Update.
struct LayerBalance {
  std::int64_t layer = 0, tokens = 0;
  std::vector<std::int64_t> load;
  double max_violation = 0;  // max load / mean load - 1
  double dead = 0;           // share of experts without a token
  double entropy = 0;        // of the loads, divided by log n
  double bias_min = 0, bias_max = 0;
};

/// Collects statistics from recorded passes and sets the router biases of `params`, which must
/// outlive it. Evaluation is not recorded and therefore never counts.
class Balancer {
 public:
  Balancer(Parameters& params, const BalanceOptions& options);
  /// From now on passes of this tape count.
  void Attach(TapeBackend& tape);

  /// Before every recorded pass: which of its rows count (empty: all), and the loss scale.
  void StartPass(std::vector<char> counted, double scale);
  /// After every recorded pass.
  void EndPass();
  /// Share of the run that is done, for what changes over it. Before the passes of a step.
  void SetProgress(double done) { done_ = done; }
  /// Once a step, after the optimiser: new biases from what was collected, which is forgotten.
  /// Returns how the step was loaded.
  std::vector<LayerBalance> Update();
  /// Forgets what was collected, and takes back what passes changed (a skipped step).
  void Discard();

  const BalanceOptions& options() const { return options_; }
  /// State beyond the biases, for checkpoints: thresholds and latest quantiles of the sliding rule
  /// by layer.
  std::map<std::int64_t, std::vector<double>> thresholds() const;
  Status SetThresholds(const std::map<std::int64_t, std::vector<double>>& thresholds);

 private:
  struct SlidingState {
    std::vector<double> tau;
    std::vector<std::vector<double>> recent;  // quantiles, newest last
  };
  struct Layer {
    std::int64_t index = 0, k = 0, tokens = 0;
    float* bias = nullptr;
    std::int64_t n = 0;
    std::vector<std::int64_t> load;
    std::vector<double> scores;  // of all counted rows; kept by the exact and sliding rules
    MarginHistogram histogram;
    std::vector<std::vector<double>> answers;  // of passes that do not pool
    SlidingState sliding, before;              // now, and at the start of the step
    std::vector<float> bias_before;
  };
  void OnRoute(const RouteArgs& args);
  void OnRouteBackward(const RouteArgs& args, CMat logits, View<const std::int32_t, 2> experts,
                       Mat dlogits);
  Layer* LayerOf(const RouteArgs& args);
  void SetBias(Layer& layer, std::span<const double> bias);
  /// The new bias (kQuantile) or the quantiles (kSlidingQuantile) that what was collected asks for,
  /// which is forgotten; empty when nothing was.
  std::vector<double> TakeAnswer(Layer& layer) const;
  void Forget();
  void Apply(Layer& layer, const std::vector<double>& answer);
  double Now(double start, double end) const {
    return end < 0 ? start : start + done_ * (end - start);
  }

  BalanceOptions options_;
  std::map<const float*, Layer> layers_;  // by the address of the bias
  std::vector<char> counted_;
  double scale_ = 1.0;
  double done_ = 0.0;
};

}  // namespace k3
