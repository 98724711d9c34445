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

/// Heads [head, head + n_heads) with their weights [nope + v, kv_rank], one after the other; null
/// when they are to be read as stored, in bf16.
void Absorbed(const MlaTask& k, std::int64_t head, std::int64_t n_heads, const float* weights) {
  const MlaArgs& a = k.a;
  const std::int64_t R = a.kv_rank(), width = a.row_dim(), per_head = (a.nope_dim + a.v_dim) * R;
  const std::int64_t m = k.count * n_heads, ldq = a.q.strides[0], page_rows = a.page_rows;
  // Row h * count + i of everything below is query i of head h.
  float* key = k.ws.Alloc<float>(m * width);
  std::fill(key, key + m * width, 0.f);
  for (std::int64_t h = 0; h < n_heads; ++h) {
    float* to = key + h * k.count * width;
    if (weights != nullptr) {
      k.simd.weighted_rows(k.q(k.first, head + h), ldq, k.count, weights + h * per_head, R,
                           a.nope_dim, R, to, width);
    }
    const WeightRef w = a.kv_b.RowSlice((head + h) * (a.nope_dim + a.v_dim), a.nope_dim);
    for (std::int64_t i = 0; i < k.count; ++i) {
      if (weights == nullptr) {
        k.simd.weighted_rows_bf16(k.q(k.first + i, head + h), w.data, R, a.nope_dim, R,
                                  to + i * width);
      }
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
    float *context = softmax.context(h * k.count), *o = k.o(k.first, head + h);
    if (weights != nullptr) {
      k.simd.dot_block(context, R, k.count, weights + h * per_head + a.nope_dim * R, R, a.v_dim, R,
                       o, a.o.strides[0]);
    } else {
      const std::int64_t row = (head + h) * (a.nope_dim + a.v_dim) + a.nope_dim;
      k.simd.dot_block_bf16(context, R, k.count, a.kv_b.RowSlice(row, a.v_dim).data, a.v_dim, R, o,
                            a.o.strides[0]);
    }
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

namespace {

/// A product of one thread in bf16, its operands in the forms FastTable wants.
struct FastScratch {
  const FastTable& fast;
  Workspace& ws;

  std::byte* Pack(const float* x, std::int64_t ldx, std::int64_t m, std::int64_t cols) const {
    auto* out = ws.Alloc<std::byte>(fast.packed_bytes(m, cols));
    fast.pack(x, ldx, m, cols, FastForm::kBf16, out);
    return out;
  }
  void Multiply(const std::byte* packed, std::int64_t m, const void* w, std::int64_t rows,
                std::int64_t cols, float* y, std::int64_t ldy) const {
    const Workspace::Mark mark(ws);
    fast.gemm(packed, m, {static_cast<const std::uint8_t*>(w), nullptr}, rows, cols, y, ldy,
              ws.Alloc<std::byte>(fast.scratch_bytes(m, cols)));
  }
};

}  // namespace

/// As MlaPlain with every product in bf16: keys and transposed values of a page play the weights.
void CpuBackend::MlaPlainFast(const MlaArgs& a, const MlaSequence& s, std::int64_t head,
                              Workspace& ws) {
  const MlaTask k{a, s, simd_, ws, 0, s.count};
  const FastScratch mul{*simd_.fast, ws};
  const std::int64_t dn = a.nope_dim, dv = a.v_dim, R = a.kv_rank(), dq = a.q_dim();
  const std::int64_t rows = a.page_rows, m = s.count;
  const WeightRef w_uk = a.kv_b.RowSlice(head * (dn + dv), dn);
  const WeightRef w_uv = a.kv_b.RowSlice(head * (dn + dv) + dn, dv);
  const std::byte* q = mul.Pack(k.q(0, head), a.q.strides[0], m, dq);
  const std::byte* uv = mul.Pack(Rows(w_uv, 0, dv, ws), R, dv, R);
  auto *latent = ws.Alloc<std::uint8_t>(2 * rows * R),
       *keys = ws.Alloc<std::uint8_t>(2 * rows * dq),
       *values = ws.Alloc<std::uint8_t>(2 * dv * rows);
  float *expanded = ws.Alloc<float>(rows * std::max(dn, dv)), *p = ws.Alloc<float>(m * rows),
        *sum = ws.Alloc<float>(m * dv);
  RunningSoftmax softmax(simd_, ws, m, dv);
  for (std::int64_t page = 0; page < k.pages(); ++page) {
    const Workspace::Mark mark(ws);
    const std::int64_t n = k.rows_of(page);
    const float* c = k.page(page);
    mul.Multiply(mul.Pack(c, a.row_dim(), n, R), n, w_uk.data, dn, R, expanded, dn);
    simd_.fast->round(expanded, dn, n, dn, keys, dq);
    simd_.fast->round(c + R, a.row_dim(), n, a.rope_dim, keys + 2 * dn, dq);
    simd_.fast->round(c, a.row_dim(), n, R, latent, R);
    std::fill(expanded, expanded + dv * rows, 0.f);  // columns of rows that do not exist
    mul.Multiply(uv, dv, latent, n, R, expanded, rows);
    simd_.fast->round(expanded, rows, dv, rows, values, rows);
    std::int64_t from = 0;  // blocks of 64 queries that see something of this page
    while (k.seen(page, std::min(from + 63, m - 1)) == 0) from += 64;
    mul.Multiply(q + simd_.fast->packed_bytes(from, dq), m - from, keys, n, dq, p, rows);
    for (std::int64_t i = from; i < m; ++i) {
      float* pi = p + (i - from) * rows;
      const std::int64_t seen = k.seen(page, i);
      softmax.Weigh(i, pi, seen, a.scale);
      std::fill(pi + seen, pi + rows, 0.f);
    }
    mul.Multiply(mul.Pack(p, rows, m - from, rows), m - from, values, dv, rows, sum, dv);
    softmax.AddSum(from, m - from, sum);
  }
  softmax.Finish();
  for (std::int64_t i = 0; i < m; ++i) std::copy_n(softmax.context(i), dv, k.o(i, head));
}

void CpuBackend::Mla(const MlaArgs& a) {
  constexpr std::int64_t kBlock = 16;  // rows of queries and heads that share a page
  const std::int64_t N = a.n_heads, rows = a.nope_dim + a.v_dim;
  for (const MlaSequence& s : a.sequences) {
    if (s.count == 0) continue;
    const bool fast = Fast(a.kv_b) && a.kv_b.format == WeightFormat::kBF16 && a.q_dim() % 32 == 0 &&
                      a.nope_dim % 32 == 0 && a.rope_dim % 32 == 0 && a.page_rows % 32 == 0;
    if (a.form == MlaForm::kPlain) {
      pool_.ParallelFor(N, 1, [&](std::int64_t b, std::int64_t e) {
        for (std::int64_t head = b; head < e; ++head) {
          Workspace& ws = ThreadScratch();
          const Workspace::Mark mark(ws);
          if (fast) {
            MlaPlainFast(a, s, head, ws);
          } else {
            MlaPlain(a, s, head, ws);
          }
        }
      });
      continue;
    }
    const std::int64_t queries = std::min(kBlock, s.count),
                       blocks = (s.count + queries - 1) / queries;
    const std::int64_t share = (N + pool_.size() - 1) / pool_.size();
    // Weights that must be decoded are, one head at a time: the plan counts no more.
    const bool as_stored = a.kv_b.format == WeightFormat::kF32 ||
                           (queries <= 4 && a.kv_b.format == WeightFormat::kBF16);
    const std::int64_t heads =
        as_stored ? std::max<std::int64_t>(1, std::min(kBlock / queries, share)) : 1;
    const std::int64_t groups = (N + heads - 1) / heads;
    pool_.ParallelFor(groups * blocks, 1, [&](std::int64_t b, std::int64_t e) {
      for (std::int64_t i = b; i < e; ++i) {
        Workspace& ws = ThreadScratch();
        const Workspace::Mark mark(ws);
        const std::int64_t head = i / blocks * heads, first = i % blocks * queries;
        const std::int64_t n = std::min(heads, N - head);
        const bool in_place = queries <= 4 && a.kv_b.format == WeightFormat::kBF16;
        const float* weights = in_place ? nullptr : Rows(a.kv_b, head * rows, n * rows, ws);
        Absorbed({a, s, simd_, ws, first, std::min(queries, s.count - first)}, head, n, weights);
      }
    });
  }
}

}  // namespace k3::cpu
