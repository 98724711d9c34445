#include "k3/runtime/scheduler.h"

#include <algorithm>
#include <numeric>

namespace k3 {
namespace {

/// Pieces smaller than this are not worth a place in a batch.
constexpr std::int64_t kSensiblePiece = 16;

/// Shares `left` out among the prompts of one priority; returns what nobody took.
std::int64_t ShareAmong(std::span<const PromptNeed> needs, std::vector<std::size_t> group,
                        std::int64_t left, std::int64_t grain, std::vector<std::int64_t>& share) {
  std::sort(group.begin(), group.end(), [&](std::size_t a, std::size_t b) {
    const PromptNeed &x = needs[a], &y = needs[b];
    return x.last_step != y.last_step ? x.last_step < y.last_step : x.id < y.id;
  });
  // A rest smaller than a cell of the grid is of no use in fast mode.
  const auto served = std::max<std::int64_t>(grain < kFastGrid ? 1 : 0, left / grain);
  if (static_cast<std::int64_t>(group.size()) > served) {
    group.resize(static_cast<std::size_t>(served));
  }
  // The shortest first, so that what it leaves can still go to all others.
  std::stable_sort(group.begin(), group.end(), [&](std::size_t a, std::size_t b) {
    return needs[a].remaining < needs[b].remaining;
  });
  auto others = static_cast<std::int64_t>(group.size());
  for (const std::size_t i : group) {
    std::int64_t part = std::min(needs[i].remaining, left / others--);
    if (part < needs[i].remaining) part = std::max(grain, part / grain * grain);
    share[i] = std::min({part, needs[i].remaining, left});
    left -= share[i];
  }
  return left;
}

}  // namespace

StateSize StateSize::Of(const ModelState& empty) {
  StateSize size;
  size.fixed = empty.bytes();
  for (std::int64_t i = 0; i < empty.n_layers(); ++i) {
    size.row += 4 * (empty.layer(i).rows.width() + empty.layer(i).value_rows.width());
  }
  return size;
}

std::vector<std::int64_t> SharePrefill(std::span<const PromptNeed> needs, std::int64_t budget,
                                       MathMode math) {
  const std::int64_t grain =
      math == MathMode::kFast ? kFastGrid : std::clamp<std::int64_t>(budget, 1, kSensiblePiece);
  std::vector<std::int64_t> share(needs.size());
  std::vector<std::size_t> order(needs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return needs[a].priority > needs[b].priority;
  });
  std::int64_t left = std::max(budget, grain);
  for (std::size_t begin = 0, end = 0; begin < order.size() && left > 0; begin = end) {
    while (end < order.size() && needs[order[end]].priority == needs[order[begin]].priority) ++end;
    const auto first = order.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = order.begin() + static_cast<std::ptrdiff_t>(end);
    left = ShareAmong(needs, std::vector<std::size_t>(first, last), left, grain, share);
  }
  return share;
}

std::int64_t PieceEnd(std::int64_t position, std::int64_t share, std::int64_t end, MathMode math) {
  share = std::max<std::int64_t>(share, 1);
  if (share >= end - position) return end;
  if (math == MathMode::kExact) return position + share;
  const std::int64_t cut = (position + share) / kFastGrid * kFastGrid;
  return std::min(end, std::max(cut, (position / kFastGrid + 1) * kFastGrid));
}

void AddSnapshot(std::vector<std::int64_t>& plan, std::int64_t position, MathMode math) {
  if (math == MathMode::kFast) position = position / kFastGrid * kFastGrid;
  if (position <= 0) return;
  const auto at = std::lower_bound(plan.begin(), plan.end(), position);
  if (at == plan.end() || *at != position) plan.insert(at, position);
}

std::vector<std::int64_t> SnapshotPlan(std::int64_t prompt, std::span<const std::int64_t> wanted,
                                       MathMode math) {
  std::vector<std::int64_t> plan;
  for (const std::int64_t p : wanted) {
    if (p < prompt) AddSnapshot(plan, p, math);
  }
  for (std::int64_t p = 256; p < prompt && p < std::int64_t{1} << 40; p *= 2) {
    AddSnapshot(plan, p, math);
    if (p + p / 2 < prompt) AddSnapshot(plan, p + p / 2, math);
  }
  // The rest then takes a pass of its own, which a short prompt would feel.
  if (math == MathMode::kFast && prompt >= 512 && prompt % kFastGrid != 0) {
    AddSnapshot(plan, prompt, math);
  }
  return plan;
}

std::int64_t CommonPrefix(std::span<const TokenId> a, std::span<const TokenId> b) {
  std::size_t n = 0;
  while (n < a.size() && n < b.size() && a[n] == b[n]) ++n;
  return static_cast<std::int64_t>(n);
}

}  // namespace k3
