#include "k3/layers/sequence.h"

#include <algorithm>

namespace k3 {

GridSplit SplitOnGrid(std::int64_t position, std::int64_t count, std::int64_t grid) {
  const std::int64_t end = position + count;
  const std::int64_t first = (position + grid - 1) / grid * grid, last = end / grid * grid;
  if (first >= last) return {count, 0, 0};
  return {first - position, last - first, end - last};
}

void StoreInCaches(Exec& exec, CMat rows, std::span<const SequenceSlice> sequences,
                   PagedRows LayerCache::* part) {
  std::vector<std::vector<float*>> tables;
  std::vector<StoreRun> runs;
  tables.reserve(sequences.size());
  for (const SequenceSlice& s : sequences) {
    PagedRows& cache = s.cache->*part;
    const std::int64_t first = cache.size();
    cache.Grow(s.count);
    tables.push_back(cache.MutablePageTable());
    runs.push_back({s.begin, s.count, first, tables.back()});
  }
  exec.ops->StoreRows({rows, PagedRows::kPageRows, runs});
}

}  // namespace k3
