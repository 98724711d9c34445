#include "k3/kernels/devices.h"

#include <cuda_runtime.h>

namespace k3 {

std::vector<GpuDevice> ListGpuDevices() {
  std::vector<GpuDevice> devices;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();  // forget the failure: the next CUDA call must not see it
    return devices;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      (void)cudaGetLastError();
      continue;
    }
    devices.push_back({properties.name, properties.totalGlobalMem, properties.multiProcessorCount,
                       properties.major, properties.minor});
  }
  return devices;
}

bool BuiltWithCuda() { return true; }

}  // namespace k3
