#include "k3/kernels/kda_check_internal.h"

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace k3::kda {
namespace {

// Below these no product that a kernel or a launch forms leaves its type.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;
constexpr std::int64_t kMaxPairs = std::int64_t{1} << 28;
constexpr std::int64_t kMaxStride = std::int64_t{1} << 32;
constexpr int kMaxHeads = 4096;

bool Aligned(const void* p, std::uintptr_t to) {
  return reinterpret_cast<std::uintptr_t>(p) % to == 0;
}
/// There, and aligned.
bool Has(const void* p, std::uintptr_t to) { return p != nullptr && Aligned(p, to); }

bool BatchOk(const k3_kda_batch* b) {
  return b != nullptr && b->n_tokens >= 0 && b->n_tokens < kMaxTokens && b->n_sequences >= 0 &&
         b->n_heads >= 1 && b->n_heads <= kMaxHeads && (b->head_dim == 64 || b->head_dim == 128) &&
         (b->cu_seqlens != nullptr || b->n_sequences == 1) && Aligned(b->cu_seqlens, 4) &&
         std::int64_t{b->n_sequences} * b->n_heads < kMaxPairs;
}

bool TensorOk(const k3_kda_batch& b, const void* data, std::int64_t row_stride) {
  return Has(data, 16) && row_stride % 8 == 0 &&
         row_stride >= std::int64_t{b.n_heads} * b.head_dim && row_stride <= kMaxStride;
}
bool TensorOk(const k3_kda_batch& b, const k3_kda_tensor& x) {
  return TensorOk(b, x.data, x.row_stride);
}

bool InputsOk(const k3_kda_batch& b, const k3_kda_inputs* x) {
  if (x == nullptr) return false;
  // A comparison with NaN is false, so these refuse it.
  if (!(x->lower_bound <= 0.f) || !(x->lower_bound > -1e30f)) return false;
  if (!(std::fabs(x->scale) < 1e30f)) return false;
  // Read for every sequence, also for one without tokens.
  if (!Has(x->a_log, 4) || !Has(x->dt_bias, 16)) return false;
  if (b.n_tokens == 0) return true;
  return TensorOk(b, x->q) && TensorOk(b, x->k) && TensorOk(b, x->v) && TensorOk(b, x->f) &&
         Has(x->beta.data, 2) && x->beta.row_stride >= b.n_heads &&
         x->beta.row_stride <= kMaxStride;
}

/// Catches a step in place. Overlaps by part cannot be told from rows that share a buffer.
bool IsInput(const k3_kda_inputs& x, const void* o) {
  for (const auto* input : {&x.q, &x.k, &x.v, &x.f, &x.beta}) {
    if (input->data == o) return true;
  }
  return false;
}

bool OutputOk(const k3_kda_batch& b, const k3_kda_inputs& x, const void* o,
              std::int64_t row_stride) {
  return b.n_tokens == 0 || (TensorOk(b, o, row_stride) && !IsInput(x, o));
}

bool ConvOk(const k3_kda_conv& conv) {
  for (int i = 0; i < 3; ++i) {
    if (!Has(conv.weights[i], 16) || !Has(conv.tails[i], 8)) return false;
    if ((conv.token_tails[i] == nullptr) != (conv.token_tails[0] == nullptr)) return false;
    if (!Aligned(conv.token_tails[i], 8)) return false;
  }
  return true;
}

bool NormOk(const k3_kda_batch& b, const k3_kda_norm& norm) {
  return Has(norm.weight, 16) && norm.eps > 0.f && norm.eps < 1e30f &&
         (b.n_tokens == 0 || TensorOk(b, norm.gate));
}

bool ChunkFormOk(const k3_kda_batch& b, float lower_bound) {
  return b.head_dim == 128 && lower_bound < 0.f && lower_bound >= kLowestBound;
}

/// Few chains leave the fused kernel's device idle; short sequences do not pay for chunks.
k3_kda_plan Choose(const k3_kda_batch& b, float lower_bound) {
  if (!ChunkFormOk(b, lower_bound)) return K3_KDA_RECURRENT;
  if (b.n_tokens <= 8 * std::int64_t{b.n_sequences}) return K3_KDA_RECURRENT;
  return std::int64_t{b.n_sequences} * b.n_heads <= 66 ? K3_KDA_SPLIT : K3_KDA_FUSED;
}

/// `bytes` from a size query: negative when the call does not take the batch.
k3_kda_status WorkspaceOk(std::int64_t bytes, const void* workspace, std::size_t given) {
  if (bytes < 0 || (bytes > 0 && !Has(workspace, 16))) return K3_KDA_INVALID;
  return static_cast<std::uint64_t>(bytes) > given ? K3_KDA_SMALL_WORKSPACE : K3_KDA_OK;
}

}  // namespace

k3_kda_status CheckForward(const k3_kda_batch* batch, const k3_kda_inputs* inputs, const void* o,
                           std::int64_t o_row_stride, const float* initial_state,
                           const float* final_state, k3_kda_plan& plan, const void* workspace,
                           std::size_t workspace_bytes) {
  if (!BatchOk(batch) || !InputsOk(*batch, inputs)) return K3_KDA_INVALID;
  if (!OutputOk(*batch, *inputs, o, o_row_stride)) return K3_KDA_INVALID;
  if (!Aligned(initial_state, 16) || !Aligned(final_state, 16)) return K3_KDA_INVALID;
  if (plan == K3_KDA_AUTO) plan = Choose(*batch, inputs->lower_bound);
  return WorkspaceOk(k3_kda_forward_workspace(batch, inputs->lower_bound, plan), workspace,
                     workspace_bytes);
}

k3_kda_status CheckDecode(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                          const k3_kda_conv* conv, const k3_kda_norm* norm, const void* o,
                          std::int64_t o_row_stride, const float* state,
                          const float* token_states) {
  if (!BatchOk(batch) || !InputsOk(*batch, inputs)) return K3_KDA_INVALID;
  if (conv != nullptr && !ConvOk(*conv)) return K3_KDA_INVALID;
  if (norm != nullptr && !NormOk(*batch, *norm)) return K3_KDA_INVALID;
  if (!OutputOk(*batch, *inputs, o, o_row_stride)) return K3_KDA_INVALID;
  return Has(state, 16) && Aligned(token_states, 16) ? K3_KDA_OK : K3_KDA_INVALID;
}

k3_kda_status CheckBackward(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                            const float* initial_state, const k3_kda_tensor& d_o,
                            const float* d_final_state, const k3_kda_gradients* gradients,
                            const void* workspace, std::size_t workspace_bytes) {
  if (!BatchOk(batch) || !InputsOk(*batch, inputs) || gradients == nullptr) return K3_KDA_INVALID;
  const k3_kda_gradients& g = *gradients;
  if (!Has(g.da_log, 4) || !Has(g.ddt_bias, 4)) return K3_KDA_INVALID;
  if (!Aligned(initial_state, 16) || !Aligned(d_final_state, 16)) return K3_KDA_INVALID;
  if (!Aligned(g.d_initial_state, 16)) return K3_KDA_INVALID;
  if (batch->n_tokens > 0) {
    const std::int64_t row = std::int64_t{batch->n_heads} * batch->head_dim;
    for (const void* out : {g.dq, g.dk, g.dv, g.df}) {
      if (!TensorOk(*batch, out, row) || IsInput(*inputs, out)) return K3_KDA_INVALID;
      if (out == d_o.data) return K3_KDA_INVALID;
    }
    if (!Has(g.dbeta, 4) || !TensorOk(*batch, d_o)) return K3_KDA_INVALID;
  }
  return WorkspaceOk(k3_kda_backward_workspace(batch, inputs->lower_bound), workspace,
                     workspace_bytes);
}

}  // namespace k3::kda

