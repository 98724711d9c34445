#pragma once

#include <cuda_runtime.h>

#include "k3/kernels/cuda/kda_common.cuh"

namespace k3::cuda {

/// Queues the token recurrence: every form of the gate, head_dim 64 or 128, any T.
cudaError_t LaunchKdaRecurrent(const KdaParams& p, int head_dim, cudaStream_t stream);

}  // namespace k3::cuda
