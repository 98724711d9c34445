// What a backward pass runs on: threads, the loops of an instruction set, and two matrix products.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "k3/base/threads.h"
#include "k3/tensor/dtype.h"
#include "k3/tensor/view.h"

namespace k3::cpu {
struct SimdTable;
}

namespace k3::grad {

/// A matrix operand read element by element: (i, j) is at data[i * row + j * col].
template <class S>
struct Strided {
  const S* data = nullptr;
  std::int64_t row = 0, col = 1;
};

/// Threads and loops; both must outlive it. float uses the table, double plain loops: gradient
/// checks run the same equations in float64. Results do not depend on the number of threads.
///
/// With round_bf16 the float operands of products with weight matrices are rounded to bf16 first,
/// all but the weights, which the caller has rounded; sums stay f32.
class Context {
 public:
  Context(ThreadPool& pool, const cpu::SimdTable& simd) : pool_(pool), simd_(simd) {}

  /// c[m, n] += a[m, k] b[k, n] on the calling thread; rows of b and c are ld apart.
  void MulAdd(std::int64_t m, std::int64_t k, std::int64_t n, Strided<float> a, const float* b,
              std::int64_t ldb, float* c, std::int64_t ldc) const;
  void MulAdd(std::int64_t m, std::int64_t k, std::int64_t n, Strided<double> a, const double* b,
              std::int64_t ldb, double* c, std::int64_t ldc) const;

  /// c[m, n] = a[m, k] b[n, k]^T on the calling thread; rows of b are dense.
  void MulTransposed(std::int64_t m, std::int64_t k, std::int64_t n, const float* a,
                     std::int64_t lda, const float* b, float* c, std::int64_t ldc) const;
  void MulTransposed(std::int64_t m, std::int64_t k, std::int64_t n, const double* a,
                     std::int64_t lda, const double* b, double* c, std::int64_t ldc) const;

  /// fn(begin, end) over [0, n), split among the threads; an item costs `work` operations.
  template <class F>
  void Split(std::int64_t n, std::int64_t work, F&& fn) const {
    constexpr std::int64_t kWorthAThread = 1 << 15;
    const std::int64_t even = (n + 4 * pool_.size() - 1) / (4 * pool_.size());
    const std::int64_t least = kWorthAThread / std::max<std::int64_t>(1, work);
    pool_.ParallelFor(n, std::max<std::int64_t>({1, even, least}), fn);
  }
  template <class F>
  void ForEach(std::int64_t n, std::int64_t work, F&& fn) const {
    Split(n, work, [&](std::int64_t b, std::int64_t e) {
      for (std::int64_t i = b; i < e; ++i) fn(i);
    });
  }

  /// fn(t, sums) for every row t < n, where `sums` has `width` entries to add to. All sums are then
  /// added to `out` in the order of fixed groups of rows, so threads do not change bits.
  template <class S, class F>
  void ReduceRows(std::int64_t n, std::int64_t width, std::int64_t work, S* out, F&& fn) const {
    constexpr std::int64_t kGroups = 32;
    const std::int64_t group = std::max<std::int64_t>(1, (n + kGroups - 1) / kGroups);
    const std::int64_t groups = (n + group - 1) / group;
    std::vector<S> sums(static_cast<std::size_t>(groups * width));
    ForEach(groups, group * work, [&](std::int64_t i) {
      for (std::int64_t t = i * group; t < std::min(n, (i + 1) * group); ++t) {
        fn(t, sums.data() + i * width);
      }
    });
    if (out == nullptr) return;
    for (std::int64_t i = 0; i < groups; ++i) {
      for (std::int64_t d = 0; d < width; ++d) {
        out[d] += sums[static_cast<std::size_t>(i * width + d)];
      }
    }
  }

  const cpu::SimdTable& simd() const { return simd_; }

  bool round_bf16 = false;

  /// In place, when round_bf16 says so.
  void Round(float* x, std::int64_t n) const {
    for (std::int64_t i = 0; round_bf16 && i < n; ++i) x[i] = RoundToBF16(x[i]);
  }
  void Round(double*, std::int64_t) const {}

  /// x itself, or its rounded copy in `home`.
  template <class S>
  View<const S, 2> Rounded(View<const S, 2> x, std::vector<S>& home) const {
    if (!round_bf16 || x.data == nullptr) return x;
    const std::int64_t rows = x.dim(0), cols = x.dim(1);
    home.resize(static_cast<std::size_t>(rows * cols));
    ForEach(rows, cols, [&](std::int64_t t) {
      std::copy_n(x.row(t), cols, home.data() + t * cols);
      Round(home.data() + t * cols, cols);
    });
    return View<const S, 2>(home.data(), {rows, cols});
  }

 private:
  ThreadPool& pool_;
  const cpu::SimdTable& simd_;
};

}  // namespace k3::grad
