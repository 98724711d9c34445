#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "k3/serve/engine_metrics.h"
#include "k3/serve/metric_families_internal.h"

namespace k3::serve {
namespace {

using internal::Families;
using prometheus::MetricType;

constexpr std::size_t kGroups = 16;

/// A gauge with the mean over each group of neighbours; `name_of` names a member.
template <class T>
void Grouped(Families& f, const char* name, const char* help, const char* label,
             const std::vector<T>& members, const std::function<std::string(const T&)>& name_of,
             const std::function<double(const T&)>& value_of) {
  f.Begin(name, help, MetricType::Gauge);
  const std::size_t size = (members.size() + kGroups - 1) / kGroups;
  for (std::size_t first = 0; first < members.size(); first += size) {
    const std::size_t last = std::min(first + size, members.size()) - 1;
    double sum = 0;
    for (std::size_t i = first; i <= last; ++i) sum += value_of(members[i]);
    std::string text = name_of(members[first]);
    if (last > first) text += ".." + name_of(members[last]);
    f.Value(label, text, sum / static_cast<double>(last - first + 1));
  }
}

/// `bits` of the most there can be among `n`.
double Share(double bits, std::size_t n) {
  return n > 1 ? bits / std::log2(static_cast<double>(n)) : 0;
}

double DepthEntropy(const DepthWeights& d) {
  double bits = 0;
  for (const double w : d.mean) {
    if (w > 0) bits -= w * std::log2(w);
  }
  return Share(bits, d.mean.size());
}

}  // namespace

std::vector<prometheus::MetricFamily> TelemetryFamilies(const TelemetryView& v) {
  Families f;
  f.Counter("k3_sampled_passes_total", "Forward passes that were looked into", v.sampled_passes);
  const auto experts = [&](const char* name, const char* help,
                           const std::function<double(const ExpertLoad&)>& value) {
    Grouped<ExpertLoad>(
        f, name, help, "layers", v.experts,
        [](const ExpertLoad& e) { return fmt::to_string(e.layer); }, value);
  };
  experts("k3_experts_active", "Distinct experts of the last sampled pass",
          [](const ExpertLoad& e) { return static_cast<double>(e.active_last_step); });
  experts("k3_routing_entropy_ratio", "Entropy of the experts' load over that of an even load",
          [](const ExpertLoad& e) { return Share(e.entropy_bits(), e.load.size()); });
  experts("k3_router_weight_entropy_ratio",
          "Entropy of a token's expert weights over that of even ones, mean over tokens",
          [](const ExpertLoad& e) { return Share(e.weight_entropy_bits, e.per_token); });
  experts("k3_expert_load_max_violation", "Largest load over the mean load, minus one",
          [](const ExpertLoad& e) { return e.max_violation(); });
  experts("k3_experts_dead", "Experts that no token of the window chose",
          [](const ExpertLoad& e) { return static_cast<double>(e.dead()); });
  experts("k3_expert_window_tokens", "Sampled tokens of the window",
          [](const ExpertLoad& e) { return e.tokens; });
  const auto depth = [&](const char* name, const char* help,
                         const std::function<double(const DepthWeights&)>& value) {
    Grouped<DepthWeights>(
        f, name, help, "sites", v.depth, [](const DepthWeights& d) { return d.site; }, value);
  };
  depth("k3_depth_weight_live", "Mean weight of the live row in attention over depth",
        [](const DepthWeights& d) { return d.mean.empty() ? 0 : d.mean.back(); });
  depth("k3_depth_weight_entropy_ratio",
        "Entropy of the mean weights over depth over that of even ones", DepthEntropy);
  const auto decay = [&](const char* name, const char* help, double share) {
    Grouped<DecaySpread>(
        f, name, help, "layers", v.decay,
        [](const DecaySpread& d) { return fmt::to_string(d.layer); },
        [share](const DecaySpread& d) { return d.quantile(share); });
  };
  decay("k3_decay_half_life_p10_tokens", "KDA: a tenth of tokens and channels forget faster", 0.1);
  decay("k3_decay_half_life_p50_tokens", "KDA: half of tokens and channels forget faster", 0.5);
  decay("k3_decay_half_life_p90_tokens", "KDA: nine tenths of them forget faster", 0.9);
  return std::move(f.list);
}

std::vector<prometheus::MetricFamily> DriftFamilies(const DriftMonitor& monitor) {
  Families f;
  const auto rows = monitor.rows();
  const auto add = [&](const char* name, const char* help,
                       const std::function<double(const DriftDetector&)>& value) {
    f.Begin(name, help, MetricType::Gauge);
    for (const auto& r : rows) f.Value("signal", r.signal + "/" + r.stratum, value(r.detector));
  };
  add("k3_drift_distance", "Jensen-Shannon distance of the last window from the reference, 0 to 1",
      [](const DriftDetector& d) { return d.score(); });
  add("k3_drift_threshold", "What that distance is compared with",
      [](const DriftDetector& d) { return d.threshold(); });
  add("k3_drift_alert", "1 while the signal differs from its reference",
      [](const DriftDetector& d) { return d.state() == DriftDetector::State::kAlert ? 1.0 : 0.0; });
  return std::move(f.list);
}

}  // namespace k3::serve
