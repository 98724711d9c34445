#include "k3/serve/telemetry.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <numbers>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

namespace k3::serve {
namespace {

constexpr std::size_t kMaxLayers = 4096;

template <class T>
T Load(const TensorRef& t, std::int64_t i) {
  T value;
  std::memcpy(&value, t.data + i * static_cast<std::int64_t>(sizeof(T)), sizeof value);
  return value;
}

/// "layer.12.WHAT" gives 12.
std::optional<std::size_t> LayerOf(std::string_view name, std::string_view what) {
  constexpr std::string_view kStart = "layer.";
  if (!name.starts_with(kStart) || !name.ends_with(what)) return std::nullopt;
  std::size_t layer = 0;
  const char* first = name.data() + kStart.size();
  const auto parsed = std::from_chars(first, name.data() + name.size(), layer);
  const std::string_view rest(parsed.ptr,
                              static_cast<std::size_t>(name.data() + name.size() - parsed.ptr));
  if (parsed.ec != std::errc() || rest != what || layer >= kMaxLayers) return std::nullopt;
  return layer;
}

double Entropy(const std::vector<double>& parts) {
  const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
  if (!(sum > 0)) return 0;
  double bits = 0;
  for (const double p : parts) {
    if (p > 0) bits -= p / sum * std::log2(p / sum);
  }
  return bits;
}

std::vector<double> Sum(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> out = a;
  out.resize(std::max(a.size(), b.size()));
  for (std::size_t i = 0; i < b.size(); ++i) out[i] += b[i];
  return out;
}

}  // namespace

double ExpertLoad::entropy_bits() const { return Entropy(load); }

double ExpertLoad::max_violation() const {
  const double sum = std::accumulate(load.begin(), load.end(), 0.0);
  if (load.empty() || !(sum > 0)) return 0;
  return *std::max_element(load.begin(), load.end()) * static_cast<double>(load.size()) / sum - 1;
}

std::int64_t ExpertLoad::dead() const { return std::count(load.begin(), load.end(), 0.0); }

void Telemetry::BeginPass() {
  const std::lock_guard lock(mutex_);
  ++passes_;
  if (drift_ != nullptr && pass_tokens_ > 0) {
    drift_->Observe("router_weight_entropy_bits", "all", pass_entropy_ / pass_tokens_);
  }
  if (drift_ != nullptr && pass_gates_ > 0) {
    drift_->Observe("decay_nats", "all", pass_decay_ / pass_gates_);
  }
  pass_entropy_ = pass_tokens_ = pass_decay_ = pass_gates_ = 0;
}

void Telemetry::Record(std::string_view name, const TensorRef& value) {
  constexpr std::string_view kDepth = "depth_weights.";
  if (value.shape.size() != 2) return;
  const std::lock_guard lock(mutex_);
  if (const auto layer = LayerOf(name, ".expert_idx")) {
    if (value.dtype == DType::kI32) Experts(*layer, value);
  } else if (const auto weighted = LayerOf(name, ".expert_weights")) {
    if (value.dtype == DType::kF32) Weights(*weighted, value);
  } else if (const auto decaying = LayerOf(name, ".log_decay")) {
    if (value.dtype == DType::kF32) Decays(*decaying, value);
  } else if (name.starts_with(kDepth) && value.dtype == DType::kF32) {
    Depth(name.substr(kDepth.size()), value);
  }
}

void Telemetry::Experts(std::size_t layer, const TensorRef& value) {
  if (layer >= layers_.size()) layers_.resize(layer + 1);
  Layer& l = layers_[layer];
  l.now.resize(static_cast<std::size_t>(n_experts_));
  if (l.tokens_now >= kWindow) {
    l.before = std::exchange(l.now, std::vector<double>(l.now.size()));
    l.tokens_before = std::exchange(l.tokens_now, 0);
    l.entropy_before = std::exchange(l.entropy_now, 0);
  }
  std::set<std::int32_t> active;
  for (std::int64_t i = 0; i < value.elements(); ++i) {
    const auto expert = Load<std::int32_t>(value, i);
    if (expert < 0 || expert >= n_experts_) continue;
    l.now[static_cast<std::size_t>(expert)] += 1;
    active.insert(expert);
  }
  l.active = static_cast<std::int64_t>(active.size());
  l.per_token = static_cast<std::size_t>(value.shape[1]);
  l.step_tokens = value.shape[0];
  l.tokens_now += static_cast<double>(value.shape[0]);
}

void Telemetry::Weights(std::size_t layer, const TensorRef& value) {
  if (layer >= layers_.size()) return;  // its experts come first
  const std::int64_t k = value.shape[1];
  std::vector<double> weights(static_cast<std::size_t>(k));
  for (std::int64_t t = 0; t < value.shape[0]; ++t) {
    for (std::int64_t i = 0; i < k; ++i) {
      weights[static_cast<std::size_t>(i)] = static_cast<double>(Load<float>(value, t * k + i));
    }
    const double bits = Entropy(weights);
    layers_[layer].entropy_now += bits;
    pass_entropy_ += bits;
    pass_tokens_ += 1;
  }
}

/// A few tokens of the pass: each has hundreds of channels.
void Telemetry::Decays(std::size_t layer, const TensorRef& value) {
  if (layer >= decays_.size()) decays_.resize(layer + 1);
  Decay& d = decays_[layer];
  d.now.resize(DriftDetector::kBuckets);
  if (d.tokens_now >= kWindow) {
    d.before = std::exchange(d.now, std::vector<double>(d.now.size()));
    d.tokens_before = std::exchange(d.tokens_now, 0);
  }
  const std::int64_t tokens = value.shape[0], width = value.shape[1];
  const std::int64_t step = (tokens + kDecayTokens - 1) / kDecayTokens;
  for (std::int64_t t = 0; t < tokens; t += step) {
    for (std::int64_t i = 0; i < width; ++i) {
      const double nats = -static_cast<double>(Load<float>(value, t * width + i));
      if (!(nats >= 0)) continue;  // not a number
      d.now[DriftDetector::Bucket(std::numbers::ln2 / std::max(nats, 1e-30))] += 1;
      pass_decay_ += nats;
      pass_gates_ += 1;
    }
    d.tokens_now += 1;
  }
}

void Telemetry::Depth(std::string_view name, const TensorRef& value) {
  auto site =
      std::find_if(sites_.begin(), sites_.end(), [name](const Site& s) { return s.name == name; });
  if (site == sites_.end()) {
    if (sites_.size() >= 3 * kMaxLayers) return;
    site = sites_.insert(sites_.end(), Site{std::string(name), {}, {}, 0, 0});
  }
  const std::int64_t rows = value.shape[1];
  site->now.resize(static_cast<std::size_t>(rows));
  if (site->tokens_now >= kWindow) {
    site->before = std::exchange(site->now, std::vector<double>(site->now.size()));
    site->tokens_before = std::exchange(site->tokens_now, 0);
  }
  for (std::int64_t i = 0; i < value.elements(); ++i) {
    site->now[static_cast<std::size_t>(i % rows)] += static_cast<double>(Load<float>(value, i));
  }
  site->tokens_now += static_cast<double>(value.shape[0]);
}

TelemetryView Telemetry::view() const {
  const std::lock_guard lock(mutex_);
  TelemetryView v;
  v.sampled_passes = passes_;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Layer& l = layers_[i];
    if (l.now.empty()) continue;  // a dense layer
    ExpertLoad e;
    e.layer = static_cast<std::int64_t>(i);
    e.load = Sum(l.now, l.before);
    e.tokens = l.tokens_now + l.tokens_before;
    e.weight_entropy_bits = (l.entropy_now + l.entropy_before) / std::max(e.tokens, 1.0);
    e.per_token = l.per_token;
    e.active_last_step = l.active;
    e.tokens_last_step = l.step_tokens;
    v.experts.push_back(std::move(e));
  }
  for (const Site& s : sites_) {
    DepthWeights d{s.name, Sum(s.now, s.before), s.tokens_now + s.tokens_before};
    for (double& w : d.mean) w /= std::max(d.tokens, 1.0);
    v.depth.push_back(std::move(d));
  }
  for (std::size_t i = 0; i < decays_.size(); ++i) {
    const Decay& d = decays_[i];
    if (d.now.empty()) continue;
    v.decay.push_back(
        {static_cast<std::int64_t>(i), Sum(d.now, d.before), d.tokens_now + d.tokens_before});
  }
  return v;
}

