// Learns byte-pair ranks from text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "k3/base/status.h"

namespace k3 {

/// The text of the two files of a tokenizer.
struct TokenizerFiles {
  std::string ranks;   // tiktoken.model
  std::string config;  // tokenizer_config.json, with the family's names behind the ranks
};

/// Counts the pieces the Kimi pattern cuts texts into, then joins the most frequent pair of
/// adjacent tokens again and again: ranks 0 to 255 are the single bytes, every later one a pair,
/// most frequent first, of equals the one of lower ranks. The result depends on the texts alone,
/// not on their order. Time is near linear in the length of the different pieces.
class BpeTrainer {
 public:
  static constexpr std::size_t kMinRanks = 256, kMaxRanks = std::size_t{1} << 20;
  /// Longer tokens are not made: runs of one character would take all ranks.
  static constexpr std::size_t kMaxTokenBytes = 128;

  void Add(std::string_view text);

  /// kInvalidArgument for a number of ranks outside the limits, or more than the texts have pairs
  /// for (the message says how many they have). The trainer may be used again.
  Result<TokenizerFiles> Train(std::size_t n_ranks) const;

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
  };
  std::unordered_map<std::string, std::int64_t, Hash, std::equal_to<>> pieces_;
};

}  // namespace k3
