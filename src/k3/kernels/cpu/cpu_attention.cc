// KDA recurrence and chunks, latent attention.
#include <cstring>

#include "k3/kernels/cpu/cpu_internal.h"

namespace k3::cpu {

void CpuBackend::KdaGate(const KdaGateArgs& a) {
  const auto N = a.a_log.dim(0), K = a.f.dim(1) / N;
  ForRows(a.f.dim(0), 20 * N * K, [&](std::int64_t t) {
    for (std::int64_t c = 0; c < N * K; ++c) {
      const double z = static_cast<double>(a.f(t, c)) + a.dt_bias.data[c];
      const double e = std::exp(static_cast<double>(a.a_log.data[c / K]));
      const double softplus = std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z)));
      a.g(t, c) =
          static_cast<float>(a.lower_bound ? *a.lower_bound * cpu::Sigmoid(e * z) : -e * softplus);
    }
  });
}

void CpuBackend::KdaRecurrent(const KdaArgs& a) {
  const std::int64_t N = a.n_heads, K = a.key_dim(), V = a.value_dim();
  const auto S = static_cast<std::int64_t>(a.sequences.size());
  pool_.ParallelFor(S * N, 1, [&](std::int64_t b, std::int64_t e) {
    for (std::int64_t i = b; i < e; ++i) {
      const std::int64_t n = i % N;
      const auto [begin, count] = a.sequences[static_cast<std::size_t>(i / N)];
      if (count == 0) continue;
      Workspace& ws = ThreadScratch();
      const Workspace::Mark mark(ws);
      float* alpha = ws.Alloc<float>(count * K);
      for (std::int64_t t = 0; t < count; ++t) {
        const float* g = a.g.row(begin + t) + n * K;
        for (std::int64_t d = 0; d < K; ++d) alpha[t * K + d] = Exp(g[d]);
      }
      SimdTable::KdaHead h{};
      h.T = count, h.K = K, h.V = V;
      h.q = a.q.row(begin) + n * K, h.ld_q = a.q.strides[0];
      h.k = a.k.row(begin) + n * K, h.ld_k = a.k.strides[0];
      h.v = a.v.row(begin) + n * V, h.ld_v = a.v.strides[0];
      h.alpha = alpha, h.ld_alpha = K;
      h.beta = a.beta.row(begin) + n, h.ld_beta = a.beta.strides[0];
      h.o = a.o.row(begin) + n * V, h.ld_o = a.o.strides[0];
      h.scale = a.scale;
      h.S = a.states[static_cast<std::size_t>(i / N)] + n * K * V;
      simd_.kda_recurrent(h);
    }
  });
}