double DecaySpread::quantile(double p) const {
  const double sum = std::accumulate(counts.begin(), counts.end(), 0.0);
  double below = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    below += counts[i];
    // The middle of the bucket, which is half an octave wide.
    if (counts[i] > 0 && below >= p * sum) return DriftDetector::LowerBound(i) * std::exp2(0.25);
  }
  return 0;
}

Json TelemetryJson(const TelemetryView& v) {
  Json experts = Json::array(), depth = Json::array(), decay = Json::array();
  for (const ExpertLoad& e : v.experts) {
    experts.push_back({{"layer", e.layer},
                       {"tokens", e.tokens},
                       {"load", e.load},
                       {"entropy_bits", e.entropy_bits()},
                       {"weight_entropy_bits", e.weight_entropy_bits},
                       {"max_violation", e.max_violation()},
                       {"dead", e.dead()},
                       {"active_last_step", e.active_last_step},
                       {"tokens_last_step", e.tokens_last_step}});
  }
  for (const DepthWeights& d : v.depth) {
    depth.push_back({{"site", d.site}, {"tokens", d.tokens}, {"mean", d.mean}});
  }
  for (const DecaySpread& d : v.decay) {
    decay.push_back(
        {{"layer", d.layer}, {"tokens", d.tokens}, {"half_life_tokens", BucketsJson(d.counts)}});
  }
  return {{"sampled_passes", v.sampled_passes},
          {"experts", std::move(experts)},
          {"decay", std::move(decay)},
          {"depth_weights", std::move(depth)}};
}

}  // namespace k3::serve
