// The GPUs this process may use.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace k3 {

struct GpuDevice {
  std::string name;
  std::size_t memory_bytes = 0;  // all of the device's memory, not what is free now
  int multiprocessors = 0;
  int compute_major = 0;  // compute capability, e.g. 9.0
  int compute_minor = 0;
};

/// Visible GPUs in the driver's order (CUDA_VISIBLE_DEVICES applies). Empty in a build without
/// CUDA, on a machine without a GPU, and when the driver is missing or too old: none of these is an
/// error. Creates no context on any device. Safe from many threads.
std::vector<GpuDevice> ListGpuDevices();

/// Whether this build has the CUDA backend at all, so that an empty list can be explained.
bool BuiltWithCuda();

}  // namespace k3
