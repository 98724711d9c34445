// Softmax-weighted sums over pages of rows that come one after the other.
#pragma once

#include <algorithm>
#include <cmath>

#include "k3/kernels/cpu/cpu_internal.h"

namespace k3::cpu {

/// For each of m queries: the sum of exp(s - top) v over all rows so far, and that of exp(s - top).
/// A query's bits depend on its own scores and on how rows are cut into pages, on nothing else.
class RunningSoftmax {
 public:
  RunningSoftmax(const SimdTable& simd, Workspace& ws, std::int64_t m, std::int64_t width)
      : simd_(simd), m_(m), width_(width) {
    top_ = ws.Alloc<float>(m), context_ = ws.Alloc<float>(m * width);
    page_ = ws.Alloc<float>(m * width), total_ = ws.Alloc<double>(m);
    std::fill(top_, top_ + m, -HUGE_VALF);
    std::fill(total_, total_ + m, 0.0);
    std::fill(context_, context_ + m * width, 0.f);
  }

  /// Turns n scores of query r into weights relative to the new maximum of all its scores.
  void Weigh(std::int64_t r, float* s, std::int64_t n, float scale) {
    if (n == 0) return;
    simd_.scale(s, scale, n, s);
    const float top = std::max(top_[r], simd_.max(s, n));
    if (top > top_[r] && total_[r] > 0) {
      const double shrink = std::exp(static_cast<double>(top_[r]) - static_cast<double>(top));
      total_[r] *= shrink;
      simd_.scale(context(r), static_cast<float>(shrink), width_, context(r));
    }
    top_[r] = top;
    total_[r] += static_cast<double>(simd_.exp_sum(s, top, n, s));
  }

  /// Adds weights p [m, n_rows] times rows to queries [r, r + m).
  void Add(std::int64_t r, std::int64_t m, const float* p, std::int64_t ldp, const float* rows,
           std::int64_t ld, std::int64_t n_rows) {
    if (n_rows == 0) return;
    float* sum = page_ + r * width_;  // a page's own sum bounds the rounding
    std::fill(sum, sum + m * width_, 0.f);
    simd_.weighted_rows(p, ldp, m, rows, ld, n_rows, width_, sum, width_);
    simd_.add_scaled(context(r), 1.f, sum, m * width_, context(r));
  }

  /// Adds what `Add` would have summed up, for queries [r, r + m).
  void AddSum(std::int64_t r, std::int64_t m, const float* sum) {
    simd_.add_scaled(context(r), 1.f, sum, m * width_, context(r));
  }

  void Finish() {
    for (std::int64_t r = 0; r < m_; ++r) {
      simd_.scale(context(r), static_cast<float>(1.0 / total_[r]), width_, context(r));
    }
  }

  float* context(std::int64_t r) { return context_ + r * width_; }

 private:
  const SimdTable& simd_;
  std::int64_t m_, width_;
  float *top_, *context_, *page_;
  double* total_;
};

}  // namespace k3::cpu
