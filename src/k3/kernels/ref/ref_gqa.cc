// Reference of grouped-query attention and of the rotation: spec section 15.5, transcribed.
#include <cmath>

#include "k3/base/array.h"
#include "k3/kernels/backend.h"
#include "k3/kernels/ref/ref_math.h"

namespace k3 {

void ReferenceBackend::Gqa(const GqaArgs& a) {
  const std::int64_t D = a.head_dim(), G = a.n_kv_heads;
  for (const GqaSequence& s : a.sequences) {
    auto row = [&](std::span<const float* const> pages, std::int64_t j) {
      return pages[static_cast<std::size_t>(j / a.page_rows)] + j % a.page_rows * G * D;
    };
    for (std::int64_t i = 0; i < s.count; ++i) {
      for (std::int64_t h = 0; h < a.n_heads; ++h) {
        const std::int64_t n = s.n_rows - s.count + i + 1, kv = h * G / a.n_heads * D;
        Array<double> p(n), sum(D);
        for (std::int64_t j = 0; j < n; ++j) {
          double dot = 0;
          for (std::int64_t d = 0; d < D; ++d) {
            dot += static_cast<double>(a.q(s.begin + i, h * D + d)) * row(s.key_pages, j)[kv + d];
          }
          p[j] = dot / std::sqrt(static_cast<double>(D));
        }
        ref::Softmax(p);
        for (std::int64_t j = 0; j < n; ++j) {
          for (std::int64_t d = 0; d < D; ++d) sum[d] += p[j] * row(s.value_pages, j)[kv + d];
        }
        for (std::int64_t d = 0; d < D; ++d)
          a.o(s.begin + i, h * D + d) = static_cast<float>(sum[d]);
      }
    }
  }
}

void ReferenceBackend::Rope(const RopeArgs& a) {
  const std::int64_t half = a.head_dim / 2;
  for (std::int64_t t = 0; t < a.x.dim(0); ++t) {
    for (std::int64_t h = 0; h < a.x.dim(1); h += a.head_dim) {
      for (std::int64_t d = 0; d < half; ++d) {
        const double angle =
            static_cast<double>(a.positions[static_cast<std::size_t>(t)]) *
            std::pow(a.theta, -2.0 * static_cast<double>(d) / static_cast<double>(a.head_dim));
        float &x = a.x(t, h + d), &y = a.x(t, h + d + half);
        const double x0 = x, y0 = y;
        x = static_cast<float>(x0 * std::cos(angle) - y0 * std::sin(angle));
        y = static_cast<float>(y0 * std::cos(angle) + x0 * std::sin(angle));
      }
    }
  }
}

}  // namespace k3
