#include "k3/layers/sequence.h"

#include <algorithm>

namespace k3 {

GridSplit SplitOnGrid(std::int64_t position, std::int64_t count, std::int64_t grid) {
  const std::int64_t end = position + count;
  const std::int64_t first = (position + grid - 1) / grid * grid, last = end / grid * grid;
  if (first >= last) return {count, 0, 0};
  return {first - position, last - first, end - last};
}

}  // namespace k3
