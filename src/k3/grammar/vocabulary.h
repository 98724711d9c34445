// The vocabulary as a tree over bytes, so that tokens with a common beginning are checked once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
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

  /// All ordinary tokens. Control tokens are in no text, so they are not here.
  explicit VocabularyTrie(const Tokenizer& tokenizer);
  /// For tests: token i has the bytes texts[i]; an empty one is left out.
  explicit VocabularyTrie(const std::vector<std::string>& texts);

  std::span<const Node> nodes() const { return nodes_; }
  std::size_t vocab_size() const { return vocab_size_; }  // with control tokens
  std::size_t mask_words() const { return (vocab_size_ + 63) / 64; }
  std::size_t longest() const { return longest_; }  // bytes of the longest token
  /// Empty for control tokens and ids outside the vocabulary.
  std::string_view Bytes(TokenId id) const;

 private:
  void Build(std::vector<std::pair<std::string_view, TokenId>> tokens);

  std::vector<Node> nodes_;
  std::vector<std::string> texts_;
  std::size_t vocab_size_ = 0;
  std::size_t longest_ = 0;
};

}  // namespace k3::grammar
