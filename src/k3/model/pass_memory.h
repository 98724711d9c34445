// Scratch memory of one forward pass, counted instead of allocated. The engine reserves what this
// says; tests hold it against what passes really take.
#pragma once

#include <cstdint>

#include "k3/kernels/exec.h"
#include "k3/model/config.h"

namespace k3 {

/// Bytes of Exec::ws at the peak of a pass over `tokens` rows, `logit_rows` of which are scored.
std::int64_t PassBytes(const ModelConfig& config, std::int64_t tokens, std::int64_t logit_rows);

/// What the CPU ops need besides: one buffer shared by all threads, and one a thread.
struct OpScratch {
  std::int64_t shared = 0;
  std::int64_t per_thread = 0;
};

/// An upper estimate for a pass over `tokens` rows in sequences of at most `per_sequence` of them,
/// attending to at most `context` cached rows.
OpScratch OpScratchBytes(const ModelConfig& config, std::int64_t tokens, std::int64_t per_sequence,
                         std::int64_t context, MathMode math);

}  // namespace k3
