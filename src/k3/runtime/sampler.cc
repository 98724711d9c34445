#include "k3/runtime/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string_view>
#include <utility>

namespace k3 {
namespace {

Status CheckRange(std::string_view name, double value, double low, double high) {
  if (value >= low && value <= high) return {};  // false for NaN
  return Error{Code::kInvalidArgument,
               fmt::format("{}: found {}, expected {} to {}", name, value, low, high)};
}

struct Candidate {
  double score;
  TokenId id;
};

bool Better(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

/// Weights exp((score - best) / temperature), and their sums by how far a score lies below the
/// best.
struct Buckets {
  static constexpr std::size_t kCount = 512;
  static constexpr double kPerUnit = 16;  // for each unit of score; all that is far down shares one

  Buckets(std::span<const Candidate> all, double t) : temperature(t), weights(all.size()) {
    best = std::min_element(all.begin(), all.end(), Better)->score;
    for (std::size_t i = 0; i < all.size(); ++i) {
      weights[i] = std::exp((all[i].score - best) / temperature);
      sums[Of(all[i].score)] += weights[i];
      total += weights[i];
    }
  }
  std::size_t Of(double score) const {
    return static_cast<std::size_t>(
        std::min((best - score) / temperature * kPerUnit, double{kCount - 1}));
  }

  double temperature, best, total = 0;
  std::vector<double> weights;
  std::array<double, kCount> sums{};
};

/// Candidates that are put in order (best first) only as far as somebody looks.
class Ranking {
 public:
  explicit Ranking(std::vector<Candidate> all) : all_(std::move(all)) {}

  std::size_t size() const { return all_.size(); }
  const Candidate& at(std::size_t i) {
    if (i >= sorted_) Sort(std::max(i + 1, std::max<std::size_t>(64, 4 * sorted_)));
    return all_[i];
  }
  /// Keeps the n best, in order.
  void Truncate(std::size_t n) {
    Sort(n);
    all_.resize(std::min(n, all_.size()));
  }
  /// Sum of exp((score - best) / temperature), in the order of the ids before any look at the
  /// ranking and in that of the ranks after Truncate: fixed either way. Leaves out candidates
  /// beyond the share `top_p` of it.
  double Total(double temperature, double top_p) {
    const Buckets buckets(all_, temperature);
    const double wanted = top_p * buckets.total * (1 + 1e-9);  // sums round by their order
    double sum = 0;
    std::size_t kept = 0;
    do {
      sum += buckets.sums[kept++];
    } while (kept < Buckets::kCount && sum < wanted);
    if (kept < Buckets::kCount) {
      std::erase_if(all_, [&](const Candidate& c) { return buckets.Of(c.score) >= kept; });
      sorted_ = std::min(sorted_, all_.size());
    }
    return buckets.total;
  }

 private:
  void Sort(std::size_t n) {
    n = std::min(n, all_.size());
    if (n <= sorted_) return;
    const auto from = all_.begin() + static_cast<std::ptrdiff_t>(sorted_);
    const auto to = all_.begin() + static_cast<std::ptrdiff_t>(n);
    // The order is total, so selecting first and sorting then gives what sorting all would.
    if (to != all_.end()) std::nth_element(from, to, all_.end(), Better);
    std::sort(from, to, Better);
    sorted_ = n;
  }

  std::vector<Candidate> all_;
  std::size_t sorted_ = 0;
};

/// max and log of the sum of exp(l - max).
struct Normaliser {
  double max;
  double log_sum;
};

Normaliser Normalise(std::span<const float> logits) {
  double max = -INFINITY;
  for (const float l : logits) max = std::max(max, static_cast<double>(l));
  double sum = 0;
  for (const float l : logits) sum += std::exp(static_cast<double>(l) - max);
  return {max, std::log(sum)};
}

std::vector<Candidate> AdjustedScores(std::span<const float> logits, const SamplingParams& params,
                                      const std::map<TokenId, Sampler::Counts>& counts) {
  std::vector<Candidate> scores(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    scores[i] = {static_cast<double>(logits[i]), static_cast<TokenId>(i)};
  }
  for (const auto& [id, bias] : params.logit_bias) {
    const auto i = static_cast<std::size_t>(id);
    if (id >= 0 && i < scores.size()) scores[i].score += bias;
  }
  const bool repetition = params.repetition_penalty != 1.0;
  const bool by_count = params.frequency_penalty != 0.0 || params.presence_penalty != 0.0;
  if (!repetition && !by_count) return scores;
  for (const auto& [id, count] : counts) {
    const auto i = static_cast<std::size_t>(id);
    if (id < 0 || i >= scores.size()) continue;
    double& s = scores[i].score;
    if (repetition) s = s > 0 ? s / params.repetition_penalty : s * params.repetition_penalty;
    if (count.generated > 0) {
      s -= params.frequency_penalty * count.generated + params.presence_penalty;
    }
  }
  return scores;
}

/// Keeps the candidates whose bit is set, in the order of their ids.
void KeepAllowed(std::vector<Candidate>& scores, std::span<const std::uint64_t> allowed) {
  std::erase_if(scores, [&](const Candidate& c) {
    const auto id = static_cast<std::size_t>(c.id);
    return id / 64 >= allowed.size() || (allowed[id / 64] >> (id % 64) & 1) == 0;
  });
}

/// Draws from the ranking with the uniform number `u`; every filter keeps a prefix of the ranking.
TokenId Draw(Ranking& ranking, const SamplingParams& params, double total, double u) {
  const double best = ranking.at(0).score;
  const auto weight = [&](std::size_t i) {
    return std::exp((ranking.at(i).score - best) / params.temperature);
  };
  double kept_mass = total;
  std::size_t kept = ranking.size();
  if (params.top_p < 1.0 || params.min_p > 0.0) {
    kept_mass = weight(0);
    kept = 1;
    while (kept < ranking.size() && kept_mass < params.top_p * total) {
      const double w = weight(kept);  // weight(0) is 1, so w is relative to the best
      if (w < params.min_p) break;
      kept_mass += w;
      ++kept;
    }
  }
  const double target = u * kept_mass;
  double sum = 0;
  std::size_t last = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    const double w = weight(i);
    if (w <= 0) break;  // only rounding of the sums can lead here
    sum += w;
    last = i;
    if (sum > target) break;
  }
  return ranking.at(last).id;
}

/// What Draw gives when nothing is filtered, from one look at every candidate: the ranking is cut
/// into buckets of scores, and only the one where the sum of weights passes its target is put in
/// order.
TokenId DrawFromAll(std::span<const Candidate> all, double temperature, double u) {
  const Buckets buckets(all, temperature);
  const double target = u * buckets.total;
  double sum = 0;
  std::size_t at = 0, last = 0;  // last: in case rounding hides the target behind all buckets
  for (; at < Buckets::kCount && sum + buckets.sums[at] <= target; ++at) {
    if (buckets.sums[at] > 0) last = at;
    sum += buckets.sums[at];
  }
  if (at == Buckets::kCount) sum -= buckets.sums[at = last];
  std::vector<std::pair<Candidate, double>> inside;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double weight = buckets.weights[i];
    if (weight > 0 && buckets.Of(all[i].score) == at) inside.emplace_back(all[i], weight);
  }
  std::sort(inside.begin(), inside.end(),
            [](const auto& a, const auto& b) { return Better(a.first, b.first); });
  for (const auto& [candidate, weight] : inside) {
    sum += weight;
    if (sum > target) return candidate.id;
  }
  return inside.back().first.id;
}

Status CheckFinite(std::span<const float> logits) {
  if (logits.empty()) return Error{Code::kInvalidArgument, "sampling: no scores"};
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) {
      return Error{Code::kNumeric,
                   fmt::format("the score of token {} is {}, not a finite number", i, logits[i])};
    }
  }
  return {};
}

