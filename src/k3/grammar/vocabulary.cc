#include "k3/grammar/vocabulary.h"

#include <algorithm>

namespace k3::grammar {

VocabularyTrie::VocabularyTrie(const Tokenizer& tokenizer) : vocab_size_(tokenizer.vocab_size()) {
  texts_.resize(vocab_size_);
  for (std::size_t i = 0; i < vocab_size_; ++i) {
    const auto id = static_cast<TokenId>(i);
    const auto bytes = tokenizer.Bytes(id);
    if (bytes.has_value() && !tokenizer.IsSpecial(id)) texts_[i] = *bytes;
  }
  std::vector<std::pair<std::string_view, TokenId>> tokens;
  for (std::size_t i = 0; i < texts_.size(); ++i) {
    if (!texts_[i].empty()) tokens.emplace_back(texts_[i], static_cast<TokenId>(i));
  }
  Build(std::move(tokens));
}

VocabularyTrie::VocabularyTrie(const std::vector<std::string>& texts)
    : texts_(texts), vocab_size_(texts.size()) {
  std::vector<std::pair<std::string_view, TokenId>> tokens;
  for (std::size_t i = 0; i < texts_.size(); ++i) {
    if (!texts_[i].empty()) tokens.emplace_back(texts_[i], static_cast<TokenId>(i));
  }
  Build(std::move(tokens));
}

std::string_view VocabularyTrie::Bytes(TokenId id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= texts_.size()) return {};
  return texts_[static_cast<std::size_t>(id)];
}

/// A token with the bytes of the one before it gets a node of its own beside that one.
void VocabularyTrie::Build(std::vector<std::pair<std::string_view, TokenId>> tokens) {
  std::sort(tokens.begin(), tokens.end());
  std::vector<std::uint32_t> open;  // the nodes of the previous token, from the root
  std::string_view previous;
  const auto close = [this, &open](std::size_t keep) {
    while (open.size() > keep) {
      nodes_[open.back()].end = static_cast<std::uint32_t>(nodes_.size());
      open.pop_back();
    }
  };
  for (const auto& [bytes, id] : tokens) {
    longest_ = std::max(longest_, bytes.size());
    std::size_t common = 0;
    while (common < previous.size() && common < bytes.size() && previous[common] == bytes[common]) {
      ++common;
    }
    close(std::min(common, bytes.size() - 1));
    for (std::size_t i = open.size(); i < bytes.size(); ++i) {
      Node node;
      node.byte = static_cast<std::uint8_t>(bytes[i]);
      node.depth = static_cast<std::uint16_t>(i);
      if (i + 1 == bytes.size()) node.token = id;
      open.push_back(static_cast<std::uint32_t>(nodes_.size()));
      nodes_.push_back(node);
    }
    previous = bytes;
  }
  close(0);
}

}  // namespace k3::grammar
