// The merge ranks of a vocabulary: bytes of every token, and the way back from bytes to rank.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"

namespace k3 {

/// Immutable after Parse; safe from many threads. One arena holds the bytes of all tokens; an open
/// addressing table of (hash, id) finds them.
class RankTable {
 public:
  /// Reads the tiktoken form: one "base64 rank" a line, ranks 0..n-1 in any order, each once, all
  /// 256 single bytes among them. Lines end in LF; empty lines are skipped. `where` starts every
  /// message.
  static Result<RankTable> Parse(std::string_view text, std::string_view where);

  static constexpr TokenId kNone = -1;
  /// Longer tokens are refused, which bounds the work of one look-up.
  static constexpr std::size_t kMaxTokenBytes = 4096;

  std::size_t size() const { return offsets_.size() - 1; }
  /// Bytes of token `id`, 0 <= id < size().
  std::string_view Bytes(TokenId id) const {
    const auto i = static_cast<std::size_t>(id);
    return std::string_view(arena_).substr(offsets_[i], offsets_[i + 1] - offsets_[i]);
  }

  /// Rank of exactly these bytes, or kNone.
  TokenId Find(std::string_view bytes) const;
  TokenId FindByte(unsigned char byte) const { return bytes_[byte]; }
  TokenId FindPair(unsigned char a, unsigned char b) const {
    return pairs_[static_cast<std::size_t>(a) << 8 | b];
  }

 private:
  struct Slot {
    std::uint32_t tag = 0;  // upper half of the hash
    TokenId id = kNone;
  };

  Status Index(std::string_view where);

  std::string arena_;
  std::vector<std::uint32_t> offsets_;  // size() + 1
  std::vector<Slot> slots_;             // a power of two, at most half full
  std::size_t longest_ = 0;
  std::array<TokenId, 256> bytes_{};
  std::vector<TokenId> pairs_;  // 65536
};

}  // namespace k3
