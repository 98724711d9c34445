// Who may run, who reads how much, who gives way: decisions without threads, clocks or models.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "k3/base/ids.h"
#include "k3/kernels/exec.h"
#include "k3/model/model_state.h"

namespace k3 {

/// Bytes of a sequence's state by its length.
struct StateSize {
  std::int64_t fixed = 0;  // whatever the length
  std::int64_t row = 0;    // more for each token, in whole pages

  /// From a state of a model that has consumed nothing.
  static StateSize Of(const ModelState& empty);
  std::int64_t At(std::int64_t tokens) const {
    return fixed + row * ((tokens + PagedRows::kPageRows - 1) / PagedRows::kPageRows *
                          PagedRows::kPageRows);
  }
  /// A copy that shares its pages and then writes to the last one.
  std::int64_t Copy() const { return fixed + row * PagedRows::kPageRows; }
};

/// Fast mode computes tokens in chunks where a whole cell lies in a run (docs/numerics.md). A run
/// of this many never holds one, so its tokens come out as one by one.
constexpr std::int64_t kLongestSingleRun = kKdaGrid - 1;

/// A prompt that waits to be read on.
struct PromptNeed {
  std::int64_t remaining = 0;
  int priority = 0;
  std::uint64_t last_step = 0;  // when it was served last
  std::uint64_t id = 0;         // older ones have smaller numbers
};

/// Tokens for each prompt of this step, `budget` in all (in fast mode at least a cell of the grid).
/// A higher priority takes what it can first. Within one the budget is cut evenly, and what a short
/// prompt leaves goes to the others; when there are too many for pieces of a sensible size, those
/// that waited longest come first.
std::vector<std::int64_t> SharePrefill(std::span<const PromptNeed> needs, std::int64_t budget,
                                       MathMode math);

/// Where a piece of a prompt ends that starts at `position` (on the grid in fast mode) and may have
/// `share` tokens: anywhere in exact mode, on the grid or at `end` in fast mode.
std::int64_t PieceEnd(std::int64_t position, std::int64_t share, std::int64_t end, MathMode math);

/// Positions, ascending and without the end, at which the state of a prompt is worth keeping: the
/// wanted ones, and 256, 384, 512, 768, 1024, ... so that a text that parts from this one anywhere
/// beyond 256 tokens reads at most a third of what they share again. In fast mode all are moved
/// down to the grid, and the grid's last point in a prompt of at least 512 tokens is added: the
/// state at the end continues nothing, and a second turn would read up to a third of the text
/// again.
std::vector<std::int64_t> SnapshotPlan(std::int64_t prompt, std::span<const std::int64_t> wanted,
                                       MathMode math);
/// Adds one more to such a plan.
void AddSnapshot(std::vector<std::int64_t>& plan, std::int64_t position, MathMode math);

/// The rank of a request; smaller runs first and gives way last.
struct Rank {
  int priority = 0;
  std::uint64_t id = 0;
  friend bool operator<(const Rank& a, const Rank& b) {
    return a.priority != b.priority ? a.priority > b.priority : a.id < b.id;
  }
};

/// How many tokens the first of both have in common.
std::int64_t CommonPrefix(std::span<const TokenId> a, std::span<const TokenId> b);

}  // namespace k3
