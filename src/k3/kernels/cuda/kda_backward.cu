#include "k3/kernels/cuda/kda_backward.cuh"
namespace k3::cuda {
int64_t KdaBackwardWorkspace(int64_t, int, int) { return -1; }
cudaError_t LaunchKdaBackward(const KdaParams&, const KdaGradients&, void*, cudaStream_t) { return cudaErrorNotSupported; }
}
