// The balancing rules: spec sections 14b and 15.5.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "k3/train/balancer.h"

namespace k3 {
namespace {

std::size_t U(std::int64_t i) { return static_cast<std::size_t>(i); }

/// The k-th largest (from 0) of `values`, which are reordered.
double Largest(std::vector<double>& values, std::int64_t k) {
  std::nth_element(values.begin(), values.begin() + k, values.end(), std::greater<>());
  return values[U(k)];
}

/// Share of an expert in tokens, rounded to the nearest, halves to even.
std::int64_t Share(std::int64_t m, std::int64_t k, std::int64_t n, double capacity = 1.0) {
  const double share = static_cast<double>(m) * static_cast<double>(k) / static_cast<double>(n);
  return std::clamp<std::int64_t>(std::llrint(share * capacity), 0,
                                  std::max<std::int64_t>(0, m - 1));
}

void Center(std::vector<double>& b) {
  const double mean = std::accumulate(b.begin(), b.end(), 0.0) / static_cast<double>(b.size());
  for (double& x : b) x -= mean;
}

/// Cutoff of every token: its (k+1)-th largest biased score.
std::vector<double> Cutoffs(std::span<const double> scores, std::span<const double> bias,
                            std::int64_t k) {
  const auto n = static_cast<std::int64_t>(bias.size());
  std::vector<double> alpha, row(bias.size());
  for (std::size_t t = 0; t < scores.size(); t += bias.size()) {
    for (std::size_t e = 0; e < U(n); ++e) row[e] = scores[t + e] + bias[e];
    alpha.push_back(Largest(row, k));
  }
  return alpha;
}

std::vector<double> Column(std::span<const double> scores, std::size_t n, std::size_t e) {
  std::vector<double> column;
  for (std::size_t i = e; i < scores.size(); i += n) column.push_back(scores[i]);
  return column;
}

}  // namespace

std::vector<double> QuantileBias(std::span<const double> scores, std::span<const double> bias,
                                 std::int64_t k, bool center, double rate) {
  const auto n = bias.size();
  const std::vector<double> alpha = Cutoffs(scores, bias, k);
  const auto m = static_cast<std::int64_t>(alpha.size());
  const std::int64_t q = Share(m, k, static_cast<std::int64_t>(n));
  std::vector<double> b(n);
  for (std::size_t e = 0; e < n; ++e) {
    std::vector<double> margin = Column(scores, n, e);
    for (std::size_t t = 0; t < margin.size(); ++t) margin[t] -= alpha[t];
    b[e] = bias[e] + rate * (-Largest(margin, q) - bias[e]);
  }
  if (center) Center(b);
  return b;
}

MarginHistogram::MarginHistogram(std::span<const double> bias, std::int64_t n_bins) : bins(n_bins) {
  const auto [least, most] = std::minmax_element(bias.begin(), bias.end());
  lo = *least - 1.0;
  width = (*most + 1.0 - lo) / static_cast<double>(bins);
  counts.assign(bias.size() * U(bins), 0);
}

void MarginHistogram::Add(std::span<const double> scores, std::span<const double> bias,
                          std::int64_t k) {
  const auto n = bias.size();
  const std::vector<double> alpha = Cutoffs(scores, bias, k);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double need = (alpha[i / n] - scores[i] - lo) / width;
    const auto bin = std::clamp<std::int64_t>(static_cast<std::int64_t>(need), 0, bins - 1);
    ++counts[i % n * U(bins) + U(bin)];
  }
  tokens += static_cast<std::int64_t>(alpha.size());
}

std::vector<double> MarginHistogram::Bias(std::int64_t k, bool center) const {
  const std::size_t n = counts.size() / U(bins);
  const double share =
      static_cast<double>(tokens) * static_cast<double>(k) / static_cast<double>(n);
  std::vector<double> b(n);
  for (std::size_t e = 0; e < n; ++e) {
    const std::int64_t* h = counts.data() + e * U(bins);
    std::int64_t i = 0, before = 0;
    while (i < bins - 1 && static_cast<double>(before + h[i]) < share) before += h[i++];
    const double inside = (share - static_cast<double>(before)) /
                          static_cast<double>(std::max<std::int64_t>(h[i], 1));
    b[e] = lo + (static_cast<double>(i) + std::clamp(inside, 0.0, 1.0)) * width;
  }
  if (center) Center(b);
  return b;
}

