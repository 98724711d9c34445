// include/k3/kda.h in a build without CUDA: arguments are judged as with it.
#include "k3/kernels/kda_check_internal.h"

namespace {

k3_kda_status NoCuda(k3_kda_status checked) {
  return checked == K3_KDA_OK ? K3_KDA_NO_CUDA : checked;
}

}  // namespace

extern "C" {

k3_kda_status k3_kda_forward(const k3_kda_batch* batch, const k3_kda_inputs* inputs, void* o,
                             int64_t o_row_stride, const float* initial_state, float* final_state,
                             k3_kda_plan plan, void* workspace, size_t workspace_bytes, void*) {
  return NoCuda(k3::kda::CheckForward(batch, inputs, o, o_row_stride, initial_state, final_state,
                                      plan, workspace, workspace_bytes));
}

k3_kda_status k3_kda_decode(const k3_kda_batch* batch, const k3_kda_inputs* inputs, void* o,
                            int64_t o_row_stride, float* state, float* token_states, void*) {
  return NoCuda(
      k3::kda::CheckDecode(batch, inputs, nullptr, nullptr, o, o_row_stride, state, token_states));
}

k3_kda_status k3_kda_decode_fused(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                                  const k3_kda_conv* conv, const k3_kda_norm* norm, void* o,
                                  int64_t o_row_stride, float* state, float* token_states, void*) {
  return NoCuda(
      k3::kda::CheckDecode(batch, inputs, conv, norm, o, o_row_stride, state, token_states));
}

k3_kda_status k3_kda_backward(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                              const float* initial_state, k3_kda_tensor d_o,
                              const float* d_final_state, const k3_kda_gradients* gradients,
                              void* workspace, size_t workspace_bytes, void*) {
  return NoCuda(k3::kda::CheckBackward(batch, inputs, initial_state, d_o, d_final_state, gradients,
                                       workspace, workspace_bytes));
}

}  // extern "C"
