#include "k3/kernels/cuda_backend.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "k3/kernels/cuda/op_kernels.cuh"

namespace k3 {
namespace {

/// What CudaHas answers with; each has its override below.
constexpr std::string_view kOps[] = {"L2Norm",    "GatedRmsNorm", "Sigmoid", "KdaGate",
                                     "ShortConv", "KdaRecurrent", "KdaChunk"};

/// Every op as one that is not there yet.
class MissingOps : public CudaBackend {
 public:
#define K3_MISSING_OP(name) \
  void name(const name##Args&) override { Missing(#name, "is not there yet"); }
  K3_FOR_EACH_OP(K3_MISSING_OP)
#undef K3_MISSING_OP

 protected:
  void Missing(const char* op, const char* why) {
    Keep(Error{Code::kUnsupported, std::string("CUDA backend: ") + op + " " + why});
  }
  void Keep(Error error) {  // the first one counts
    if (!error_) error_ = std::move(error);
  }
  Status TakeError() {
    if (!error_) return Status();
    Error error = *std::move(error_);
    error_.reset();
    return Status(std::move(error));
  }

 private:
  std::optional<Error> error_;
};

class Device final : public MissingOps {
 public:
  Device(int index, cudaStream_t stream) : index_(index), stream_(stream) {}
  ~Device() override {
    cudaSetDevice(index_);
    cudaStreamDestroy(stream_);
  }

  Result<DeviceBuffer> Allocate(std::int64_t bytes) override {
    void* data = nullptr;
    cudaError_t error = cudaSetDevice(index_);
    if (error == cudaSuccess && bytes > 0) {
      error = cudaMalloc(&data, static_cast<std::size_t>(bytes));
    }
    if (bytes >= 0 && error == cudaSuccess) return DeviceBuffer(data, bytes);
    if (error != cudaSuccess) (void)cudaGetLastError();  // the next call must not see it
    return Error{Code::kResource, "GPU " + std::to_string(index_) + ": no " +
                                      std::to_string(bytes) +
                                      " bytes of memory: " + cudaGetErrorString(error)};
  }
  Status CopyToDevice(void* to, const void* from, std::int64_t bytes) override {
    return Copy(to, from, bytes, cudaMemcpyHostToDevice);
  }
  Status CopyToHost(void* to, const void* from, std::int64_t bytes) override {
    if (Status status = Wait(); !status.ok()) return status;
    return Copy(to, from, bytes, cudaMemcpyDeviceToHost);
  }
  Status Wait() override {
    Check("waiting", cudaStreamSynchronize(stream_));
    return TakeError();
  }

  void L2Norm(const L2NormArgs& a) override { Run("L2Norm", a); }
  void GatedRmsNorm(const GatedRmsNormArgs& a) override { Run("GatedRmsNorm", a); }
  void Sigmoid(const SigmoidArgs& a) override { Run("Sigmoid", a); }
  void KdaGate(const KdaGateArgs& a) override { Run("KdaGate", a); }
  void ShortConv(const ShortConvArgs& a) override { Run("ShortConv", a); }
  void KdaRecurrent(const KdaArgs& a) override { RunKda("KdaRecurrent", a); }
  void KdaChunk(const KdaArgs& a) override { RunKda("KdaChunk", a); }

 private:
  void Check(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    Keep(Error{Code::kResource,
               "GPU " + std::to_string(index_) + ": " + what + ": " + cudaGetErrorString(error)});
  }
  template <class Args>
  void Run(const char* op, const Args& a) {
    Check(op, cudaSetDevice(index_));
    Check(op, cuda::LaunchOp(a, stream_));
  }
  void RunKda(const char* op, const KdaArgs& a) {
    if (!cuda::KdaShapeOk(a)) {
      return Missing(op, "takes square heads with 32, 64 or 128 channels and aligned states");
    }
    Run(op, a);
  }
  Status Copy(void* to, const void* from, std::int64_t bytes, cudaMemcpyKind kind) {
    if (bytes <= 0) return Status();
    Check("copying", cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind, stream_));
    // From pageable memory the call above has taken its copy; to the host it may still be under
    // way.
    if (kind == cudaMemcpyDeviceToHost) Check("copying", cudaStreamSynchronize(stream_));
    return TakeError();
  }

  int index_;
  cudaStream_t stream_;
};

}  // namespace

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) cudaFree(data_);
}

Result<std::unique_ptr<CudaBackend>> MakeCudaBackend(int index) {
  const std::string name = "GPU " + std::to_string(index);
  int count = 0, major = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) (void)cudaGetLastError(), count = 0;
  if (index < 0 || index >= count) {
    return Error{Code::kResource,
                 name + " is not one of the " + std::to_string(count) + " visible"};
  }
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error == cudaSuccess && major != 9) {
    return Error{Code::kUnsupported, name + " has compute capability " + std::to_string(major) +
                                         ".x, the CUDA backend needs 9.0"};
  }
  cudaStream_t stream = nullptr;
  if (error == cudaSuccess) error = cudaSetDevice(index);
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return Error{Code::kResource, name + ": " + cudaGetErrorString(error)};
  }
  return Result<std::unique_ptr<CudaBackend>>(std::make_unique<Device>(index, stream));
}

bool CudaHas(std::string_view op) {
  return std::find(std::begin(kOps), std::end(kOps), op) != std::end(kOps);
}

}  // namespace k3
