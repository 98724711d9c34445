// A layer that is made useless on purpose, to see whether training finds out.
#pragma once

#include <cstdint>
#include <memory>

#include "k3/kernels/backend.h"

namespace k3 {

/// In front of other ops: adds noise to every number of one matrix's products y = x W^T, drawn from
/// a normal distribution of mean 0 and deviation 1. The gradient is that without noise.
struct NoiseSource {
  const void* matrix = nullptr;  // data of the WeightRef
  std::uint64_t seed = 0;        // of the next product; a pass sets it
};
/// `source` must outlive the ops.
std::unique_ptr<Backend> MakeNoiseOps(std::unique_ptr<Backend> inner, const NoiseSource& source);

}  // namespace k3
