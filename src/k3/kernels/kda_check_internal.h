// What every call of include/k3/kda.h refuses, before any device is asked: one list for the builds
// with and without CUDA, so that a machine without a GPU can test it.
#pragma once

#include <k3/kda.h>

#include <cstddef>
#include <cstdint>

namespace k3::kda {

constexpr float kLowestBound = -5.f;          // of the chunk form, see cuda/kda_prep.cuh
constexpr int kChunk = 32;                    // tokens a chunk
constexpr std::int64_t kRecordBytes = 29184;  // of one chunk and head in the split plan
constexpr std::int64_t kStateBytes = 32768;   // of a state at a chunk's border, bf16

/// Chunks that records and states have room for: sequence s starts at slot cu[s] / 32 + s.
constexpr std::int64_t Slots(std::int64_t n_tokens, std::int64_t n_sequences) {
  return n_tokens / kChunk + n_sequences;
}

/// K3_KDA_OK, or what the call of the same arguments answers. CheckForward puts the plan that will
/// run into `plan` when that is K3_KDA_AUTO.
k3_kda_status CheckForward(const k3_kda_batch* batch, const k3_kda_inputs* inputs, const void* o,
                           std::int64_t o_row_stride, const float* initial_state,
                           const float* final_state, k3_kda_plan& plan, const void* workspace,
                           std::size_t workspace_bytes);
k3_kda_status CheckDecode(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                          const k3_kda_conv* conv, const k3_kda_norm* norm, const void* o,
                          std::int64_t o_row_stride, const float* state, const float* token_states);
k3_kda_status CheckBackward(const k3_kda_batch* batch, const k3_kda_inputs* inputs,
                            const float* initial_state, const k3_kda_tensor& d_o,
                            const float* d_final_state, const k3_kda_gradients* gradients,
                            const void* workspace, std::size_t workspace_bytes);

}  // namespace k3::kda