void AddLogprobs(std::span<const float> logits, std::int64_t top, SampleResult& result) {
  const Normaliser norm = Normalise(logits);
  const auto logprob = [&](TokenId id) {
    return static_cast<double>(logits[static_cast<std::size_t>(id)]) - norm.max - norm.log_sum;
  };
  result.logprob = logprob(result.token);
  if (top == 0) return;
  std::vector<Candidate> plain(logits.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    plain[i] = {static_cast<double>(logits[i]), static_cast<TokenId>(i)};
  }
  const auto k = std::min(plain.size(), static_cast<std::size_t>(top));
  std::partial_sort(plain.begin(), plain.begin() + static_cast<std::ptrdiff_t>(k), plain.end(),
                    Better);
  for (std::size_t i = 0; i < k; ++i) result.top.push_back({plain[i].id, logprob(plain[i].id)});
}

}  // namespace

Status SamplingParams::Validate(std::int64_t vocab) const {
  K3_TRY(CheckRange("temperature", temperature, 0, 100));
  if (top_k < 0) {
    return Error{Code::kInvalidArgument, fmt::format("top_k: found {}, expected 0 or more", top_k)};
  }
  K3_TRY(CheckRange("top_p", top_p, 0, 1));
  K3_TRY(CheckRange("min_p", min_p, 0, 1));
  if (!(repetition_penalty > 0 && repetition_penalty <= 100)) {
    return Error{Code::kInvalidArgument,
                 fmt::format("repetition_penalty: found {}, expected more than 0 and at most 100",
                             repetition_penalty)};
  }
  K3_TRY(CheckRange("frequency_penalty", frequency_penalty, -100, 100));
  K3_TRY(CheckRange("presence_penalty", presence_penalty, -100, 100));
  for (const auto& [id, bias] : logit_bias) {
    if (id < 0 || id >= vocab) {
      return Error{
          Code::kInvalidArgument,
          fmt::format("logit_bias: token id {} is outside the vocabulary of {}", id, vocab)};
    }
    K3_TRY(CheckRange(fmt::format("logit_bias of token {}", id), bias, -100, 100));
  }
  return {};
}