namespace {

/// Largest -G for which exp(-G) times a unit key stays inside f32.
constexpr float kFactorLimit = 85.f;

/// One chunk of one head: C tokens whose rows start at row t (spec section 6.1).
void KdaChunkHead(const KdaArgs& a, const SimdTable& simd, std::int64_t t, std::int64_t C,
                  std::int64_t n, float* S) {
  const std::int64_t K = a.key_dim(), V = a.value_dim();
  Workspace& ws = ThreadScratch();
  const Workspace::Mark mark(ws);
  float *G = ws.Alloc<float>(C * K), *kd = ws.Alloc<float>(C * K), *qd = ws.Alloc<float>(C * K),
        *ki = ws.Alloc<float>(C * K), *U = ws.Alloc<float>(C * V), *A = ws.Alloc<float>(C * C),
        *B = ws.Alloc<float>(C * C), *pair = ws.Alloc<float>(K);
  auto q = [&](std::int64_t i) { return a.q.row(t + i) + n * K; };
  auto k = [&](std::int64_t i) { return a.k.row(t + i) + n * K; };
  auto beta = [&](std::int64_t i) { return a.beta(t + i, n); };
  for (std::int64_t i = 0; i < C; ++i) {
    const float* g = a.g.row(t + i) + n * K;
    for (std::int64_t d = 0; d < K; ++d) {
      const float sum = g[d] + (i > 0 ? G[(i - 1) * K + d] : 0.f);
      G[i * K + d] = sum;
      kd[i * K + d] = k(i)[d] * Exp(sum);
      qd[i * K + d] = q(i)[d] * a.scale * Exp(sum);
    }
  }
  // A bounded decay keeps exp(-G) finite over the chunk: scores are then one dense product.
  const bool factored = a.lower_bound && -*a.lower_bound * static_cast<float>(C) <= kFactorLimit;
  for (std::int64_t i = 0; factored && i < C * K; ++i) ki[i] = k(i / K)[i % K] * Exp(-G[i]);
  for (std::int64_t i = 0; i < C; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) {
      if (factored) {
        A[i * C + j] = simd.dot(kd + i * K, ki + j * K, K);
        B[i * C + j] = simd.dot(qd + i * K, ki + j * K, K);
        continue;
      }
      for (std::int64_t d = 0; d < K; ++d) pair[d] = k(j)[d] * Exp(G[i * K + d] - G[j * K + d]);
      A[i * C + j] = simd.dot(k(i), pair, K);
      B[i * C + j] = a.scale * simd.dot(q(i), pair, K);
    }
  }
  for (std::int64_t i = 0; i < C;
       ++i) {  // U = (I + diag(beta) tril(A, -1))^-1 diag(beta) (V - Kd S)
    float *u = U + i * V, *o = a.o.row(t + i) + n * V;
    std::copy_n(a.v.row(t + i) + n * V, V, u);
    std::fill(o, o + V, 0.f);
    for (std::int64_t d = 0; d < K; ++d) {
      simd.axpy(-kd[i * K + d], S + d * V, u, V);
      simd.axpy(qd[i * K + d], S + d * V, o, V);
    }
    for (std::int64_t j = 0; j < i; ++j) simd.axpy(-A[i * C + j], U + j * V, u, V);
    for (std::int64_t d = 0; d < V; ++d) u[d] *= beta(i);
    for (std::int64_t j = 0; j <= i; ++j) simd.axpy(B[i * C + j], U + j * V, o, V);
  }
  const float* last = G + (C - 1) * K;
  for (std::int64_t d = 0; d < K; ++d) {
    float* s = S + d * V;
    const float decay = Exp(last[d]);
    for (std::int64_t c = 0; c < V; ++c) s[c] *= decay;
    for (std::int64_t i = 0; i < C; ++i) {
      simd.axpy(k(i)[d] * Exp(last[d] - G[i * K + d]), U + i * V, s, V);
    }
  }
}

}  // namespace

void CpuBackend::KdaChunk(const KdaArgs& a) {
  const auto S = static_cast<std::int64_t>(a.sequences.size());
  const std::int64_t N = a.n_heads, size = a.key_dim() * a.value_dim();
  pool_.ParallelFor(S * N, 1, [&](std::int64_t b, std::int64_t e) {
    for (std::int64_t i = b; i < e; ++i) {
      const auto [begin, count] = a.sequences[static_cast<std::size_t>(i / N)];
      float* state = a.states[static_cast<std::size_t>(i / N)] + i % N * size;
      for (std::int64_t t = 0; t < count; t += a.chunk) {
        KdaChunkHead(a, simd_, begin + t, std::min(a.chunk, count - t), i % N, state);
      }
    }
  });
}

namespace {

/// One head of one sequence's queries [first, first + count).
struct MlaTask {
  const MlaArgs& a;
  const MlaSequence& s;
  const SimdTable& simd;
  std::int64_t head, first, count;
  const float* w;  // [nope + v, kv_rank] of this head, decoded

  const float* row(std::int64_t j) const {
    return s.pages[static_cast<std::size_t>(j / a.page_rows)] + j % a.page_rows * a.row_dim();
  }
  const float* q(std::int64_t i) const { return a.q.row(s.begin + i) + head * a.q_dim(); }
  float* o(std::int64_t i) const { return a.o.row(s.begin + i) + head * a.v_dim; }
  /// Rows query i may see: all up to its own.
  std::int64_t visible(std::int64_t i) const { return s.n_rows - s.count + i + 1; }

