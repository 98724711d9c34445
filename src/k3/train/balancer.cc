#include "k3/train/balancer.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace k3 {

Status BalanceOptions::Check() const {
  auto refuse = [](const char* key, double value, const char* expected) {
    return Error{Code::kInvalidArgument,
                 fmt::format("balance.{} is {}, expected {}", key, value, expected)};
  };
  if (bins < 2 || bins > 1'000'000) {
    return refuse("bins", static_cast<double>(bins), "2 to 1000000");
  }
  if (!(rate > 0 && rate <= 1)) return refuse("rate", rate, "a number in (0, 1]");
  if (!(decay > 0 && decay <= 1)) return refuse("decay", decay, "a number in (0, 1]");
  if (!(capacity > 0 && capacity <= 16)) return refuse("capacity", capacity, "a number in (0, 16]");
  if (!(step > 0 && step <= 1)) return refuse("step", step, "a number in (0, 1]");
  if (!(weight > 0 && weight <= 100)) return refuse("weight", weight, "a number in (0, 100]");
  return {};
}

Balancer::Balancer(Parameters& params, const BalanceOptions& options) : options_(options) {
  for (Parameter& p : params.list()) {
    if (!p.is_router_bias()) continue;
    Layer l;
    l.index = p.spec.layer, l.k = params.config().moe.top_k;
    l.bias = p.value, l.n = p.size();
    l.load.assign(static_cast<std::size_t>(l.n), 0);
    l.tau.assign(static_cast<std::size_t>(l.n), 0.0);
    layers_[p.value] = std::move(l);
  }
}

void Balancer::Attach(TapeBackend& tape) {
  tape.on_route = [this](const RouteArgs& a) { OnRoute(a); };
  if (options_.method != BalanceMethod::kAuxLoss) return;
  tape.on_route_backward = [this](const RouteArgs& a, CMat logits,
                                  View<const std::int32_t, 2> experts,
                                  Mat dlogits) { OnRouteBackward(a, logits, experts, dlogits); };
}

void Balancer::StartPass(std::vector<char> counted, double scale) {
  counted_ = std::move(counted);
  scale_ = scale;
}

Balancer::Layer* Balancer::LayerOf(const RouteArgs& a) {
  const auto it = layers_.find(a.bias.data);
  return it == layers_.end() ? nullptr : &it->second;
}

void Balancer::OnRoute(const RouteArgs& a) {
  Layer* l = LayerOf(a);
  if (l == nullptr) return;
  const std::int64_t T = a.logits.dim(0);
  const bool scored = l->k < l->n && (options_.method == BalanceMethod::kQuantile ||
                                      options_.method == BalanceMethod::kSlidingQuantile);
  std::vector<double> scores;
  for (std::int64_t t = 0; t < T; ++t) {
    if (!counted_.empty() && counted_[static_cast<std::size_t>(t)] == 0) continue;
    ++l->tokens;
    for (std::int64_t j = 0; j < a.k; ++j) ++l->load[static_cast<std::size_t>(a.experts(t, j))];
    if (!scored) continue;
    double top = 0, sum = 1;
    if (a.softmax) {
      top = *std::max_element(a.logits.row(t), a.logits.row(t) + l->n), sum = 0;
      for (std::int64_t e = 0; e < l->n; ++e) sum += std::exp(a.logits(t, e) - top);
    }
    for (std::int64_t e = 0; e < l->n; ++e) {
      const double x = a.logits(t, e);
      scores.push_back(a.softmax ? std::exp(x - top) / sum : 1 / (1 + std::exp(-x)));
    }
  }
  if (!scored || scores.empty()) return;
  if (options_.method == BalanceMethod::kQuantile && !options_.exact) {
    const std::vector<double> bias(l->bias, l->bias + l->n);
    if (l->histogram.counts.empty()) l->histogram = MarginHistogram(bias, options_.bins);
    l->histogram.Add(scores, bias, l->k);
  } else {
    l->scores.insert(l->scores.end(), scores.begin(), scores.end());
  }
}

