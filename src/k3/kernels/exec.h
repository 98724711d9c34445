// What a forward pass runs on: arithmetic mode, threads, scratch memory.
#pragma once

#include <cstdint>

#include "k3/base/threads.h"
#include "k3/base/workspace.h"

namespace k3 {

/// docs/numerics.md states the contract of each.
enum class MathMode : std::uint8_t {
  kExact,  // f32, one fixed reduction order, token-recurrent KDA: rows do not depend on batch,
           // split or thread count
  kFast,   // chunked KDA on a grid anchored at absolute positions, plain MLA for long runs
};

/// Threads and scratch of one running forward pass. Not thread-safe: one Exec per concurrent pass.
struct Exec {
  explicit Exec(int threads, MathMode mode = MathMode::kExact) : pool(threads), math(mode) {}

  ThreadPool pool;
  Workspace ws;
  MathMode math;
};

/// In fast mode a run may be cut only at positions that are multiples of this many tokens.
constexpr std::int64_t kFastGrid = 64;

}  // namespace k3
