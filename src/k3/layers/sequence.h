// The rows of a packed batch that belong to one sequence, as layers see them.
#pragma once

#include <cstdint>
#include <span>

#include "k3/kernels/exec.h"
#include "k3/layers/cache.h"

namespace k3 {

/// Rows [begin, begin + count) continue the sequence whose next position is `position`.
struct SequenceSlice {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t position = 0;
  LayerCache* cache = nullptr;
};

/// Appends the rows of the batch to one part of every sequence's cache.
void StoreInCaches(Exec& exec, CMat rows, std::span<const SequenceSlice> sequences,
                   PagedRows LayerCache::* part);

/// A run of `count` tokens from `position`, cut where absolute positions are multiples of `grid`.
/// A token belongs to `middle` iff the whole grid cell around it lies inside the run, so cutting a
/// run on the grid changes nothing.
struct GridSplit {
  std::int64_t head = 0, middle = 0, tail = 0;
};
GridSplit SplitOnGrid(std::int64_t position, std::int64_t count, std::int64_t grid);

}  // namespace k3
