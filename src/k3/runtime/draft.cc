#include "k3/runtime/draft.h"

#include <algorithm>
#include <cstddef>

namespace k3 {
namespace {

constexpr int kPlaces = 16;                // earlier places that are compared
constexpr std::size_t kLongestMatch = 64;  // tokens compared at each
constexpr std::int64_t kLongestPause = 512;

std::uint64_t NgramKey(std::span<const TokenId> tokens) {
  std::uint64_t h = 0x9E3779B97F4A7C15ull;
  for (const TokenId t : tokens) {
    h = (h ^ static_cast<std::uint32_t>(t)) * 0xD6E8FEB86659FD93ull;
    h ^= h >> 32;
  }
  return h;
}

/// Length of the longest common suffix of the first a and the first b tokens.
std::size_t CommonSuffix(std::span<const TokenId> tokens, std::size_t a, std::size_t b) {
  std::size_t n = 0;
  while (n < a && n < b && n < kLongestMatch && tokens[a - 1 - n] == tokens[b - 1 - n]) ++n;
  return n;
}

}  // namespace

std::size_t NgramDrafter::Draft(std::span<const TokenId> tokens, std::size_t most,
                                std::vector<TokenId>& draft) {
  draft.clear();
  for (std::size_t i = before_.size(); i < tokens.size(); ++i) {
    before_.push_back(-1);
    if (i + 1 < kShortest) continue;
    const auto ngram = tokens.subspan(i + 1 - kShortest, kShortest);
    const auto [at, is_new] = last_.try_emplace(NgramKey(ngram), static_cast<std::int32_t>(i));
    if (!is_new) {
      before_.back() = at->second;
      at->second = static_cast<std::int32_t>(i);
    }
  }
  if (tokens.size() < kShortest || most == 0) return 0;
  std::size_t best = 0, follows = 0;
  std::int32_t place = before_.back();
  for (int i = 0; i < kPlaces && place >= 0; ++i) {
    const auto end = static_cast<std::size_t>(place) + 1;
    const std::size_t match = CommonSuffix(tokens, end, tokens.size());
    if (match > best) best = match, follows = end;
    place = before_[static_cast<std::size_t>(place)];
  }
  if (best < kShortest) return 0;  // the keys of two n-grams were equal
  // Past the end the text is taken to go on as it does from the match: short loops repeat.
  const std::size_t period = tokens.size() - follows;
  for (std::size_t i = 0; i < most; ++i) draft.push_back(tokens[follows + i % period]);
  return best;
}

void StepTimes::Observe(double rows, double seconds) {
  constexpr double kDecay = 0.98;
  // A step during which the machine did something else says little about rows.
  if (n_ > 8) seconds = std::min(seconds, 2 * Seconds(rows));
  for (double* sum : {&n_, &x_, &xx_, &y_, &xy_}) *sum *= kDecay;
  n_ += 1, x_ += rows, xx_ += rows * rows, y_ += seconds, xy_ += rows * seconds;
}

double StepTimes::per_row() const {
  if (n_ == 0) return 0;
  const double variance = xx_ - x_ * x_ / n_;
  const double share = y_ / (8 * n_ + x_);  // a step with eight rows' worth of fixed cost
  if (variance < 0.05 * n_) return share;
  return std::clamp((xy_ - x_ * y_ / n_) / variance, 0.0, y_ / x_);
}

double StepTimes::fixed() const { return n_ == 0 ? 0 : std::max(0.0, (y_ - per_row() * x_) / n_); }

std::int64_t DraftPolicy::Length(const StepTimes& cost, std::int64_t rows, std::int64_t most,
                                 double seconds) {
  if (!adaptive_) return most;
  if (pause_ > 0) {
    --pause_;
    return 0;
  }
  // A draft of k tokens is worth e = p + p^2 + ... + p^k tokens, each of which otherwise costs a
  // share of a step; it costs k rows, and the accepted ones again when the last is wrong.
  const double p = right_ / (right_ + wrong_);
  const double token = cost.Seconds(static_cast<double>(rows)) / static_cast<double>(rows);
  double power = 1, expected = 0, best_gain = 0;
  std::int64_t best = 0;
  for (std::int64_t k = 1; k <= most; ++k) {
    power *= p;
    expected += power;
    const double again = expected * (1 - power);
    const double drafted = static_cast<double>(k);
    const double gain = expected * token - cost.per_row() * (drafted + again) - seconds * drafted;
    if (gain > best_gain) best_gain = gain, best = k;
  }
  if (best > 0 || cost.Seconds(1) == 0) return best > 0 ? best : std::min<std::int64_t>(most, 2);
  // Not worth it. Wait, then weigh it anew with the hopes of the start; longer each time that it
  // was the drafts' fault and not the machine's.
  pause_ = next_pause_;
  if (p < 0.6) next_pause_ = std::min(2 * next_pause_, kLongestPause);
  right_ = 2, wrong_ = 1;
  return 0;
}

void DraftPolicy::Report(std::int64_t drafted, std::int64_t accepted) {
  constexpr double kDecay = 0.8;
  right_ = kDecay * right_ + static_cast<double>(accepted);
  wrong_ = kDecay * wrong_ + (accepted < drafted ? 1 : 0);
  if (accepted == drafted && drafted >= 2) next_pause_ = 16;
}

}  // namespace k3
