// What a forward pass runs on: arithmetic mode, threads, scratch memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "k3/base/threads.h"
#include "k3/base/workspace.h"
#include "k3/kernels/backend.h"

namespace k3 {

/// docs/numerics.md states the contract of each.
enum class MathMode : std::uint8_t {
  kExact,  // f32, one fixed reduction order, token-recurrent KDA: rows do not depend on batch,
           // split or thread count
  kFast,   // chunked KDA on a grid anchored at absolute positions, plain MLA for long runs
};

/// Threads, ops and scratch of one running forward pass. Not thread-safe: one Exec for every pass
/// that runs at the same time. The processor's instruction set must have been accepted before
/// (cpu::ChooseTable); making an Exec with an impossible K3_ISA is a bug of the caller.
struct Exec {
  explicit Exec(int threads, MathMode mode = MathMode::kExact);  // throws as ThreadPool does
  /// On ops of the caller's, for tests.
  Exec(int threads, MathMode mode, std::unique_ptr<Backend> backend);

  ThreadPool pool;
  Workspace ws;
  MathMode math;
  std::unique_ptr<Backend> ops;
  /// Looked at between layers when set: true ends a pass with kCancelled, its states are lost.
  const std::atomic<bool>* cancel = nullptr;

  bool cancelled() const { return cancel != nullptr && cancel->load(std::memory_order_relaxed); }
};

/// In fast mode a run may be cut only at positions that are multiples of this many tokens.
constexpr std::int64_t kFastGrid = 64;

}  // namespace k3
