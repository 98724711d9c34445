// The ops on one GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "k3/base/status.h"
#include "k3/kernels/backend.h"

namespace k3 {

/// Owns device memory; empty after a move. Freed on the device it came from.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(void* data, std::int64_t bytes) : data_(data), bytes_(bytes) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBuffer();
  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// Ops on device memory, queued on one stream: an op returns before it has run, and neither
/// allocates nor waits. All views point to device memory; spans (sequences, states) and what they
/// list as pointers lie on the host and may be freed when the op returns.
/// Arithmetic is f32; KdaChunk runs the recurrence, because chunks of bf16 operands (<k3/kda.h>)
/// are outside its tolerance. Not there yet: an op that CudaHas denies, KDA heads that are not
/// square with 32, 64 or 128 channels. Such a call does nothing but leave an error for Wait. One
/// thread at a time. Buffers may outlive the backend.
class CudaBackend : public Backend {
 public:
  /// `bytes` of plain device memory, aligned to 256 bytes; kResource when there are not as many.
  virtual Result<DeviceBuffer> Allocate(std::int64_t bytes) = 0;
  /// Queued after all ops so far. `from` may be reused when the call returns.
  virtual Status CopyToDevice(void* to, const void* from, std::int64_t bytes) = 0;
  /// Waits like Wait, then copies.
  virtual Status CopyToHost(void* to, const void* from, std::int64_t bytes) = 0;
  /// Waits for all queued work. The first error since the last Wait: kUnsupported with the op's
  /// name, or kResource when the device failed, which ends the backend's use.
  virtual Status Wait() = 0;
};

/// A backend on device `index` of ListGpuDevices, with a stream of its own. kUnsupported in a build
/// without CUDA and for a device whose compute capability is not 9.0, kResource without the device.
Result<std::unique_ptr<CudaBackend>> MakeCudaBackend(int index);

/// Whether this build has a CUDA form of the op, by the name of its method.
bool CudaHas(std::string_view op);

}  // namespace k3