void Balancer::OnRouteBackward(const RouteArgs& a, CMat logits, View<const std::int32_t, 2> experts,
                               Mat dlogits) {
  const auto all = static_cast<std::size_t>(logits.dim(0));
  const auto m = counted_.empty()
                     ? all
                     : static_cast<std::size_t>(std::count_if(counted_.begin(), counted_.end(),
                                                              [](char c) { return c != 0; }));
  // The loss of a pass is its share of the step's mean.
  AuxLoss(logits, experts, a.softmax, options_.weight, counted_, scale_ * static_cast<double>(m),
          dlogits);
}

void Balancer::SetBias(Layer& l, std::span<const double> bias) {
  for (const double b : bias) {
    if (!std::isfinite(b)) return;  // scores of a broken step must not reach the checkpoint
  }
  for (std::size_t e = 0; e < bias.size(); ++e) l.bias[e] = static_cast<float>(bias[e]);
}

std::vector<LayerBalance> Balancer::Update() {
  std::vector<LayerBalance> report;
  for (auto& [address, l] : layers_) {
    if (l.tokens == 0) continue;
    const std::vector<double> bias(l.bias, l.bias + l.n);
    const double mean = static_cast<double>(l.tokens * l.k) / static_cast<double>(l.n);
    if (options_.method == BalanceMethod::kSign) {
      SetBias(l, SignBias(l.load, bias, mean, options_.step));
    } else if (!l.histogram.counts.empty()) {
      std::vector<double> b = l.histogram.Bias(l.k);
      for (std::size_t e = 0; e < b.size(); ++e) b[e] = bias[e] + options_.rate * (b[e] - bias[e]);
      SetBias(l, b);
    } else if (!l.scores.empty()) {
      SetBias(l, options_.method == BalanceMethod::kQuantile
                     ? QuantileBias(l.scores, bias, l.k, true, options_.rate)
                     : SlidingBias(l.scores, l.tau, l.k, options_.decay, options_.capacity));
    }
    LayerBalance r;
    r.layer = l.index, r.tokens = l.tokens, r.load = l.load;
    for (const std::int64_t n : l.load) {
      const double share = static_cast<double>(n) / (mean * static_cast<double>(l.n));
      r.max_violation = std::max(r.max_violation, static_cast<double>(n) / mean - 1);
      r.dead += n == 0 ? 1.0 / static_cast<double>(l.n) : 0.0;
      if (n > 0 && l.n > 1) r.entropy -= share * std::log(share) / std::log(l.n);
    }
    const auto [least, most] = std::minmax_element(l.bias, l.bias + l.n);
    r.bias_min = *least, r.bias_max = *most;
    report.push_back(std::move(r));
  }
  Discard();
  std::sort(report.begin(), report.end(),
            [](const LayerBalance& a, const LayerBalance& b) { return a.layer < b.layer; });
  return report;
}

void Balancer::Discard() {
  for (auto& [address, l] : layers_) {
    l.tokens = 0;
    l.scores.clear();
    l.histogram = {};
    std::fill(l.load.begin(), l.load.end(), 0);
  }
}

std::map<std::int64_t, std::vector<double>> Balancer::thresholds() const {
  std::map<std::int64_t, std::vector<double>> all;
  for (const auto& [address, l] : layers_) all[l.index] = l.tau;
  return all;
}

Status Balancer::SetThresholds(const std::map<std::int64_t, std::vector<double>>& thresholds) {
  for (auto& [address, l] : layers_) {
    const auto it = thresholds.find(l.index);
    if (it == thresholds.end() || it->second.size() != l.tau.size()) {
      return Error{Code::kCorrupt, fmt::format("balancer: no thresholds for the {} experts of "
                                               "layer {}",
                                               l.n, l.index)};
    }
    l.tau = it->second;
  }
  return {};
}

}  // namespace k3
