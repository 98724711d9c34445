// The state file's parser on arbitrary bytes. The first byte chooses whether the checksum and the
// fingerprint are put right first, so that the checks behind them are reached as well. Then the
// same bytes as a file of snapshots, and as a snapshot with the right checksum.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "k3/runtime/sequence_state.h"
#include "k3/runtime/snapshot_file.h"

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

constexpr std::uint64_t kFingerprint = 0x1234;

/// What a snapshot has to fit.
class StateOnlyModel final : public k3::TokenModel {
 public:
  std::int64_t vocab() const override { return 100; }
  std::int64_t max_positions() const override { return 1000; }
  std::uint64_t fingerprint() const override { return kFingerprint; }
  k3::MathMode math() const override { return k3::MathMode::kExact; }
  k3::ModelState NewState() const override { return k3::ModelState(SmallConfig()); }
  k3::Status Forward(std::span<const k3::SequenceInput>, std::vector<float>&) override {
    return {};
  }
};

/// What is accepted can be written and is accepted again.
void ReadSnapshots(std::string bytes) {
  const StateOnlyModel model;
  const auto saved = k3::ParseSaved(bytes, "fuzz", model);
  if (saved.ok() && !k3::ParseSaved(k3::SerializeSaved(*saved, model), "fuzz", model).ok()) {
    __builtin_trap();
  }
  if (bytes.size() < 8) return;
  const std::uint64_t sum = XXH3_64bits(bytes.data(), bytes.size() - 8);
  std::memcpy(bytes.data() + bytes.size() - 8, &sum, sizeof sum);
  const auto one = k3::ParseSnapshot(bytes, "fuzz", model);
  if (!one.ok()) return;
  const std::string again = k3::SerializeSnapshot(one->tokens, one->snapshot, model);
  if (!k3::ParseSnapshot(again, "fuzz", model).ok()) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  if (data[0] % 2 == 1 && bytes.size() >= 32) {
    std::memcpy(bytes.data() + 16, &kFingerprint, sizeof kFingerprint);
    const std::uint64_t sum = XXH3_64bits(bytes.data(), bytes.size() - 8);
    std::memcpy(bytes.data() + bytes.size() - 8, &sum, sizeof sum);
  }
  ReadSnapshots(bytes);
  const auto state =
      k3::ParseState(bytes, "fuzz", {kFingerprint, 100}, k3::ModelState(SmallConfig()));
  // What is accepted has exactly one form.
  if (state.ok() && k3::SerializeState(*state, kFingerprint) != bytes) __builtin_trap();
  return 0;
}
