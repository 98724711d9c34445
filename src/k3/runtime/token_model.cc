#include "k3/runtime/token_model.h"

#include <algorithm>

namespace k3 {

std::int64_t NextCut(std::int64_t position, std::int64_t chunk, MathMode math) {
  constexpr std::int64_t kLargest = std::int64_t{1}
                                    << 32;  // keeps the sums below far from overflow
  chunk = std::clamp<std::int64_t>(chunk, 1, kLargest);
  if (math == MathMode::kFast) chunk = (chunk + kFastGrid - 1) / kFastGrid * kFastGrid;
  return (position / chunk + 1) * chunk;
}

}  // namespace k3
