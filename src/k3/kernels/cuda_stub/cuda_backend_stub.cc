// k3/kernels/cuda_backend.h in a build without CUDA.
#include "k3/kernels/cuda_backend.h"

namespace k3 {

DeviceBuffer::~DeviceBuffer() = default;  // nothing can have made one that is not empty

Result<std::unique_ptr<CudaBackend>> MakeCudaBackend(int) {
  return Error{Code::kUnsupported, "this build has no CUDA backend"};
}

bool CudaHas(std::string_view) { return false; }

}  // namespace k3
