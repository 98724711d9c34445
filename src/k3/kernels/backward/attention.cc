// Backward of softmax attention: latent rows and grouped heads.
#include <cmath>

#include "k3/kernels/backward/backward.h"
#include "k3/kernels/backward/grad_math_internal.h"

namespace k3::grad {
namespace {

/// One head: o_i = softmax(scale q_i . [k_j | e_j]) v_j over j <= first + i.
/// Every matrix has a row stride; e is an optional second part of the keys (nope and rope parts lie
/// in different places). d* are added to.
template <class S>
struct Head {
  std::int64_t count = 0, n_rows = 0;  // queries; keys, the last `count` being the queries' own
  std::int64_t dk = 0, de = 0, dv = 0;
  S scale = 1;
  const S *q = nullptr, *k = nullptr, *e = nullptr, *v = nullptr, *dout = nullptr;
  S *dq = nullptr, *dkeys = nullptr, *dextra = nullptr, *dvalues = nullptr;
  std::int64_t ldq = 0, ldk = 0, lde = 0, ldv = 0, ldo = 0, lddq = 0;
};

/// out[cols, rows] = in[rows, cols]^T, dense.
template <class S>
void Transpose(const S* in, std::int64_t ld, std::int64_t rows, std::int64_t cols, S* out) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) out[j * rows + i] = in[i * ld + j];
  }
}

template <class S>
void HeadBackward(const Context& ctx, const Head<S>& h) {
  constexpr std::int64_t kBlock = 128;  // queries whose weights exist at once
  const std::int64_t n = h.n_rows;
  std::vector<S> kt(static_cast<std::size_t>(h.dk * n)), et(static_cast<std::size_t>(h.de * n)),
      vt(static_cast<std::size_t>(h.dv * n));
  Transpose(h.k, h.ldk, n, h.dk, kt.data());
  if (h.de > 0) Transpose(h.e, h.lde, n, h.de, et.data());
  Transpose(h.v, h.ldv, n, h.dv, vt.data());
  std::vector<S> p_rows(static_cast<std::size_t>(kBlock * n)), dp_rows(p_rows.size());
  for (std::int64_t begin = 0; begin < h.count; begin += kBlock) {
    const std::int64_t m = std::min(kBlock, h.count - begin);
    const std::int64_t last = n - h.count + begin + m;  // keys that any of them sees
    std::fill(p_rows.begin(), p_rows.end(), S{0});
    std::fill(dp_rows.begin(), dp_rows.end(), S{0});
    S *p = p_rows.data(), *dp = dp_rows.data();
    const S *q = h.q + begin * h.ldq, *dout = h.dout + begin * h.ldo;
    ctx.MulAdd(m, h.dk, last, Strided<S>{q, h.ldq, 1}, kt.data(), n, p, n);
    if (h.de > 0) ctx.MulAdd(m, h.de, last, Strided<S>{q + h.dk, h.ldq, 1}, et.data(), n, p, n);
    ctx.MulAdd(m, h.dv, last, Strided<S>{dout, h.ldo, 1}, vt.data(), n, dp, n);
    for (std::int64_t i = 0; i < m; ++i) {
      const std::int64_t seen = n - h.count + begin + i + 1;
      S *row = p + i * n, *drow = dp + i * n, dot = 0;
      for (std::int64_t j = 0; j < seen; ++j) row[j] *= h.scale;
      Softmax(row, seen);
      for (std::int64_t j = 0; j < seen; ++j) dot += row[j] * drow[j];
      for (std::int64_t j = 0; j < seen; ++j) drow[j] = row[j] * (drow[j] - dot) * h.scale;
      std::fill(row + seen, row + n, S{0}), std::fill(drow + seen, drow + n, S{0});
    }
    S* dq = h.dq + begin * h.lddq;
    ctx.MulAdd(m, last, h.dk, Strided<S>{dp, n, 1}, h.k, h.ldk, dq, h.lddq);
    ctx.MulAdd(last, m, h.dk, Strided<S>{dp, 1, n}, q, h.ldq, h.dkeys, h.ldk);
    ctx.MulAdd(last, m, h.dv, Strided<S>{p, 1, n}, dout, h.ldo, h.dvalues, h.ldv);
    if (h.de == 0) continue;
    ctx.MulAdd(m, last, h.de, Strided<S>{dp, n, 1}, h.e, h.lde, dq + h.dk, h.lddq);
    ctx.MulAdd(last, m, h.de, Strided<S>{dp, 1, n}, q + h.dk, h.ldq, h.dextra, h.de);
  }
}

/// Rows in pages, gathered into one dense matrix.
template <class S>
std::vector<S> Gather(std::span<const S* const> pages, std::int64_t page_rows, std::int64_t n,
                      std::int64_t width) {
  std::vector<S> rows(static_cast<std::size_t>(n * width));
  for (std::int64_t j = 0; j < n; j += page_rows) {
    std::copy_n(pages[static_cast<std::size_t>(j / page_rows)], std::min(page_rows, n - j) * width,
                rows.data() + j * width);
  }
  return rows;
}
template <class S>
void ScatterAdd(const S* rows, std::int64_t page_rows, std::int64_t n, std::int64_t width,
                std::span<S* const> pages) {
  for (std::int64_t i = 0; i < n * width; ++i) {
    const std::int64_t page = i / (page_rows * width);
    pages[static_cast<std::size_t>(page)][i % (page_rows * width)] += rows[i];
  }
}

/// Keys and values expanded from the rows, and what flows back into them.
template <class S>
struct MlaScratch {
  std::vector<S> rows, kv, dkv, dextra;  // dextra [N, n, rope]: one part a head, summed in order
};

