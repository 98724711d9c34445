// The C interface of include/k3/kda.h: checks arguments, picks a plan, queues kernels.
#include <cuda_runtime.h>
#include <k3/kda.h>

#include "k3/kernels/cuda/kda_backward.cuh"
#include "k3/kernels/cuda/kda_forward.cuh"
#include "k3/kernels/cuda/kda_recurrent.cuh"

namespace k3::cuda {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 31;

bool BatchOk(const k3_kda_batch* b) {
  return b != nullptr && b->n_tokens >= 0 && b->n_tokens < kMaxTokens && b->n_sequences >= 0 &&
         b->n_heads >= 1 && b->n_heads <= 4096 && (b->head_dim == 64 || b->head_dim == 128) &&
         (b->cu_seqlens != nullptr || b->n_sequences == 1) &&
         static_cast<int64_t>(b->n_sequences) * b->n_heads < (int64_t{1} << 28);
}

bool Aligned(const void* p, uintptr_t to = 16) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

bool TensorOk(const k3_kda_batch& b, const void* data, int64_t row_stride) {
  return data != nullptr && Aligned(data) && row_stride % 8 == 0 &&
         row_stride >= static_cast<int64_t>(b.n_heads) * b.head_dim &&
         row_stride < (int64_t{1} << 40);
}

bool InputsOk(const k3_kda_batch& b, const k3_kda_inputs* x) {
  if (x == nullptr) return false;
  if (!(x->lower_bound <= 0.f) || !(x->lower_bound > -1e30f)) return false;  // refuses NaN
  if (b.n_tokens == 0) return true;
  return TensorOk(b, x->q.data, x->q.row_stride) && TensorOk(b, x->k.data, x->k.row_stride) &&
         TensorOk(b, x->v.data, x->v.row_stride) && TensorOk(b, x->f.data, x->f.row_stride) &&
         x->beta.data != nullptr && x->beta.row_stride >= b.n_heads && x->a_log != nullptr &&
         x->dt_bias != nullptr && Aligned(x->dt_bias);
}

bool ChunkFormOk(const k3_kda_batch& b, float lower_bound) {
  return b.head_dim == 128 && lower_bound < 0.f && lower_bound >= kLowestBound;
}

/// Few chains leave the fused kernel's device idle; short sequences do not pay for chunks.
k3_kda_plan Choose(const k3_kda_batch& b, float lower_bound) {
  if (!ChunkFormOk(b, lower_bound)) return K3_KDA_RECURRENT;
  if (b.n_tokens <= 8 * static_cast<int64_t>(b.n_sequences)) return K3_KDA_RECURRENT;
  return static_cast<int64_t>(b.n_sequences) * b.n_heads <= 66 ? K3_KDA_SPLIT : K3_KDA_FUSED;
}

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

bool FusionOk(const k3_kda_batch& b, const k3_kda_conv* conv, const k3_kda_norm* norm) {
  for (int i = 0; conv != nullptr && i < 3; ++i) {
    if (conv->weights[i] == nullptr || !Aligned(conv->weights[i])) return false;
    if (conv->tails[i] == nullptr || !Aligned(conv->tails[i], 8)) return false;
    if ((conv->token_tails[i] == nullptr) != (conv->token_tails[0] == nullptr)) return false;
    if (!Aligned(conv->token_tails[i], 8)) return false;
  }
  if (norm == nullptr) return true;
  if (norm->weight == nullptr || !Aligned(norm->weight)) return false;
  if (!(norm->eps > 0.f) || !(norm->eps < 1e30f)) return false;  // refuses NaN
  return b.n_tokens == 0 || TensorOk(b, norm->gate.data, norm->gate.row_stride);
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
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

k3_kda_status Launched(cudaError_t error) {
  return error == cudaSuccess ? K3_KDA_OK : K3_KDA_LAUNCH;
}

}  // namespace
}  // namespace k3::cuda

using namespace k3::cuda;

