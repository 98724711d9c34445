// The state file's parser on arbitrary bytes. The first byte chooses whether the checksum and the
// fingerprint are put right first, so that the checks behind them are reached as well.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "k3/runtime/sequence_state.h"

namespace {

k3::ModelConfig SmallConfig() {
  k3::ModelConfig c;
  c.hidden = 4;
  c.n_layers = 3;
  c.attention = {k3::AttentionKind::kKda, k3::AttentionKind::kMla, k3::AttentionKind::kGqa};
  c.kda.n_heads = 1;
  c.kda.head_dim = 2;
  c.mla.kv_lora_rank = 2;
  c.mla.qk_rope_dim = 1;
  c.gqa.n_kv_heads = 1;
  c.gqa.head_dim = 2;
  return c;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::uint64_t kFingerprint = 0x1234;
  if (size == 0) return 0;
  std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  if (data[0] % 2 == 1 && bytes.size() >= 32) {
    std::memcpy(bytes.data() + 16, &kFingerprint, sizeof kFingerprint);
    const std::uint64_t sum = XXH3_64bits(bytes.data(), bytes.size() - 8);
    std::memcpy(bytes.data() + bytes.size() - 8, &sum, sizeof sum);
  }
  const auto state =
      k3::ParseState(bytes, "fuzz", {kFingerprint, 100}, k3::ModelState(SmallConfig()));
  // What is accepted has exactly one form.
  if (state.ok() && k3::SerializeState(*state, kFingerprint) != bytes) __builtin_trap();
  return 0;
}
