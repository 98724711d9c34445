// Choosing the next token from a row of scores.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/rng.h"
#include "k3/base/status.h"

namespace k3 {

/// How to choose. Applied in this order:
///   1. logit_bias            l[id] += bias
///   2. repetition_penalty    of tokens seen in prompt or output: l > 0 ? l / p : l * p
///   3. frequency_penalty     l -= f * (times generated)
///   4. presence_penalty      l -= p if generated at least once
///   5. temperature           l /= t
///   6. top_k, top_p, min_p   each keeps the best part of what the one before kept; top_p and min_p
///                            look at the probabilities among the tokens that top_k left
/// A temperature below kGreedyTemperature takes the best score after step 4, the lower id on a tie.
struct SamplingParams {
  double temperature = 1.0;              // [0, 100]
  std::int64_t top_k = 0;                // 0: off
  double top_p = 1.0;                    // [0, 1]; 1: off; the best token always stays
  double min_p = 0.0;                    // [0, 1]; 0: off; relative to the best probability
  double repetition_penalty = 1.0;       // (0, 100]; 1: off
  double frequency_penalty = 0.0;        // [-100, 100]
  double presence_penalty = 0.0;         // [-100, 100]
  std::map<TokenId, double> logit_bias;  // each in [-100, 100]
  std::uint64_t seed = 0;

  /// Names the field, the value found and the values allowed. `vocab` bounds the ids of logit_bias.
  Status Validate(std::int64_t vocab) const;
};

/// Dividing by less than this only makes ties of rounding noise, so it means greedy.
constexpr double kGreedyTemperature = 1e-3;

struct TokenLogprob {
  TokenId id = 0;
  double logprob = 0;
};

struct SampleResult {
  TokenId token = 0;
  double logprob = 0;             // natural log, of the model's own distribution
  std::vector<TokenLogprob> top;  // best first, lower id first on a tie
};

/// What sampling remembers of one sequence: the random stream and which tokens occurred.
/// A value type: a copy continues exactly as the original would. Not thread-safe.
class Sampler {
 public:
  struct Counts {
    std::uint32_t prompt = 0;
    std::uint32_t generated = 0;
    bool operator==(const Counts&) const = default;
  };

  explicit Sampler(std::uint64_t seed = 0) : rng_(seed) {}

  /// Draws a token; takes exactly one number from the random stream, greedy or not. All sums are in
  /// double and in a fixed order, so equal scores give an equal token on any thread count.
  /// `top_logprobs` < 0 leaves the log-probabilities out; otherwise they come from the unmodified
  /// scores by a log-softmax in double, with that many alternatives.
  /// `allowed` has a bit for every token, id i at bit i % 64 of word i / 64; tokens without theirs
  /// are left out after step 4, as if they had no probability.
  /// Errors: a score that is not finite (kNumeric), no token allowed (kInvalidArgument; the stream
  /// has advanced). `params` must be valid.
  Result<SampleResult> Sample(std::span<const float> logits, const SamplingParams& params,
                              std::int64_t top_logprobs = -1,
                              std::optional<std::span<const std::uint64_t>> allowed = {});

  /// Counts tokens for the penalties.
  void AcceptPrompt(std::span<const TokenId> tokens);
  void Accept(TokenId token);

  // For snapshots on disk.
  std::uint64_t rng_state() const { return rng_.state(); }
  void set_rng_state(std::uint64_t state) { rng_.set_state(state); }
  const std::map<TokenId, Counts>& counts() const { return counts_; }
  void set_counts(std::map<TokenId, Counts> counts) { counts_ = std::move(counts); }

 private:
  Rng rng_;
  std::map<TokenId, Counts> counts_;
};

/// What Sample would report of `token` had it drawn that: its log-probability and `top` others.
/// Error: a score that is not finite.
Result<SampleResult> LogprobsOf(std::span<const float> logits, TokenId token, std::int64_t top);

/// Log-probability of `token` under softmax(logits), in double, summed in id order.
double LogSoftmaxAt(std::span<const float> logits, TokenId token);

}  // namespace k3