std::vector<double> ScoreQuantiles(std::span<const double> scores, std::int64_t n, std::int64_t k,
                                   double capacity) {
  const auto m = static_cast<std::int64_t>(scores.size()) / n;
  const std::int64_t q = Share(m, k, n, capacity);
  std::vector<double> quantiles(U(n));
  for (std::size_t e = 0; e < U(n); ++e) {
    std::vector<double> column = Column(scores, U(n), e);
    quantiles[e] = Largest(column, q);
  }
  return quantiles;
}

std::vector<double> SlidingBias(std::span<const double> quantiles, std::vector<double>& tau,
                                double rate) {
  std::vector<double> b(tau.size());
  for (std::size_t e = 0; e < tau.size(); ++e) {
    tau[e] = (1 - rate) * tau[e] + rate * quantiles[e];
    b[e] = -tau[e];
  }
  Center(b);
  return b;
}

std::vector<double> SignBias(std::span<const std::int64_t> load, std::span<const double> bias,
                             double share, double step) {
  std::vector<double> b(bias.begin(), bias.end());
  for (std::size_t e = 0; e < b.size(); ++e) {
    const double gap = share - static_cast<double>(load[e]);
    b[e] += gap > 0 ? step : gap < 0 ? -step : 0.0;
  }
  return b;
}

double AuxLoss(CMat logits, View<const std::int32_t, 2> experts, bool softmax, double weight,
               std::span<const char> counted, double factor, Mat dlogits) {
  const std::int64_t T = logits.dim(0), n = logits.dim(1), k = experts.dim(1);
  auto counts = [&](std::int64_t t) { return counted.empty() || counted[U(t)] != 0; };
  std::vector<double> f(U(n)), p(U(n)), s(U(n)), ds(U(n));
  std::int64_t m = 0;
  for (std::int64_t t = 0; t < T; ++t) {
    if (!counts(t)) continue;
    ++m;
    for (std::int64_t j = 0; j < k; ++j) f[U(experts(t, j))] += 1;
  }
  if (m == 0) return 0;
  for (double& x : f) x /= static_cast<double>(m);
  const double c = weight * static_cast<double>(n) / static_cast<double>(k);
  for (std::int64_t t = 0; t < T; ++t) {
    if (!counts(t)) continue;
    double sum = 0, top = logits(t, 0), mean = 0, dot = 0;
    for (std::int64_t e = 0; e < n; ++e) top = std::max<double>(top, logits(t, e));
    for (std::int64_t e = 0; e < n; ++e) {
      const double x = logits(t, e);
      sum += s[U(e)] = softmax ? std::exp(x - top) : 1 / (1 + std::exp(-x));
    }
    if (softmax) {
      for (double& x : s) x /= sum;
      sum = 1;
    }
    for (std::size_t e = 0; e < U(n); ++e) {
      p[e] += s[e] / sum;
      mean += s[e] / sum * f[e];
    }
    if (dlogits.data == nullptr) continue;
    for (std::size_t e = 0; e < U(n); ++e) {
      ds[e] = c / static_cast<double>(m) / sum * (f[e] - mean);
      dot += s[e] * ds[e];
    }
    for (std::int64_t e = 0; e < n; ++e) {
      const double d = s[U(e)] * (softmax ? ds[U(e)] - dot : ds[U(e)] * (1 - s[U(e)]));
      dlogits(t, e) += static_cast<float>(factor * d);
    }
  }
  double loss = 0;
  for (std::size_t e = 0; e < U(n); ++e) loss += f[e] * p[e] / static_cast<double>(m);
  return c * loss;
}

}  // namespace k3