  void Absorbed() const;
  void Plain() const;
};

void MlaTask::Absorbed() const {
  const std::int64_t R = a.kv_rank(), width = a.row_dim();
  Workspace& ws = ThreadScratch();
  float *key = ws.Alloc<float>(width), *p = ws.Alloc<float>(s.n_rows),
        *context = ws.Alloc<float>(R), *page_sum = ws.Alloc<float>(R);
  for (std::int64_t i = first; i < first + count; ++i) {
    std::fill(key, key + R, 0.f);
    for (std::int64_t d = 0; d < a.nope_dim; ++d) simd.axpy(q(i)[d], w + d * R, key, R);
    std::copy_n(q(i) + a.nope_dim, a.rope_dim, key + R);
    const std::int64_t n = visible(i);
    for (std::int64_t j = 0; j < n; ++j) p[j] = simd.dot(key, row(j), width) * a.scale;
    SoftmaxInPlace(p, n);
    std::fill(context, context + R, 0.f);
    for (std::int64_t page = 0; page < n; page += a.page_rows) {  // partial sums bound the rounding
      std::fill(page_sum, page_sum + R, 0.f);
      for (std::int64_t j = page; j < std::min(n, page + a.page_rows); ++j) {
        simd.axpy(p[j], row(j), page_sum, R);
      }
      for (std::int64_t r = 0; r < R; ++r) context[r] += page_sum[r];
    }
    simd.dot_block(context, R, 1, w + a.nope_dim * R, a.v_dim, R, o(i), a.v_dim);
  }
}

void MlaTask::Plain() const {
  const std::int64_t R = a.kv_rank(), n_max = visible(first + count - 1), dn = a.nope_dim;
  Workspace& ws = ThreadScratch();
  float *keys = ws.Alloc<float>(n_max * dn), *values = ws.Alloc<float>(n_max * a.v_dim),
        *p = ws.Alloc<float>(n_max);
  for (std::int64_t j = 0; j < n_max; j += a.page_rows) {
    const std::int64_t m = std::min(a.page_rows, n_max - j);
    simd.dot_block(row(j), a.row_dim(), m, w, dn, R, keys + j * dn, dn);
    simd.dot_block(row(j), a.row_dim(), m, w + dn * R, a.v_dim, R, values + j * a.v_dim, a.v_dim);
  }
  for (std::int64_t i = first; i < first + count; ++i) {
    const std::int64_t n = visible(i);
    for (std::int64_t j = 0; j < n; ++j) {
      p[j] = (simd.dot(q(i), keys + j * dn, dn) + simd.dot(q(i) + dn, row(j) + R, a.rope_dim)) *
             a.scale;
    }
    SoftmaxInPlace(p, n);
    std::fill(o(i), o(i) + a.v_dim, 0.f);
    for (std::int64_t j = 0; j < n; ++j) simd.axpy(p[j], values + j * a.v_dim, o(i), a.v_dim);
  }
}

}  // namespace

void CpuBackend::Mla(const MlaArgs& a) {
  // Absorbed queries are independent, so long runs are cut for the threads; a plain run shares its
  // expanded keys and stays whole.
  constexpr std::int64_t kBlock = 64;
  for (const MlaSequence& s : a.sequences) {
    if (s.count == 0) continue;
    const std::int64_t block = a.form == MlaForm::kPlain ? s.count : kBlock;
    const std::int64_t blocks = (s.count + block - 1) / block;
    pool_.ParallelFor(a.n_heads * blocks, 1, [&](std::int64_t b, std::int64_t e) {
      for (std::int64_t i = b; i < e; ++i) {
        Workspace& ws = ThreadScratch();
        const Workspace::Mark mark(ws);
        const std::int64_t head = i / blocks, first = i % blocks * block;
        const std::int64_t rows = a.nope_dim + a.v_dim;
        const MlaTask task{a,
                           s,
                           simd_,
                           head,
                           first,
                           std::min(block, s.count - first),
                           Rows(a.kv_b, head * rows, rows, ws)};
        if (a.form == MlaForm::kPlain) {
          task.Plain();
        } else {
          task.Absorbed();
        }
      }
    });
  }
}

}  // namespace k3::cpu
