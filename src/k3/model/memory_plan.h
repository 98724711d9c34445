// What running a model costs before it is loaded: bytes by part, what fits, what bounds a token.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"
#include "k3/kernels/exec.h"
#include "k3/model/inventory.h"

namespace k3 {

struct PlanOptions {
  std::int64_t context = 4096;  // tokens of every sequence
  std::int64_t batch = 1;       // sequences at once
  std::int64_t prefill_chunk = 512;
  int threads = 1;
  MathMode math = MathMode::kExact;
  std::int64_t memory = 0;  // bytes there are; 0: not asked
};

enum class Home : std::uint8_t {
  kHeap,    // must be in memory
  kMapped,  // pages of the files: best in memory, else read again from disk
};
std::string_view Name(Home home);  // "heap", "mapped file"

struct PlanPart {
  std::string name;  // "weights: attention", "KDA state", ...: stable, for scripts
  Home home = Home::kHeap;
  std::int64_t bytes = 0;
  std::int64_t bf16_bytes = -1;  // the same in bf16, where the release counts so; -1: not given
  std::string note;
};

enum class PlanVerdict : std::uint8_t {
  kNotAsked,
  kFits,      // everything stays in memory
  kFromDisk,  // runs, but some weights are read from disk again and again
  kTooLarge,  // what must be in memory is more than there is
};
std::string_view Name(PlanVerdict verdict);  // "fits", "from disk", "too large", "not asked"

/// One step: decoding one token in each of the batch's sequences, or reading one prefill chunk.
struct StepCost {
  std::int64_t tokens = 0;
  double weight_bytes = 0, state_bytes = 0;  // moved at least once
  double operations = 0;                     // a multiply-add counts two
  double bytes() const { return weight_bytes + state_bytes; }
};

struct MemoryPlan {
  PlanOptions options;
  std::vector<PlanPart> parts;
  std::int64_t heap_bytes = 0, mapped_bytes = 0;
  std::int64_t workspace_bytes = 0;  // of `parts`: what the engine reserves for its passes
  std::int64_t row_bytes = 0;  // of cached rows a token and sequence, as the engine keeps them
  std::int64_t row_bytes_bf16 = 0;
  PlanVerdict verdict = PlanVerdict::kNotAsked;
  /// With the weights in memory if those fit, else without. 0: not even one.
  std::int64_t largest_context = 0, largest_batch = 0;
  StepCost decode, prefill;

  std::int64_t total_bytes() const { return heap_bytes + mapped_bytes; }
  const PlanPart* Find(std::string_view name) const;
};

/// Peak bytes, not averages. Errors: a context above the model's limit, sizes 64 bits cannot count.
Result<MemoryPlan> MakePlan(const Inventory& inventory, const PlanOptions& options);

/// Heap bytes that must be there for `context` tokens in each of `batch` sequences, weights of
/// `config` apart: state, scratch, scores. What an engine checks before it starts.
std::int64_t HeapBytesToRun(const ModelConfig& config, const PlanOptions& options);

}  // namespace k3
