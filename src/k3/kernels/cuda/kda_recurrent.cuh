#pragma once

#include <cuda_runtime.h>

#include "k3/kernels/cuda/kda_token.cuh"

namespace k3::cuda {

/// Queues the token recurrence: every form of the gate, head_dim 64 or 128, any T.
cudaError_t LaunchKdaRecurrent(const KdaParams& p, int head_dim, cudaStream_t stream);

/// The same for states in place (s_in = s_out), with a short convolution before it or a gated norm
/// behind it, or both. `x` has weights and tails for all of q, k, v or for none.
cudaError_t LaunchKdaDecodeFused(const KdaParams& p, const KdaFusion& x, int head_dim,
                                 cudaStream_t stream);

}  // namespace k3::cuda
