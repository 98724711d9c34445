// A radix tree over token sequences, some of whose nodes carry something.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "k3/base/ids.h"

namespace k3 {

/// Every node stands for the tokens from the root to it. A node without a value is there only
/// because two sequences part at it. Not thread-safe.
template <class T>
class TokenTree {
 public:
  static constexpr std::int64_t kNodeBytes = 192;  // about, without its tokens

  struct Node {
    Node* parent = nullptr;
    std::int64_t depth = 0;     // tokens from the root
    std::vector<TokenId> edge;  // the last of those: what leads here from the parent
    std::map<TokenId, std::unique_ptr<Node>> children;  // by their first token
    std::unique_ptr<T> value;
  };

  /// Nodes with a value along `tokens`, deepest last, and how many tokens of it the tree knows.
  struct Walk {
    std::vector<Node*> found;
    std::int64_t matched = 0;
  };
  Walk Find(std::span<const TokenId> tokens) const {
    Walk walk;
    Node* node = root_.get();
    while (true) {
      const auto rest = tokens.subspan(static_cast<std::size_t>(node->depth));
      const auto child = rest.empty() ? node->children.end() : node->children.find(rest[0]);
      if (child == node->children.end()) return walk;
      const std::int64_t common = Common(child->second->edge, rest);
      walk.matched += common;
      if (common < Length(child->second->edge)) return walk;
      node = child->second.get();
      if (node->value) walk.found.push_back(node);
    }
  }

  /// The node of exactly `tokens` (not empty), made if it is not there.
  Node* Make(std::span<const TokenId> tokens) {
    Node* node = root_.get();
    while (true) {
      const auto rest = tokens.subspan(static_cast<std::size_t>(node->depth));
      if (rest.empty()) return node;
      const auto at = node->children.find(rest[0]);
      if (at == node->children.end()) {
        auto leaf = std::make_unique<Node>();
        leaf->parent = node;
        leaf->depth = static_cast<std::int64_t>(tokens.size());
        leaf->edge.assign(rest.begin(), rest.end());
        bytes_ += kNodeBytes + 4 * Length(leaf->edge);
        return (node->children[rest[0]] = std::move(leaf)).get();
      }
      const std::int64_t common = Common(at->second->edge, rest);
      if (common < Length(at->second->edge)) Split(at->second, common);
      node = at->second.get();
    }
  }

  /// Takes the value away, and the nodes that nobody needs any more. `node` may be gone afterwards.
  void Drop(Node* node) {
    node->value.reset();
    while (node != root_.get() && !node->value && node->children.empty()) {
      Node* parent = node->parent;
      bytes_ -= kNodeBytes + 4 * Length(node->edge);
      parent->children.erase(node->edge[0]);
      node = parent;
    }
    if (node != root_.get() && !node->value && node->children.size() == 1) Join(node);
  }

  /// The tokens that `node` stands for.
  std::vector<TokenId> Tokens(const Node* node) const {
    std::vector<TokenId> tokens(static_cast<std::size_t>(node->depth));
    for (; node->parent != nullptr; node = node->parent) {
      std::copy(node->edge.begin(), node->edge.end(),
                tokens.begin() + static_cast<std::ptrdiff_t>(node->parent->depth));
    }
    return tokens;
  }

  /// Depth of the nearest node above that has a value; 0 at the root.
  static std::int64_t DepthAbove(const Node* node) {
    for (node = node->parent; node->parent != nullptr; node = node->parent) {
      if (node->value) return node->depth;
    }
    return 0;
  }

  /// Of the nodes themselves, about.
  std::int64_t bytes() const { return bytes_; }

 private:
  static std::int64_t Length(const std::vector<TokenId>& v) {
    return static_cast<std::int64_t>(v.size());
  }
  static std::int64_t Common(std::span<const TokenId> a, std::span<const TokenId> b) {
    std::size_t n = 0;
    while (n < a.size() && n < b.size() && a[n] == b[n]) ++n;
    return static_cast<std::int64_t>(n);
  }

  /// Puts a node between `slot` and its parent, `common` tokens along the edge.
  void Split(std::unique_ptr<Node>& slot, std::int64_t common) {
    auto upper = std::make_unique<Node>();
    auto lower = std::move(slot);
    const auto cut = lower->edge.begin() + static_cast<std::ptrdiff_t>(common);
    upper->parent = lower->parent;
    upper->depth = lower->parent->depth + common;
    upper->edge.assign(lower->edge.begin(), cut);
    lower->edge.erase(lower->edge.begin(), cut);
    lower->parent = upper.get();
    const TokenId first = lower->edge[0];
    upper->children[first] = std::move(lower);
    slot = std::move(upper);
    bytes_ += kNodeBytes;
  }

  /// Joins a node without a value and with one child with that child.
  void Join(Node* node) {
    auto child = std::move(node->children.begin()->second);
    child->edge.insert(child->edge.begin(), node->edge.begin(), node->edge.end());
    child->parent = node->parent;
    bytes_ -= kNodeBytes;
    auto& slot = node->parent->children.at(node->edge[0]);
    slot = std::move(child);
  }

  std::unique_ptr<Node> root_ = std::make_unique<Node>();
  std::int64_t bytes_ = 0;
};

}  // namespace k3
