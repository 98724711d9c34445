// Grouped-query attention and rotary positions.
#include "k3/kernels/cpu/softmax.h"

namespace k3::cpu {

void CpuBackend::Gqa(const GqaArgs& a) {
  const std::int64_t D = a.head_dim(), G = a.n_kv_heads, N = a.n_heads, per_key = N / G;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(D)));
  for (const GqaSequence& s : a.sequences) {
    auto row = [&](std::span<const float* const> pages, std::int64_t j) {
      return pages[static_cast<std::size_t>(j / a.page_rows)] + j % a.page_rows * G * D;
    };
    pool_.ParallelFor(s.count * N, 1, [&](std::int64_t b, std::int64_t e) {
      Workspace& ws = ThreadScratch();
      const Workspace::Mark mark(ws);
      float* p = ws.Alloc<float>(a.page_rows);
      for (std::int64_t task = b; task < e; ++task) {
        const Workspace::Mark task_mark(ws);
        const std::int64_t i = task / N, h = task % N, kv = h / per_key * D;
        const std::int64_t n = s.n_rows - s.count + i + 1;
        const float* q = a.q.row(s.begin + i) + h * D;
        RunningSoftmax softmax(simd_, ws, 1, D);
        for (std::int64_t page = 0; page < n; page += a.page_rows) {
          const std::int64_t rows = std::min(a.page_rows, n - page);
          simd_.dot_block(q, D, 1, row(s.key_pages, page) + kv, G * D, rows, D, p, rows);
          softmax.Weigh(0, p, rows, scale);
          softmax.Add(0, 1, p, rows, row(s.value_pages, page) + kv, G * D, rows);
        }
        softmax.Finish();
        std::copy_n(softmax.context(0), D, a.o.row(s.begin + i) + h * D);
      }
    });
  }
}

void CpuBackend::Rope(const RopeArgs& a) {
  const std::int64_t half = a.head_dim / 2;
  const Workspace::Mark mark(ws_);
  double* frequency = ws_.Alloc<double>(half);
  for (std::int64_t d = 0; d < half; ++d) {
    frequency[d] =
        std::pow(a.theta, -2.0 * static_cast<double>(d) / static_cast<double>(a.head_dim));
  }
  ForRows(a.x.dim(0), 20 * a.x.dim(1), [&](std::int64_t t) {
    const auto position = static_cast<double>(a.positions[static_cast<std::size_t>(t)]);
    for (std::int64_t d = 0; d < half; ++d) {
      const double c = std::cos(position * frequency[d]), s = std::sin(position * frequency[d]);
      for (float* x = a.x.row(t) + d; x < a.x.row(t) + a.x.dim(1); x += a.head_dim) {
        const double x0 = x[0], y0 = x[half];
        x[0] = static_cast<float>(x0 * c - y0 * s);
        x[half] = static_cast<float>(y0 * c + x0 * s);
      }
    }
  });
}

}  // namespace k3::cpu
