// What a forward pass runs on: arithmetic mode, threads, scratch memory.
#pragma once

#include <atomic>
#include <memory>

#include "k3/base/threads.h"
#include "k3/base/workspace.h"
#include "k3/kernels/backend.h"
#include "k3/kernels/math_mode.h"

namespace k3 {

/// Threads, ops and scratch of one running forward pass. Not thread-safe: one Exec for every pass
/// that runs at the same time. The processor's instruction set must have been accepted before
/// (cpu::ChooseTable); making an Exec with an impossible K3_ISA is a bug of the caller.
struct Exec {
  explicit Exec(int threads, MathMode mode = MathMode::kExact);  // throws as ThreadPool does
  /// On ops of the caller's, for tests.
  Exec(int threads, MathMode mode, std::unique_ptr<Backend> backend);

  ThreadPool pool;
  Workspace ws;
  MathMode math;  // may be changed between passes
  std::unique_ptr<Backend> ops;
  /// Looked at between layers when set: true ends a pass with kCancelled, its states are lost.
  const std::atomic<bool>* cancel = nullptr;

  bool cancelled() const { return cancel != nullptr && cancel->load(std::memory_order_relaxed); }
};

/// In fast mode a run may be cut only at positions that are multiples of this many tokens.
constexpr std::int64_t kFastGrid = 64;
/// Cells of KDA chunks in fast mode, in tokens; cells of MLA are kFastGrid long.
constexpr std::int64_t kKdaGrid = 16;
static_assert(kFastGrid % kKdaGrid == 0);

}  // namespace k3