extern "C" {

const char* k3_kda_status_text(k3_kda_status status) {
  switch (status) {
    case K3_KDA_OK:
      return "queued";
    case K3_KDA_INVALID:
      return "an argument is null, misaligned or out of range";
    case K3_KDA_SMALL_WORKSPACE:
      return "the workspace is smaller than the size query asks for";
    case K3_KDA_NO_CUDA:
      return "no device of compute capability 9.0";
    case K3_KDA_LAUNCH:
      return "the CUDA runtime refused a launch";
  }
  return "not a status";
}

int64_t k3_kda_forward_workspace(const k3_kda_batch* batch, float lower_bound, k3_kda_plan plan) {
  if (!BatchOk(batch)) return -1;
  const bool chunks = ChunkFormOk(*batch, lower_bound);
  if (plan == K3_KDA_AUTO) plan = Choose(*batch, lower_bound);
  if (plan == K3_KDA_RECURRENT) return 0;
  if (!chunks) return -1;
  if (plan == K3_KDA_FUSED) return 0;
  if (plan != K3_KDA_SPLIT) return -1;
  return KdaSplitWorkspace(batch->n_tokens, batch->n_sequences, batch->n_heads);
}

k3_kda_status k3_kda_forward(const k3_kda_batch* batch, const k3_kda_inputs* inputs, void* o,
                             int64_t o_row_stride, const float* initial_state, float* final_state,
                             k3_kda_plan plan, void* workspace, size_t workspace_bytes,
                             void* stream) {
  if (!BatchOk(batch) || !InputsOk(*batch, inputs)) return K3_KDA_INVALID;
  if (batch->n_tokens > 0 && !TensorOk(*batch, o, o_row_stride)) return K3_KDA_INVALID;
  if (!Aligned(initial_state) || !Aligned(final_state)) return K3_KDA_INVALID;
  if (plan == K3_KDA_AUTO) plan = Choose(*batch, inputs->lower_bound);
  const int64_t bytes = k3_kda_forward_workspace(batch, inputs->lower_bound, plan);
  if (bytes < 0) return K3_KDA_INVALID;
  if (bytes > 0 && (workspace == nullptr || !Aligned(workspace))) return K3_KDA_INVALID;
  if (static_cast<size_t>(bytes) > workspace_bytes) return K3_KDA_SMALL_WORKSPACE;
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
  if (!BatchOk(batch) || !InputsOk(*batch, inputs)) return K3_KDA_INVALID;
  if (!FusionOk(*batch, conv, norm)) return K3_KDA_INVALID;
  if (batch->n_tokens > 0 && !TensorOk(*batch, o, o_row_stride)) return K3_KDA_INVALID;
  if (state == nullptr || !Aligned(state) || !Aligned(token_states)) return K3_KDA_INVALID;
  if (!DeviceOk()) return K3_KDA_NO_CUDA;
  KdaParams p = Params(*batch, *inputs, o, o_row_stride);
  p.s_in = state, p.s_out = state, p.token_states = token_states;
  const auto s = static_cast<cudaStream_t>(stream);
  if (conv == nullptr && norm == nullptr) {
    return Launched(LaunchKdaRecurrent(p, batch->head_dim, s));
  }
  return Launched(LaunchKdaDecodeFused(p, Fusion(conv, norm), batch->head_dim, s));
}

int64_t k3_kda_backward_workspace(const k3_kda_batch* batch, float lower_bound) {
  if (!BatchOk(batch) || !ChunkFormOk(*batch, lower_bound)) return -1;
  return KdaBackwardWorkspace(batch->n_tokens, batch->n_sequences, batch->n_heads);
}

k3_kda_status k3_kda_backward(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                              const float* initial_state, k3_kda_tensor d_o,
                              const float* d_final_state, const k3_kda_gradients* gradients,
                              void* workspace, size_t workspace_bytes, void* stream) {
  if (!BatchOk(batch) || !InputsOk(*batch, inputs) || gradients == nullptr) return K3_KDA_INVALID;
  const k3_kda_gradients& g = *gradients;
  if (g.da_log == nullptr || g.ddt_bias == nullptr) return K3_KDA_INVALID;
  if (!Aligned(initial_state) || !Aligned(d_final_state) || !Aligned(g.d_initial_state)) {
    return K3_KDA_INVALID;
  }
  if (batch->n_tokens > 0) {
    const int64_t row = static_cast<int64_t>(batch->n_heads) * batch->head_dim;
    for (const void* out : {g.dq, g.dk, g.dv, g.df}) {
      if (!TensorOk(*batch, out, row)) return K3_KDA_INVALID;
    }
    if (g.dbeta == nullptr || !TensorOk(*batch, d_o.data, d_o.row_stride)) return K3_KDA_INVALID;
  }
  const int64_t bytes = k3_kda_backward_workspace(batch, inputs->lower_bound);
  if (bytes < 0) return K3_KDA_INVALID;
  if (bytes > 0 && (workspace == nullptr || !Aligned(workspace))) return K3_KDA_INVALID;
  if (static_cast<size_t>(bytes) > workspace_bytes) return K3_KDA_SMALL_WORKSPACE;
  if (!DeviceOk()) return K3_KDA_NO_CUDA;
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
