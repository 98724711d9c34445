// The ops on CPU threads.
#pragma once

#include "k3/base/threads.h"
#include "k3/base/workspace.h"
#include "k3/kernels/backend.h"
#include "k3/kernels/cpu/simd_table.h"
#include "k3/kernels/math_mode.h"

namespace k3::cpu {

/// Uses `pool` and the loops of `simd`; both must outlive it. One op runs at a time. `mode`, when
/// given, is read by every op and must outlive the backend too; without it arithmetic is exact.
class CpuBackend : public Backend {
 public:
  CpuBackend(ThreadPool& pool, const SimdTable& simd, const MathMode* mode = nullptr)
      : pool_(pool), simd_(simd), mode_(mode) {}

#define K3_DECLARE_OP(name) void name(const name##Args& args) override;
  K3_FOR_EACH_OP(K3_DECLARE_OP)
#undef K3_DECLARE_OP
  void KdaRecurrent(const KdaArgs& args) override;
  void KdaChunk(const KdaArgs& args) override;

 private:
  /// fn(t) for every row; rows cost `work` elementary operations each.
  template <class F>
  void ForRows(std::int64_t n, std::int64_t work, F&& fn);

  /// Decodes rows [first, first + count) of w, or returns them where they are if already f32.
  const float* Rows(const WeightRef& w, std::int64_t first, std::int64_t count, Workspace& ws);

  /// Whether a product with w runs in bf16.
  bool Fast(const WeightRef& w) const;
  void FastGemm(const GemmArgs& a);
  /// y [m, w.rows] = x w^T on the calling thread, in the arithmetic of the mode.
  void Multiply(const float* x, std::int64_t ldx, std::int64_t m, const WeightRef& w, float* y,
                std::int64_t ldy, Workspace& ws);
  /// Its two halves where Fast(w): rows in the form that weights in w's format and width need.
  const std::byte* PackRows(const float* x, std::int64_t ldx, std::int64_t m, const WeightRef& w,
                            Workspace& ws);
  void MultiplyPacked(const std::byte* packed, std::int64_t m, const WeightRef& w, float* y,
                      std::int64_t ldy, Workspace& ws);
  void MlaPlain(const MlaArgs& a, const MlaSequence& s, std::int64_t head, Workspace& ws);
  void MlaPlainFast(const MlaArgs& a, const MlaSequence& s, std::int64_t head, Workspace& ws);

  ThreadPool& pool_;
  const SimdTable& simd_;
  const MathMode* mode_;
  Workspace ws_;  // for what must live across the threads of one op
};

/// Scratch of the calling thread, for use inside a parallel region.
Workspace& ThreadScratch();

}  // namespace k3::cpu
