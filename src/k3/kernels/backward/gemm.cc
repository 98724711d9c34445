// Backward of products with weights, and of the loss on top of the last one.
#include <cmath>

#include "k3/kernels/backward/backward.h"
#include "k3/kernels/backward/grad_math_internal.h"
#include "k3/kernels/cpu/simd_table.h"

namespace k3::grad {

void Context::MulAdd(std::int64_t m, std::int64_t k, std::int64_t n, Strided<float> a,
                     const float* b, std::int64_t ldb, float* c, std::int64_t ldc) const {
  simd_.mul_add(m, k, n, a.data, a.row, a.col, b, ldb, c, ldc);
}

void Context::MulTransposed(std::int64_t m, std::int64_t k, std::int64_t n, const float* a,
                            std::int64_t lda, const float* b, float* c, std::int64_t ldc) const {
  simd_.dot_block(a, lda, m, b, k, n, k, c, ldc);
}

void Context::MulAdd(std::int64_t m, std::int64_t k, std::int64_t n, Strided<double> a,
                     const double* b, std::int64_t ldb, double* c, std::int64_t ldc) const {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t p = 0; p < k; ++p) {
      const double x = a.data[i * a.row + p * a.col];
      for (std::int64_t j = 0; j < n; ++j) c[i * ldc + j] += x * b[p * ldb + j];
    }
  }
}

void Context::MulTransposed(std::int64_t m, std::int64_t k, std::int64_t n, const double* a,
                            std::int64_t lda, const double* b, double* c, std::int64_t ldc) const {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (std::int64_t p = 0; p < k; ++p) sum += a[i * lda + p] * b[j * k + p];
      c[i * ldc + j] = sum;
    }
  }
}

template <class S>
void Gemm(const Context& ctx, const GemmArgs<S>& a) {
  const std::int64_t T = a.dy.dim(0), N = a.dy.dim(1), K = a.x.dim(1);
  const std::int64_t ldy = a.dy.strides[0];
  if (a.dx.data) {
    ctx.Split(T, N * K, [&](std::int64_t b, std::int64_t e) {
      ctx.MulAdd(e - b, N, K, Strided<S>{a.dy.row(b), ldy, 1}, a.w.data, a.w.strides[0],
                 a.dx.row(b), a.dx.strides[0]);
    });
  }
  if (a.dw.data) {
    ctx.Split(N, T * K, [&](std::int64_t b, std::int64_t e) {
      ctx.MulAdd(e - b, T, K, Strided<S>{a.dy.data + b, 1, ldy}, a.x.data, a.x.strides[0],
                 a.dw.row(b), a.dw.strides[0]);
    });
  }
}

template <class S>
double CrossEntropy(const Context& ctx, const CrossEntropyArgs<S>& a) {
  constexpr std::int64_t kChunk = 256;  // tokens whose scores exist at once
  const std::int64_t T = a.hidden.dim(0), V = a.head.dim(0), H = a.head.dim(1);
  std::vector<S> scores(static_cast<std::size_t>(std::min(T, kChunk) * V));
  std::vector<double> loss(static_cast<std::size_t>(std::min(T, kChunk)));
  double total = 0;
  for (std::int64_t begin = 0; begin < T; begin += kChunk) {
    const std::int64_t m = std::min(kChunk, T - begin);
    const View<S, 2> p(scores.data(), {m, V});
    ctx.Split(V, m * H, [&](std::int64_t b, std::int64_t e) {
      ctx.MulTransposed(m, H, e - b, a.hidden.row(begin), a.hidden.strides[0], a.head.row(b),
                        p.data + b, V);
    });
    ctx.ForEach(m, 10 * V, [&](std::int64_t i) {
      const TokenId target = a.targets[static_cast<std::size_t>(begin + i)];
      S* row = p.row(i);
      loss[static_cast<std::size_t>(i)] = 0;
      if (target < 0) return std::fill(row, row + V, S{0});
      S top = row[0];
      for (std::int64_t v = 1; v < V; ++v) top = std::max(top, row[v]);
      double sum = 0;
      const double own = row[target] - top;
      for (std::int64_t v = 0; v < V; ++v) sum += row[v] = std::exp(row[v] - top);
      loss[static_cast<std::size_t>(i)] = std::log(sum) - own;
      const S r = static_cast<S>(static_cast<double>(a.scale) / sum);
      for (std::int64_t v = 0; v < V; ++v) row[v] *= r;
      row[target] -= a.scale;
    });
    for (std::int64_t i = 0; i < m; ++i) {
      total += loss[static_cast<std::size_t>(i)];
      if (!a.losses.empty()) {
        a.losses[static_cast<std::size_t>(begin + i)] = loss[static_cast<std::size_t>(i)];
      }
    }
    GemmArgs<S> g;
    g.x = View<const S, 2>(a.hidden.row(begin), {m, H}, a.hidden.strides);
    g.w = a.head;
    g.dy = p;
    if (a.dhidden.data) g.dx = View<S, 2>(a.dhidden.row(begin), {m, H}, a.dhidden.strides);
    g.dw = a.dhead;
    Gemm(ctx, g);
  }
  return total;
}

K3_INSTANTIATE(Gemm);
template double CrossEntropy<float>(const Context&, const CrossEntropyArgs<float>&);
template double CrossEntropy<double>(const Context&, const CrossEntropyArgs<double>&);

}  // namespace k3::grad
