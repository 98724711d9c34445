// Guessing the next tokens of a text from the text itself, and deciding when that pays.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "k3/base/ids.h"

namespace k3 {

/// Finds what followed the last time the text ended as it does now: the longest suffix that
/// occurred before, of the latest places where it did. Time of a look is bounded; adding a token
/// takes constant time. A value type; not thread-safe.
class NgramDrafter {
 public:
  static constexpr std::size_t kShortest = 3;  // tokens of a suffix that count as a match

  /// Takes in what `tokens` has beyond what it had at the last call, and writes up to `most` tokens
  /// that followed the best match to `draft`. Returns the length of the match; 0: none.
  std::size_t Draft(std::span<const TokenId> tokens, std::size_t most, std::vector<TokenId>& draft);

 private:
  std::unordered_map<std::uint64_t, std::int32_t> last_;  // where an n-gram ended most recently
  std::vector<std::int32_t> before_;                      // and the time before that; -1: never
};

/// Seconds of a step as a + b * rows, from the latest steps. A value type.
class StepTimes {
 public:
  void Observe(double rows, double seconds);
  double fixed() const;    // a
  double per_row() const;  // b; before there is evidence, a cheap row is assumed
  double Seconds(double rows) const { return fixed() + per_row() * rows; }

 private:
  double n_ = 0, x_ = 0, xx_ = 0, y_ = 0, xy_ = 0;
};

/// How many tokens to draft for one sequence. Learns how often drafts were right and weighs what an
/// accepted token saves against what a row costs; when drafts do not pay it stops and only tries
/// again after ever longer pauses. Without `adaptive` it always drafts the most. A value type.
class DraftPolicy {
 public:
  explicit DraftPolicy(bool adaptive = true) : adaptive_(adaptive) {}

  /// For a step that has `rows` rows without drafts, one of them this sequence's. At most `most`.
  /// `seconds` is what making one token of a draft costs.
  std::int64_t Length(const StepTimes& cost, std::int64_t rows, std::int64_t most,
                      double seconds = 0);
  void Report(std::int64_t drafted, std::int64_t accepted);

 private:
  bool adaptive_;
  double right_ = 2, wrong_ = 1;  // decayed counts of drafted tokens
  std::int64_t pause_ = 0;        // looks left before the next try
  std::int64_t next_pause_ = 16;
};

}  // namespace k3