Result<SampleResult> Sampler::Sample(std::span<const float> logits, const SamplingParams& params,
                                     std::int64_t top_logprobs,
                                     std::optional<std::span<const std::uint64_t>> allowed) {
  K3_TRY(CheckFinite(logits));
  const double u = rng_.Uniform();
  std::vector<Candidate> scores = AdjustedScores(logits, params, counts_);
  if (allowed.has_value()) KeepAllowed(scores, *allowed);
  if (scores.empty()) return Error{Code::kInvalidArgument, "sampling: no token is allowed"};
  SampleResult result;
  if (params.temperature < kGreedyTemperature) {
    result.token = std::min_element(scores.begin(), scores.end(), Better)->id;
  } else if (params.top_k == 0 && params.top_p >= 1.0 && params.min_p <= 0.0) {
    result.token = DrawFromAll(scores, params.temperature, u);
  } else {
    Ranking ranking(std::move(scores));
    if (params.top_k > 0) ranking.Truncate(static_cast<std::size_t>(params.top_k));
    const double total = ranking.Total(params.temperature, params.top_p);
    result.token = Draw(ranking, params, total, u);
  }
  if (top_logprobs >= 0) AddLogprobs(logits, top_logprobs, result);
  return result;
}

void Sampler::AcceptPrompt(std::span<const TokenId> tokens) {
  for (const TokenId t : tokens) ++counts_[t].prompt;
}

void Sampler::Accept(TokenId token) { ++counts_[token].generated; }

Result<SampleResult> LogprobsOf(std::span<const float> logits, TokenId token, std::int64_t top) {
  K3_TRY(CheckFinite(logits));
  SampleResult result;
  result.token = token;
  AddLogprobs(logits, top, result);
  return result;
}

double LogSoftmaxAt(std::span<const float> logits, TokenId token) {
  const Normaliser norm = Normalise(logits);
  return static_cast<double>(logits[static_cast<std::size_t>(token)]) - norm.max - norm.log_sum;
}

}  // namespace k3
