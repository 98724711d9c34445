// The instruction-set dependent loops of the CPU backend: one table per instruction set.
// This header is included by *.simd.cc files, so it uses no standard library but <cstdint>.
#pragma once

#include <cstdint>

#include "k3/kernels/backward/kda_head.h"

namespace k3::cpu {

/// Every function is exact-mode arithmetic: f32 with fused multiply-add and a fixed order, so that
/// all tables give the same bits (docs/numerics.md).
struct SimdTable {
  const char* name;

  /// sum_i a[i] b[i]: lane l of 16 sums i = l (mod 16) in order; lanes are then added pairwise,
  /// l with l + 8, + 4, + 2, + 1. This is DotOrder.
  float (*dot)(const float* a, const float* b, std::int64_t n);

  /// y[i * ldy + r] = dot(x + i * ldx, w + r * n, n) for i < m, r < rows.
  void (*dot_block)(const float* x, std::int64_t ldx, std::int64_t m, const float* w,
                    std::int64_t rows, std::int64_t n, float* y, std::int64_t ldy);

  /// y[i] += a x[i], fused.
  void (*axpy)(float a, const float* x, float* y, std::int64_t n);

  /// Decodes n elements (n a multiple of 32 for mxfp4) to f32.
  void (*decode_bf16)(const void* src, std::int64_t n, float* out);
  void (*decode_mxfp4)(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t n,
                       float* out);

  /// KDA recurrence of one head over T tokens (contract: KdaArgs). alpha = exp(g). Row strides
  /// are in floats; q, k, alpha [T, K], v, o [T, V]; S [K, V].
  struct KdaHead {
    std::int64_t T, K, V;
    const float *q, *k, *v, *alpha, *beta;
    std::int64_t ld_q, ld_k, ld_v, ld_alpha, ld_beta, ld_o;
    float scale;
    float* S;
    float* o;
  };
  void (*kda_recurrent)(const KdaHead& head);

  /// c[i * ldc + j] += sum_p a[i * row_a + p * col_a] b[p * ldb + j], i < m, p < k, j < n: fused, p
  /// in order within blocks that do not depend on m or n. For backward passes.
  void (*mul_add)(std::int64_t m, std::int64_t k, std::int64_t n, const float* a,
                  std::int64_t row_a, std::int64_t col_a, const float* b, std::int64_t ldb,
                  float* c, std::int64_t ldc);

  void (*kda_backward)(const grad::KdaHead<float>& head);
};

namespace scalar {
const SimdTable* Table();
}
namespace avx2 {
const SimdTable* Table();
}
namespace avx512 {
const SimdTable* Table();
}

}  // namespace k3::cpu
