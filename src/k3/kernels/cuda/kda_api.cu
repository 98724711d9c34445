// The C interface of include/k3/kda.h: queues the kernels of calls that kda_check.cc lets through.
#include <cuda_runtime.h>
#include <k3/kda.h>

#include "k3/kernels/cuda/kda_backward.cuh"
#include "k3/kernels/cuda/kda_forward.cuh"
#include "k3/kernels/cuda/kda_recurrent.cuh"
#include "k3/kernels/kda_check_internal.h"

namespace k3::cuda {
namespace {

KdaParams Params(const k3_kda_batch& b, const k3_kda_inputs& x, void* o, int64_t o_row) {
  KdaParams p = {};
  p.q = static_cast<const bf16*>(x.q.data), p.q_row = x.q.row_stride;
  p.k = static_cast<const bf16*>(x.k.data), p.k_row = x.k.row_stride;
  p.v = static_cast<const bf16*>(x.v.data), p.v_row = x.v.row_stride;
  p.f = static_cast<const bf16*>(x.f.data), p.f_row = x.f.row_stride;
  p.beta = static_cast<const bf16*>(x.beta.data), p.beta_row = x.beta.row_stride;
  p.a_log = x.a_log, p.dt_bias = x.dt_bias;
  p.o = static_cast<bf16*>(o), p.o_row = o_row;
  p.cu = b.cu_seqlens, p.n_sequences = b.n_sequences, p.n_heads = b.n_heads;
  p.n_tokens = b.n_tokens, p.lower_bound = x.lower_bound, p.scale = x.scale;
  return p;
}

KdaFusion Fusion(const k3_kda_conv* conv, const k3_kda_norm* norm) {
  KdaFusion x = {};
  for (int i = 0; conv != nullptr && i < 3; ++i) {
    x.weights[i] = conv->weights[i];
    x.tails[i] = static_cast<bf16*>(conv->tails[i]);
    x.token_tails[i] = static_cast<bf16*>(conv->token_tails[i]);
  }
  if (norm != nullptr) {
    x.gate = static_cast<const bf16*>(norm->gate.data), x.gate_row = norm->gate.row_stride;
    x.norm_weight = norm->weight, x.norm_eps = norm->eps;
  }
  return x;
}

bool DeviceOk() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess) {
    return major == 9;
  }
  (void)cudaGetLastError();  // the status tells; the next call must not see it
  return false;
}

k3_kda_status Launched(cudaError_t error) {
  if (error == cudaSuccess) return K3_KDA_OK;
  (void)cudaGetLastError();
  return K3_KDA_LAUNCH;
}

}  // namespace
}  // namespace k3::cuda

using namespace k3::cuda;

extern "C" {

k3_kda_status k3_kda_forward(const k3_kda_batch* batch, const k3_kda_inputs* inputs, void* o,
                             int64_t o_row_stride, const float* initial_state, float* final_state,
                             k3_kda_plan plan, void* workspace, size_t workspace_bytes,
                             void* stream) {
  const k3_kda_status checked = k3::kda::CheckForward(
      batch, inputs, o, o_row_stride, initial_state, final_state, plan, workspace, workspace_bytes);
  if (checked != K3_KDA_OK) return checked;
  if (!DeviceOk()) return K3_KDA_NO_CUDA;
  KdaParams p = Params(*batch, *inputs, o, o_row_stride);
  p.s_in = initial_state, p.s_out = final_state;
  const auto s = static_cast<cudaStream_t>(stream);
  if (plan == K3_KDA_FUSED) return Launched(LaunchKdaFused(p, s));
  if (plan == K3_KDA_SPLIT) return Launched(LaunchKdaSplit(p, workspace, s));
  return Launched(LaunchKdaRecurrent(p, batch->head_dim, s));
}

k3_kda_status k3_kda_decode(const k3_kda_batch* batch, const k3_kda_inputs* inputs, void* o,
                            int64_t o_row_stride, float* state, float* token_states, void* stream) {
  return k3_kda_decode_fused(batch, inputs, nullptr, nullptr, o, o_row_stride, state, token_states,
                             stream);
}

k3_kda_status k3_kda_decode_fused(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                                  const k3_kda_conv* conv, const k3_kda_norm* norm, void* o,
                                  int64_t o_row_stride, float* state, float* token_states,
                                  void* stream) {
  const k3_kda_status checked =
      k3::kda::CheckDecode(batch, inputs, conv, norm, o, o_row_stride, state, token_states);
  if (checked != K3_KDA_OK) return checked;
  if (!DeviceOk()) return K3_KDA_NO_CUDA;
  KdaParams p = Params(*batch, *inputs, o, o_row_stride);
  p.s_in = state, p.s_out = state, p.token_states = token_states;
  const auto s = static_cast<cudaStream_t>(stream);
  if (conv == nullptr && norm == nullptr) {
    return Launched(LaunchKdaRecurrent(p, batch->head_dim, s));
  }
  return Launched(LaunchKdaDecodeFused(p, Fusion(conv, norm), batch->head_dim, s));
}

k3_kda_status k3_kda_backward(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                              const float* initial_state, k3_kda_tensor d_o,
                              const float* d_final_state, const k3_kda_gradients* gradients,
                              void* workspace, size_t workspace_bytes, void* stream) {
  const k3_kda_status checked = k3::kda::CheckBackward(
      batch, inputs, initial_state, d_o, d_final_state, gradients, workspace, workspace_bytes);
  if (checked != K3_KDA_OK) return checked;
  if (!DeviceOk()) return K3_KDA_NO_CUDA;
  const k3_kda_gradients& g = *gradients;
  KdaParams p = Params(*batch, *inputs, nullptr, 0);
  p.s_in = initial_state;
  const KdaGradients out = {static_cast<const bf16*>(d_o.data),
                            d_o.row_stride,
                            d_final_state,
                            static_cast<bf16*>(g.dq),
                            static_cast<bf16*>(g.dk),
                            static_cast<bf16*>(g.dv),
                            static_cast<bf16*>(g.df),
                            g.dbeta,
                            g.da_log,
                            g.ddt_bias,
                            g.d_initial_state};
  return Launched(LaunchKdaBackward(p, out, workspace, static_cast<cudaStream_t>(stream)));
}

}  // extern "C"
