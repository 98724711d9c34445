// f32 kernels behind CudaBackend: one launcher for each op of k3/kernels/backend.h that is there.
#pragma once

#include <cuda_runtime.h>

#include "k3/kernels/backend.h"

namespace k3::cuda {

cudaError_t LaunchOp(const L2NormArgs& a, cudaStream_t stream);
cudaError_t LaunchOp(const GatedRmsNormArgs& a, cudaStream_t stream);
cudaError_t LaunchOp(const SigmoidArgs& a, cudaStream_t stream);
cudaError_t LaunchOp(const KdaGateArgs& a, cudaStream_t stream);
cudaError_t LaunchOp(const ShortConvArgs& a, cudaStream_t stream);

/// The token recurrence. Heads must be square with 32, 64 or 128 channels (KdaShapeOk), states
/// aligned to 16 bytes.
bool KdaShapeOk(const KdaArgs& a);
cudaError_t LaunchOp(const KdaArgs& a, cudaStream_t stream);

/// Sequences of a batch as a kernel's argument: larger batches take several launches.
struct OpSequences {
  static constexpr int kMost = 64;
  int count = 0;
  SequenceRange ranges[kMost];
  float* states[kMost];
};

/// launch(sequences) for every part of the batch.
template <class Launch>
cudaError_t ForSequences(std::span<const SequenceRange> ranges, std::span<float* const> states,
                         Launch&& launch) {
  for (std::size_t at = 0; at < ranges.size(); at += OpSequences::kMost) {
    OpSequences part;
    for (std::size_t i = at; i < ranges.size() && part.count < OpSequences::kMost; ++i) {
      part.ranges[part.count] = ranges[i], part.states[part.count] = states[i];
      ++part.count;
    }
    launch(part);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace k3::cuda
