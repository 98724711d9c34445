// Byte-pair merging of one piece.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/tokenizer/rank_table.h"

namespace k3 {

/// Merges pieces with the semantics of tiktoken: a piece that is a token is that token; otherwise,
/// starting from single bytes, the adjacent pair whose concatenation has the lowest rank is joined,
/// the leftmost of equals first, until no pair has a rank. O(n log n) in the piece's length.
/// Holds scratch memory: one per thread. `ranks` outlives it.
class BpeMerger {
 public:
  explicit BpeMerger(const RankTable& ranks) : ranks_(ranks) {}

  /// Appends the ids of non-empty `piece`, which is shorter than 1 GiB.
  void Encode(std::string_view piece, std::vector<TokenId>& ids);

 private:
  /// A part begins at its index in the piece. `rank` is that of this part joined with the next.
  struct Part {
    std::uint32_t prev, next;
    TokenId rank;
  };

  void MergeShort(std::string_view piece, std::vector<TokenId>& ids) const;
  void MergeLong(std::string_view piece, std::vector<TokenId>& ids);
  TokenId Id(std::string_view token) const;
  void Rank(std::string_view piece, std::uint32_t at);

  const RankTable& ranks_;
  std::vector<Part> parts_;
  std::vector<std::uint64_t> heap_;  // rank, then start: the smallest is the next merge
};

}  // namespace k3
