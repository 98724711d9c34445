// Latent attention. Both forms walk the cache page by page and keep a running maximum, so scores of
// a whole row never exist; pages lie at absolute positions, so a query's bits do not depend on the
// queries beside it.
#include "k3/kernels/cpu/softmax.h"

namespace k3::cpu {
namespace {

struct MlaTask {
  const MlaArgs& a;
  const MlaSequence& s;
  const SimdTable& simd;
  Workspace& ws;
  std::int64_t first, count;  // queries of this task

  const float* page(std::int64_t p) const { return s.pages[static_cast<std::size_t>(p)]; }
  const float* q(std::int64_t i, std::int64_t head) const {
    return a.q.row(s.begin + i) + head * a.q_dim();
  }
  float* o(std::int64_t i, std::int64_t head) const {
    return a.o.row(s.begin + i) + head * a.v_dim;
  }
  /// Rows query i may see: all up to its own.
  std::int64_t visible(std::int64_t i) const { return s.n_rows - s.count + i + 1; }
  std::int64_t pages() const {
    return (visible(first + count - 1) + a.page_rows - 1) / a.page_rows;
  }
  /// Rows of page p that exist.
  std::int64_t rows_of(std::int64_t p) const {
    return std::min(a.page_rows, s.n_rows - p * a.page_rows);
  }
  /// Rows of page p that query i may see.
  std::int64_t seen(std::int64_t p, std::int64_t i) const {
    return std::clamp<std::int64_t>(visible(i) - p * a.page_rows, 0, a.page_rows);
  }
};

/// Heads [head, head + n_heads) with their weights [nope + v, kv_rank], one after the other.
void Absorbed(const MlaTask& k, std::int64_t head, std::int64_t n_heads, const float* weights) {
  const MlaArgs& a = k.a;
  const std::int64_t R = a.kv_rank(), width = a.row_dim(), per_head = (a.nope_dim + a.v_dim) * R;
  const std::int64_t m = k.count * n_heads, ldq = a.q.strides[0], page_rows = a.page_rows;
  // Row h * count + i of everything below is query i of head h.
  float* key = k.ws.Alloc<float>(m * width);
  std::fill(key, key + m * width, 0.f);
  for (std::int64_t h = 0; h < n_heads; ++h) {
    float* to = key + h * k.count * width;
    k.simd.weighted_rows(k.q(k.first, head + h), ldq, k.count, weights + h * per_head, R,
                         a.nope_dim, R, to, width);
    for (std::int64_t i = 0; i < k.count; ++i) {
      std::copy_n(k.q(k.first + i, head + h) + a.nope_dim, a.rope_dim, to + i * width + R);
    }
  }
  RunningSoftmax softmax(k.simd, k.ws, m, R);
  float* p = k.ws.Alloc<float>(m * page_rows);
  for (std::int64_t page = 0; page < k.pages(); ++page) {
    const float* rows = k.page(page);
    k.simd.dot_block(key, width, m, rows, width, k.rows_of(page), width, p, page_rows);
    bool all = true;
    for (std::int64_t r = 0; r < m; ++r) {
      const std::int64_t seen = k.seen(page, k.first + r % k.count);
      all &= seen == page_rows;
      softmax.Weigh(r, p + r * page_rows, seen, a.scale);
    }
    if (all) {
      softmax.Add(0, m, p, page_rows, rows, width, page_rows);
    } else {
      for (std::int64_t r = 0; r < m; ++r) {
        softmax.Add(r, 1, p + r * page_rows, page_rows, rows, width,
                    k.seen(page, k.first + r % k.count));
      }
    }
  }
  softmax.Finish();
  for (std::int64_t h = 0; h < n_heads; ++h) {
    k.simd.dot_block(softmax.context(h * k.count), R, k.count,
                     weights + h * per_head + a.nope_dim * R, R, a.v_dim, R, k.o(k.first, head + h),
                     a.o.strides[0]);
  }
}

}  // namespace

/// All queries of a run with one head: keys and values of a page are expanded once for them.
void CpuBackend::MlaPlain(const MlaArgs& a, const MlaSequence& s, std::int64_t head,
                          Workspace& ws) {
  const MlaTask k{a, s, simd_, ws, 0, s.count};
  const std::int64_t dn = a.nope_dim, dv = a.v_dim, R = a.kv_rank(), page_rows = a.page_rows;
  const WeightRef w = a.kv_b.RowSlice(head * (dn + dv), dn + dv);
  float *expanded = ws.Alloc<float>(page_rows * (dn + dv)),
        *p = ws.Alloc<float>(s.count * page_rows), *rope = ws.Alloc<float>(s.count * page_rows);
  RunningSoftmax softmax(simd_, ws, s.count, dv);
  for (std::int64_t page = 0; page < k.pages(); ++page) {
    const std::int64_t rows = k.rows_of(page);
    Multiply(k.page(page), a.row_dim(), rows, w, expanded, dn + dv, ws);
    // Queries before `from` see nothing of this page.
    std::int64_t from = 0;
    while (k.seen(page, from) == 0) ++from;
    const std::int64_t m = s.count - from;
    simd_.dot_block(k.q(from, head), a.q.strides[0], m, expanded, dn + dv, rows, dn, p, page_rows);
    simd_.dot_block(k.q(from, head) + dn, a.q.strides[0], m, k.page(page) + R, a.row_dim(), rows,
                    a.rope_dim, rope, page_rows);
    std::int64_t full = m;  // the first query that sees all rows of the page, and those after it
    while (full > 0 && k.seen(page, from + full - 1) == page_rows) --full;
    for (std::int64_t i = 0; i < m; ++i) {
      float* pi = p + i * page_rows;
      simd_.add_scaled(pi, 1.f, rope + i * page_rows, rows, pi);
      softmax.Weigh(from + i, pi, k.seen(page, from + i), a.scale);
      if (i < full) {
        softmax.Add(from + i, 1, pi, page_rows, expanded + dn, dn + dv, k.seen(page, from + i));
      }
    }
    if (full < m) {
      softmax.Add(from + full, m - full, p + full * page_rows, page_rows, expanded + dn, dn + dv,
                  page_rows);
    }
  }
  softmax.Finish();
  for (std::int64_t i = 0; i < s.count; ++i) std::copy_n(softmax.context(i), dv, k.o(i, head));
}

void CpuBackend::Mla(const MlaArgs& a) {
  constexpr std::int64_t kBlock = 16;  // rows of queries and heads that share a page
  const std::int64_t N = a.n_heads, rows = a.nope_dim + a.v_dim;
  for (const MlaSequence& s : a.sequences) {
    if (s.count == 0) continue;
    if (a.form == MlaForm::kPlain) {
      pool_.ParallelFor(N, 1, [&](std::int64_t b, std::int64_t e) {
        for (std::int64_t head = b; head < e; ++head) {
          Workspace& ws = ThreadScratch();
          const Workspace::Mark mark(ws);
          MlaPlain(a, s, head, ws);
        }
      });
      continue;
    }
    const std::int64_t queries = std::min(kBlock, s.count),
                       blocks = (s.count + queries - 1) / queries;
    const std::int64_t share = (N + pool_.size() - 1) / pool_.size();
    const std::int64_t heads = std::max<std::int64_t>(1, std::min(kBlock / queries, share));
    const std::int64_t groups = (N + heads - 1) / heads;
    pool_.ParallelFor(groups * blocks, 1, [&](std::int64_t b, std::int64_t e) {
      for (std::int64_t i = b; i < e; ++i) {
        Workspace& ws = ThreadScratch();
        const Workspace::Mark mark(ws);
        const std::int64_t head = i / blocks * heads, first = i % blocks * queries;
        const std::int64_t n = std::min(heads, N - head);
        const float* weights = Rows(a.kv_b, head * rows, n * rows, ws);
        Absorbed({a, s, simd_, ws, first, std::min(queries, s.count - first)}, head, n, weights);
      }
    });
  }
}

}  // namespace k3::cpu
