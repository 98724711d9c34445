#include "k3/tokenizer/bpe.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>

#include "k3/base/check.h"

namespace k3 {
namespace {

/// Up to this length scanning all parts for the lowest rank beats a heap.
constexpr std::size_t kShort = 64;

}  // namespace

void BpeMerger::Encode(std::string_view piece, std::vector<TokenId>& ids) {
  if (piece.size() == 1) {
    ids.push_back(ranks_.FindByte(static_cast<unsigned char>(piece[0])));
    return;
  }
  if (const TokenId whole = ranks_.Find(piece); whole != RankTable::kNone) {
    ids.push_back(whole);
  } else if (piece.size() <= kShort) {
    MergeShort(piece, ids);
  } else {
    MergeLong(piece, ids);
  }
}

TokenId BpeMerger::Id(std::string_view token) const {
  return token.size() == 1 ? ranks_.FindByte(static_cast<unsigned char>(token[0]))
                           : ranks_.Find(token);
}

void BpeMerger::MergeShort(std::string_view piece, std::vector<TokenId>& ids) const {
  std::array<std::uint8_t, kShort + 1> start;  // part i is piece[start[i], start[i + 1])
  std::array<std::uint32_t, kShort> rank;      // of part i joined with i + 1; kNone is the largest
  std::size_t n = piece.size();
  for (std::size_t i = 0; i <= n; ++i) start[i] = static_cast<std::uint8_t>(i);
  for (std::size_t i = 0; i + 1 < n; ++i) {
    rank[i] = static_cast<std::uint32_t>(ranks_.FindPair(static_cast<unsigned char>(piece[i]),
                                                         static_cast<unsigned char>(piece[i + 1])));
  }
  const auto joined = [&](std::size_t i) {
    return static_cast<std::uint32_t>(
        ranks_.Find(piece.substr(start[i], static_cast<std::size_t>(start[i + 2] - start[i]))));
  };
  constexpr auto kNone = static_cast<std::uint32_t>(RankTable::kNone);
  while (n > 1) {
    const auto* best = std::min_element(rank.data(), rank.data() + n - 1);
    if (*best == kNone) break;
    const auto i = static_cast<std::size_t>(best - rank.data());
    std::copy(start.data() + i + 2, start.data() + n + 1, start.data() + i + 1);
    std::copy(rank.data() + i + 1, rank.data() + n - 1, rank.data() + i);
    --n;
    if (i + 1 < n) rank[i] = joined(i);
    if (i > 0) rank[i - 1] = joined(i - 1);
  }
  for (std::size_t i = 0; i < n; ++i) {
    ids.push_back(Id(piece.substr(start[i], static_cast<std::size_t>(start[i + 1] - start[i]))));
  }
}

void BpeMerger::Rank(std::string_view piece, std::uint32_t at) {
  const std::uint32_t second = parts_[at].next;
  if (second == piece.size()) {
    parts_[at].rank = RankTable::kNone;
    return;
  }
  const TokenId rank = ranks_.Find(piece.substr(at, parts_[second].next - at));
  parts_[at].rank = rank;
  if (rank == RankTable::kNone) return;
  heap_.push_back(static_cast<std::uint64_t>(rank) << 32 | at);
}

void BpeMerger::MergeLong(std::string_view piece, std::vector<TokenId>& ids) {
  K3_CHECK(piece.size() < (std::size_t{1} << 30), "a piece is shorter than 1 GiB");
  const auto n = static_cast<std::uint32_t>(piece.size());
  const auto later = std::greater<std::uint64_t>();
  parts_.resize(n);
  heap_.clear();
  for (std::uint32_t i = 0; i < n; ++i) parts_[i] = {i - 1, i + 1, RankTable::kNone};
  for (std::uint32_t i = 0; i + 1 < n; ++i) {
    parts_[i].rank = ranks_.FindPair(static_cast<unsigned char>(piece[i]),
                                     static_cast<unsigned char>(piece[i + 1]));
    if (parts_[i].rank != RankTable::kNone) {
      heap_.push_back(static_cast<std::uint64_t>(parts_[i].rank) << 32 | i);
    }
  }
  std::make_heap(heap_.begin(), heap_.end(), later);
  const auto rank = [&](std::uint32_t at) {
    const std::size_t before = heap_.size();
    Rank(piece, at);
    if (heap_.size() != before) std::push_heap(heap_.begin(), heap_.end(), later);
  };
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const std::uint64_t top = heap_.back();
    heap_.pop_back();
    const auto at = static_cast<std::uint32_t>(top);
    // An entry whose pair has changed since is stale; a part swallowed by its neighbour has no
    // rank.
    if (parts_[at].rank != static_cast<TokenId>(top >> 32)) continue;
    const std::uint32_t gone = parts_[at].next;
    parts_[at].next = parts_[gone].next;
    parts_[gone].rank = RankTable::kNone;
    if (parts_[at].next != n) parts_[parts_[at].next].prev = at;
    rank(at);
    if (at != 0) rank(parts_[at].prev);
  }
  for (std::uint32_t at = 0; at != n; at = parts_[at].next) {
    ids.push_back(Id(piece.substr(at, parts_[at].next - at)));
  }
}

}  // namespace k3
