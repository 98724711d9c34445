// include/k3/kda.h in a build without CUDA.
#include <k3/kda.h>

extern "C" {

const char* k3_kda_status_text(k3_kda_status status) {
  return status == K3_KDA_OK ? "queued" : "this build has no CUDA";
}

int64_t k3_kda_forward_workspace(const k3_kda_batch*, float, k3_kda_plan) { return -1; }

k3_kda_status k3_kda_forward(const k3_kda_batch*, const k3_kda_inputs*, void*, int64_t,
                             const float*, float*, k3_kda_plan, void*, size_t, void*) {
  return K3_KDA_NO_CUDA;
}

k3_kda_status k3_kda_decode(const k3_kda_batch*, const k3_kda_inputs*, void*, int64_t, float*,
                            float*, void*) {
  return K3_KDA_NO_CUDA;
}

k3_kda_status k3_kda_decode_fused(const k3_kda_batch*, const k3_kda_inputs*, const k3_kda_conv*,
                                  const k3_kda_norm*, void*, int64_t, float*, float*, void*) {
  return K3_KDA_NO_CUDA;
}

int64_t k3_kda_backward_workspace(const k3_kda_batch*, float) { return -1; }

k3_kda_status k3_kda_backward(const k3_kda_batch*, const k3_kda_inputs*, const float*,
                              k3_kda_tensor, const float*, const k3_kda_gradients*, void*, size_t,
                              void*) {
  return K3_KDA_NO_CUDA;
}

}  // extern "C"
