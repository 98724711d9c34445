// Backward of products with weights.
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
void Gemm(const Context& ctx, const GemmArgs<S>& args) {
  std::vector<S> x_home, dy_home;
  GemmArgs<S> a = args;
  if (!a.keep_f32) a.x = ctx.Rounded(a.x, x_home), a.dy = ctx.Rounded(a.dy, dy_home);
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

K3_INSTANTIATE(Gemm);

}  // namespace k3::grad
