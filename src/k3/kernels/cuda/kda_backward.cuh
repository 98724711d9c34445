#pragma once

#include <cuda_runtime.h>

#include "k3/kernels/cuda/kda_common.cuh"

namespace k3::cuda {

/// What the backward pass reads and writes besides KdaParams; contracts in include/k3/kda.h.
struct KdaGradients {
  const bf16* d_o;
  int64_t d_o_row;
  const float* ds_out;  // null: zeros
  bf16 *dq, *dk, *dv, *df;
  float *dbeta, *da_log, *ddt_bias;
  float* ds_in;  // null: not wanted
};

cudaError_t LaunchKdaBackward(const KdaParams& p, const KdaGradients& g, void* workspace,
                              cudaStream_t stream);

}  // namespace k3::cuda