template <class S>
void MlaHead(const Context& ctx, const MlaArgs<S>& a, const PagedSequence<S>& s, MlaScratch<S>& m,
             std::int64_t i) {
  const std::int64_t R = a.kv_b.dim(1), width = a.nope_dim + a.v_dim, ld = a.n_heads * width;
  const std::int64_t q_dim = a.nope_dim + a.rope_dim;
  Head<S> h;
  h.count = s.count, h.n_rows = s.n_rows, h.scale = a.scale;
  h.dk = a.nope_dim, h.de = a.rope_dim, h.dv = a.v_dim;
  h.q = a.q.row(s.begin) + i * q_dim, h.ldq = a.q.strides[0];
  h.dq = a.dq.row(s.begin) + i * q_dim, h.lddq = a.dq.strides[0];
  h.k = m.kv.data() + i * width, h.v = h.k + a.nope_dim, h.ldk = h.ldv = ld;
  h.dkeys = m.dkv.data() + i * width, h.dvalues = h.dkeys + a.nope_dim;
  h.e = m.rows.data() + R, h.lde = R + a.rope_dim;
  h.dextra = m.dextra.data() + i * s.n_rows * a.rope_dim;
  h.dout = a.dout.row(s.begin) + i * a.v_dim, h.ldo = a.dout.strides[0];
  HeadBackward(ctx, h);
}

}  // namespace

template <class S>
void Mla(const Context& ctx, const MlaArgs<S>& a) {
  const std::int64_t R = a.kv_b.dim(1), N = a.n_heads, E = a.rope_dim, row = R + E;
  const std::int64_t wide = N * (a.nope_dim + a.v_dim);
  std::vector<MlaScratch<S>> scratch(a.sequences.size());
  for (std::size_t i = 0; i < scratch.size(); ++i) {
    MlaScratch<S>& m = scratch[i];
    const std::int64_t n = a.sequences[i].n_rows;
    m.rows = Gather(a.sequences[i].pages, a.page_rows, n, row);
    m.kv.resize(static_cast<std::size_t>(n * wide)), m.dkv.resize(m.kv.size());
    m.dextra.resize(static_cast<std::size_t>(N * n * E));
    ctx.Split(n, wide * R, [&](std::int64_t b, std::int64_t e) {
      ctx.MulTransposed(e - b, R, wide, m.rows.data() + b * row, row, a.kv_b.data,
                        m.kv.data() + b * wide, wide);
    });
  }
  ctx.ForEach(static_cast<std::int64_t>(scratch.size()) * N, 1 << 15, [&](std::int64_t i) {
    const auto s = static_cast<std::size_t>(i / N);
    if (a.sequences[s].count > 0) MlaHead(ctx, a, a.sequences[s], scratch[s], i % N);
  });
  for (std::size_t i = 0; i < scratch.size(); ++i) {
    const std::int64_t n = a.sequences[i].n_rows;
    MlaScratch<S>& m = scratch[i];
    GemmArgs<S> g;
    std::vector<S> drows(m.rows.size());
    g.x = View<const S, 2>(m.rows.data(), {n, R}, {row, 1});
    g.dx = View<S, 2>(drows.data(), {n, R}, {row, 1});
    g.w = a.kv_b, g.dw = a.dkv_b;
    g.dy = View<const S, 2>(m.dkv.data(), {n, wide});
    Gemm(ctx, g);
    for (std::int64_t h = 0; h < N; ++h) {
      for (std::int64_t j = 0; j < n * E; ++j) {
        drows[static_cast<std::size_t>(j / E * row + R + j % E)] +=
            m.dextra[static_cast<std::size_t>(h * n * E + j)];
      }
    }
    ScatterAdd(drows.data(), a.page_rows, n, row, a.sequences[i].dpages);
  }
}

template <class S>
void Gqa(const Context& ctx, const GqaArgs<S>& a) {
  const std::int64_t N = a.n_heads, G = a.n_kv_heads, D = a.q.dim(1) / N, width = G * D;
  for (const PagedSequence<S>& s : a.sequences) {
    if (s.count == 0) continue;
    const auto keys = Gather(s.pages, a.page_rows, s.n_rows, width);
    const auto values = Gather(s.value_pages, a.page_rows, s.n_rows, width);
    std::vector<S> dkeys(keys.size()), dvalues(values.size());
    // Query heads of one group add to the same keys: a group is one task.
    ctx.ForEach(G, 1 << 15, [&](std::int64_t g) {
      for (std::int64_t n = g * N / G; n < (g + 1) * N / G; ++n) {
        Head<S> h;
        h.count = s.count, h.n_rows = s.n_rows, h.dk = h.dv = D;
        h.scale = S{1} / std::sqrt(static_cast<S>(D));
        h.q = a.q.row(s.begin) + n * D, h.ldq = a.q.strides[0];
        h.dq = a.dq.row(s.begin) + n * D, h.lddq = a.dq.strides[0];
        h.k = keys.data() + g * D, h.v = values.data() + g * D, h.ldk = h.ldv = width;
        h.dkeys = dkeys.data() + g * D, h.dvalues = dvalues.data() + g * D;
        h.dout = a.dout.row(s.begin) + n * D, h.ldo = a.dout.strides[0];
        HeadBackward(ctx, h);
      }
    });
    ScatterAdd(dkeys.data(), a.page_rows, s.n_rows, width, s.dpages);
    ScatterAdd(dvalues.data(), a.page_rows, s.n_rows, width, s.dvalue_pages);
  }
}

K3_INSTANTIATE(Mla);
K3_INSTANTIATE(Gqa);

}  // namespace k3::grad
