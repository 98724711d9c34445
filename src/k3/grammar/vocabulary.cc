#include "k3/grammar/vocabulary.h"

#include <algorithm>
#include <utility>

namespace k3::grammar {
namespace {

/// A token with the bytes of the one before it gets a node of its own beside that one.
VocabularyTrie::Part Tree(std::vector<std::pair<std::string_view, TokenId>> tokens) {
  std::sort(tokens.begin(), tokens.end());
  VocabularyTrie::Part part;
  std::vector<std::uint32_t> open;  // the nodes of the previous token, from the root
  std::string_view previous;
  const auto close = [&part, &open](std::size_t keep) {
    while (open.size() > keep) {
      part.nodes[open.back()].end = static_cast<std::uint32_t>(part.nodes.size());
      open.pop_back();
    }
  };
  for (const auto& [bytes, id] : tokens) {
    part.longest = std::max(part.longest, bytes.size());
    std::size_t common = 0;
    while (common < previous.size() && common < bytes.size() && previous[common] == bytes[common]) {
      ++common;
    }
    close(std::min(common, bytes.size() - 1));
    for (std::size_t i = open.size(); i < bytes.size(); ++i) {
      VocabularyTrie::Node node;
      node.byte = static_cast<std::uint8_t>(bytes[i]);
      node.depth = static_cast<std::uint16_t>(i);
      if (i + 1 == bytes.size()) node.token = id;
      open.push_back(static_cast<std::uint32_t>(part.nodes.size()));
      part.nodes.push_back(node);
    }
    previous = bytes;
  }
  close(0);
  return part;
}

}  // namespace

VocabularyTrie::VocabularyTrie(const Tokenizer& tokenizer) : vocab_size_(tokenizer.vocab_size()) {
  texts_.resize(vocab_size_);
  for (std::size_t i = 0; i < vocab_size_; ++i) {
    const auto id = static_cast<TokenId>(i);
    const auto bytes = tokenizer.Bytes(id);
    if (bytes.has_value() && !tokenizer.IsSpecial(id)) texts_[i] = *bytes;
  }
  Build();
}

VocabularyTrie::VocabularyTrie(const std::vector<std::string>& texts)
    : texts_(texts), vocab_size_(texts.size()) {
  Build();
}

void VocabularyTrie::Build() {
  std::array<std::vector<std::pair<std::string_view, TokenId>>, 2> tokens;
  for (std::size_t i = 0; i < texts_.size(); ++i) {
    if (texts_[i].empty()) continue;
    tokens[texts_[i].size() > kShort ? 1 : 0].emplace_back(texts_[i], static_cast<TokenId>(i));
  }
  for (std::size_t p = 0; p < 2; ++p) parts_[p] = Tree(std::move(tokens[p]));
}

std::string_view VocabularyTrie::Bytes(TokenId id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= texts_.size()) return {};
  return texts_[static_cast<std::size_t>(id)];
}

}  // namespace k3::grammar
