// The vocabulary as a tree over bytes, so that tokens with a common beginning are checked once.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::grammar {

/// Immutable; safe from many threads. About 5 MiB for 160,000 tokens.
class VocabularyTrie {
 public:
  /// One byte of one or more tokens. Nodes lie in the order of a walk from the root, children in
  /// order of their bytes; the node after a subtree is at `end`.
  struct Node {
    std::uint32_t end = 0;
    TokenId token = -1;  // the token that ends with this byte; -1: none
    std::uint16_t depth = 0;
    std::uint8_t byte = 0;
  };

  /// Tokens are kept in two trees. What can follow in a string of limited length depends on how
  /// much is left only for tokens longer than that, and few tokens are long.
  struct Part {
    std::vector<Node> nodes;
    std::size_t longest = 0;  // bytes
  };
  static constexpr std::size_t kShort = 16;

  /// All ordinary tokens. Control tokens are in no text, so they are not here.
  explicit VocabularyTrie(const Tokenizer& tokenizer);
  /// For tests: token i has the bytes texts[i]; an empty one is left out.
  explicit VocabularyTrie(const std::vector<std::string>& texts);

  /// Tokens of up to kShort bytes, and the others.
  const std::array<Part, 2>& parts() const { return parts_; }
  std::size_t vocab_size() const { return vocab_size_; }  // with control tokens
  std::size_t mask_words() const { return (vocab_size_ + 63) / 64; }
  std::size_t longest() const { return std::max(parts_[0].longest, parts_[1].longest); }
  /// Empty for control tokens and ids outside the vocabulary.
  std::string_view Bytes(TokenId id) const;

 private:
  void Build();

  std::array<Part, 2> parts_;
  std::vector<std::string> texts_;
  std::size_t vocab_size_ = 0;
};

}  // namespace k3::grammar