using k3::kda::Slots;

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
      return "built without CUDA, or no device of compute capability 9.0";
    case K3_KDA_LAUNCH:
      return "the CUDA runtime refused a launch, or reported an earlier fault";
  }
  return "not a status";
}

int64_t k3_kda_forward_workspace(const k3_kda_batch* batch, float lower_bound, k3_kda_plan plan) {
  if (!k3::kda::BatchOk(batch) || !(lower_bound <= 0.f) || !(lower_bound > -1e30f)) return -1;
  const bool chunks = k3::kda::ChunkFormOk(*batch, lower_bound);
  if (plan == K3_KDA_AUTO) plan = k3::kda::Choose(*batch, lower_bound);
  if (plan == K3_KDA_RECURRENT) return 0;
  if (!chunks) return -1;
  if (plan == K3_KDA_FUSED) return 0;
  if (plan != K3_KDA_SPLIT) return -1;
  return Slots(batch->n_tokens, batch->n_sequences) * batch->n_heads * k3::kda::kRecordBytes;
}

int64_t k3_kda_backward_workspace(const k3_kda_batch* batch, float lower_bound) {
  if (!k3::kda::BatchOk(batch) || !k3::kda::ChunkFormOk(*batch, lower_bound)) return -1;
  const int64_t blocks = Slots(batch->n_tokens, batch->n_sequences) * batch->n_heads;
  if (blocks > INT32_MAX) return -1;  // one grid; the workspace would be 128 TiB
  // States of both chains, then U.
  return blocks * 2 * k3::kda::kStateBytes + batch->n_tokens * batch->n_heads * 256;
}

}  // extern "C"
