#pragma once

#include <cuda_runtime.h>

#include "k3/kernels/cuda/kda_common.cuh"

namespace k3::cuda {

/// The bounded chunk form, head_dim 128. Fused: one block does everything for one head of one
/// sequence. Split: records go through `workspace`, two blocks a head run the chains.
cudaError_t LaunchKdaFused(const KdaParams& p, cudaStream_t stream);
cudaError_t LaunchKdaSplit(const KdaParams& p, void* workspace, cudaStream_t stream);

}  // namespace k3::cuda
