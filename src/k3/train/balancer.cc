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
  if (!(decay_end <= 1) || decay_end == 0) return refuse("decay_end", decay_end, "(0, 1]");
  if (!(capacity_end <= 16) || capacity_end == 0) {
    return refuse("capacity_end", capacity_end, "a number in (0, 16]");
  }
  if (window < 1 || window > 1000) {
    return refuse("window", static_cast<double>(window), "1 to 1000");
  }
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
    l.sliding.tau.assign(static_cast<std::size_t>(l.n), 0.0);
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
  for (auto& [address, l] : layers_) {
    if (!l.bias_before.empty()) continue;  // not the first pass of the step
    l.bias_before.assign(l.bias, l.bias + l.n);
    l.before = l.sliding;
  }
}

void Balancer::EndPass() {
  for (auto& [address, l] : layers_) {
    if (options_.within_batch && options_.method == BalanceMethod::kSlidingQuantile) {
      Apply(l, TakeAnswer(l));
    } else if (options_.local) {
      if (auto answer = TakeAnswer(l); !answer.empty()) l.answers.push_back(std::move(answer));
    }
  }
}

std::vector<double> Balancer::TakeAnswer(Layer& l) const {
  std::vector<double> answer;
  const std::vector<double> bias(l.bias, l.bias + l.n);
  if (!l.histogram.counts.empty()) {
    answer = l.histogram.Bias(l.k);
    for (std::size_t e = 0; e < answer.size(); ++e) {
      answer[e] = bias[e] + options_.rate * (answer[e] - bias[e]);
    }
  } else if (!l.scores.empty() && options_.method == BalanceMethod::kQuantile) {
    answer = QuantileBias(l.scores, bias, l.k, true, options_.rate);
  } else if (!l.scores.empty()) {
    answer = ScoreQuantiles(l.scores, l.n, l.k, Now(options_.capacity, options_.capacity_end));
  }
  l.histogram = {};
  l.scores.clear();
  return answer;
}

void Balancer::Apply(Layer& l, const std::vector<double>& answer) {
  if (answer.empty()) return;
  for (const double x : answer) {
    if (!std::isfinite(x)) return;  // scores of a broken step must not reach the checkpoint
  }
  if (options_.method == BalanceMethod::kQuantile) return SetBias(l, answer);
  auto& recent = l.sliding.recent;
  recent.push_back(answer);
  if (static_cast<std::int64_t>(recent.size()) > options_.window) recent.erase(recent.begin());
  std::vector<double> mean(answer.size());
  for (const auto& q : recent) {
    for (std::size_t e = 0; e < q.size(); ++e) mean[e] += q[e] / static_cast<double>(recent.size());
  }
  SetBias(l, SlidingBias(mean, l.sliding.tau, Now(options_.decay, options_.decay_end)));
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
    } else if (options_.local && !l.answers.empty()) {
      std::vector<double> sum(l.answers[0].size());
      for (const auto& answer : l.answers) {
        for (std::size_t e = 0; e < sum.size(); ++e) {
          sum[e] += answer[e] / static_cast<double>(l.answers.size());
        }
      }
      Apply(l, sum);
    } else {
      Apply(l, TakeAnswer(l));
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
  Forget();
  std::sort(report.begin(), report.end(),
            [](const LayerBalance& a, const LayerBalance& b) { return a.layer < b.layer; });
  return report;
}

void Balancer::Forget() {
  for (auto& [address, l] : layers_) {
    l.tokens = 0;
    l.scores.clear(), l.answers.clear(), l.bias_before.clear();
    l.histogram = {};
    std::fill(l.load.begin(), l.load.end(), 0);
  }
}

void Balancer::Discard() {
  for (auto& [address, l] : layers_) {
    if (l.bias_before.empty()) continue;
    std::copy(l.bias_before.begin(), l.bias_before.end(), l.bias);
    l.sliding = l.before;
  }
  Forget();
}

std::map<std::int64_t, std::vector<double>> Balancer::thresholds() const {
  std::map<std::int64_t, std::vector<double>> all;
  const auto window = static_cast<std::size_t>(options_.window);
  for (const auto& [address, l] : layers_) {
    std::vector<double>& v = all[l.index];
    v = l.sliding.tau;
    for (const auto& q : l.sliding.recent) v.insert(v.end(), q.begin(), q.end());
    v.resize(l.sliding.tau.size() * (1 + window));
    v.push_back(static_cast<double>(l.sliding.recent.size()));
  }
  return all;
}

Status Balancer::SetThresholds(const std::map<std::int64_t, std::vector<double>>& thresholds) {
  for (auto& [address, l] : layers_) {
    const auto n = static_cast<std::size_t>(l.n),
               window = static_cast<std::size_t>(options_.window);
    const auto it = thresholds.find(l.index);
    if (it == thresholds.end() || it->second.size() != n * (1 + window) + 1 ||
        !(it->second.back() >= 0 && it->second.back() <= static_cast<double>(window))) {
      return Error{Code::kCorrupt, fmt::format("balancer: no thresholds for the {} experts of "
                                               "layer {}",
                                               l.n, l.index)};
    }
    const auto at = [&](std::size_t i) {
      return it->second.begin() + static_cast<std::ptrdiff_t>(i * n);
    };
    l.sliding.tau.assign(at(0), at(1));
    l.sliding.recent.clear();
    for (std::size_t i = 0; i < static_cast<std::size_t>(it->second.back()); ++i) {
      l.sliding.recent.emplace_back(at(1 + i), at(2 + i));
    }
  }
  return {};
}

}  // namespace k3
