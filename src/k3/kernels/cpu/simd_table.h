// The instruction-set dependent loops of the CPU backend: one table per instruction set.
// This header is included by *.simd.cc files, so it uses no standard library but <cstdint>.
#pragma once

#include <cstdint>

#include "k3/kernels/backward/kda_head.h"

namespace k3::cpu {

/// KDA of one head over T tokens (contract: KdaArgs). alpha = exp(g) for the recurrence; q is
/// scaled already. Row strides are in floats; q, k, g, alpha [T, K], v, o [T, V]; S [K, V].
struct KdaHead {
  std::int64_t T, K, V;
  const float *q, *k, *v, *alpha, *g, *beta;
  std::int64_t ld_q, ld_k, ld_v, ld_alpha, ld_g, ld_beta, ld_o;
  float* S;
  float* o;
};

/// Channels [begin, end) of a depthwise convolution and SiLU over one sequence (contract:
/// ShortConvArgs). history [k - 1, P] holds the rows before x.
struct ConvRun {
  const float* w;
  std::int64_t k, P, begin, end, count;
  const float *history, *x;
  float* y;
  std::int64_t ld_x, ld_y;
};

/// SiTU with caps (b2 = 0: u is not capped), or SwiGLU when situ is false.
struct ActParams {
  bool situ;
  float b1, b2;
};

enum class FastForm : std::uint8_t { kBf16, kMxfp4, kFp8, kInt8 };

/// Weight rows in the form a fast product reads. For kFp8, `scale_row` rows of the first block of
/// 128 lie before them, and a row of blocks has ceil(cols / 128) scales.
struct FastWeight {
  const std::uint8_t* data;
  const std::uint8_t* scales;
  FastForm form = FastForm::kBf16;
  std::int64_t scale_row = 0;
};

/// Products in bf16 with f32 sums (fast mode). A row of y has the same bits for every m and every
/// split of the weight rows. cols is a multiple of 32.
struct FastTable {
  /// Bytes of m rows of activations in the form `gemm` reads.
  std::int64_t (*packed_bytes)(std::int64_t m, std::int64_t cols);
  /// Rounds x to bf16, nearest even, for weights of the given form. `out` is 64-byte aligned.
  void (*pack)(const float* x, std::int64_t ldx, std::int64_t m, std::int64_t cols, FastForm form,
               void* out);
  /// Rounds to dense bf16 rows, ld_out elements apart: the form of a FastWeight.
  void (*round)(const float* x, std::int64_t ldx, std::int64_t m, std::int64_t cols,
                std::uint8_t* out, std::int64_t ld_out);
  /// Scratch bytes `gemm` needs, 64-byte aligned.
  std::int64_t (*scratch_bytes)(std::int64_t m, std::int64_t cols);
  /// y[i * ldy + r] = x_i . w_r for i < m, r < rows.
  void (*gemm)(const void* packed, std::int64_t m, FastWeight w, std::int64_t rows,
               std::int64_t cols, float* y, std::int64_t ldy, void* scratch);

  /// The same for few rows of x, packed in a way of its own: up to gemv_rows of them, 0 where gemm
  /// does one as fast. Null functions where that is so for every form.
  std::int64_t (*gemv_rows)(FastForm form);
  std::int64_t (*gemv_bytes)(std::int64_t m, std::int64_t cols);
  void (*gemv_pack)(const float* x, std::int64_t ldx, std::int64_t m, std::int64_t cols,
                    FastForm form, void* out);
  void (*gemv)(const void* packed, std::int64_t m, FastWeight w, std::int64_t rows,
               std::int64_t cols, float* y, std::int64_t ldy);

  /// Chunks of 16 tokens with bounded decay; T a multiple of 16, K <= 256 and V multiples of 32.
  /// Null where nothing beats kda_chunk.
  void (*kda_chunks)(const KdaHead& head);
};

/// Every function but those of `fast` is exact-mode arithmetic: f32 with correctly rounded
/// operations in a fixed order, so that all tables give the same bits (docs/numerics.md).
struct SimdTable {
  const char* name;

  /// sum_i a[i] b[i]: lane l of 16 sums i = l (mod 16) in order; lanes are then added pairwise,
  /// l with l + 8, + 4, + 2, + 1. This is DotOrder.
  float (*dot)(const float* a, const float* b, std::int64_t n);

  /// y[i * ldy + r] = dot(x + i * ldx, w + r * ldw, n) for i < m, r < rows.
  void (*dot_block)(const float* x, std::int64_t ldx, std::int64_t m, const float* w,
                    std::int64_t ldw, std::int64_t rows, std::int64_t n, float* y,
                    std::int64_t ldy);
  /// The same from dense rows of n stored as bf16 or MXFP4, decoded in registers: for few x.
  void (*dot_block_bf16)(const float* x, std::int64_t ldx, std::int64_t m, const void* w,
                         std::int64_t rows, std::int64_t n, float* y, std::int64_t ldy);
  void (*dot_block_mxfp4)(const float* x, std::int64_t ldx, std::int64_t m,
                          const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t rows,
                          std::int64_t n, float* y, std::int64_t ldy);

  /// The same from e4m3 codes with the f32 scales of WeightFormat::kFp8, and from signed bytes with
  /// the bf16 scales of kInt8 (n a multiple of 32).
  void (*dot_block_fp8)(const float* x, std::int64_t ldx, std::int64_t m, const std::uint8_t* codes,
                        const std::uint8_t* scales, std::int64_t scale_row, std::int64_t rows,
                        std::int64_t n, float* y, std::int64_t ldy);
  void (*dot_block_int8)(const float* x, std::int64_t ldx, std::int64_t m,
                         const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t rows,
                         std::int64_t n, float* y, std::int64_t ldy);

  /// y[i] += a x[i], fused.
  void (*axpy)(float a, const float* x, float* y, std::int64_t n);
  /// y[i, c] += sum_j p[i, j] rows[j, c] for i < m, c < n, fused, j in order from y.
  void (*weighted_rows)(const float* p, std::int64_t ldp, std::int64_t m, const float* rows,
                        std::int64_t ld, std::int64_t n_rows, std::int64_t n, float* y,
                        std::int64_t ldy);

  /// The same for one row of p and bf16 rows.
  void (*weighted_rows_bf16)(const float* p, const void* rows, std::int64_t ld, std::int64_t n_rows,
                             std::int64_t n, float* y);

  /// Decodes n elements (n a multiple of 32 for mxfp4 and int8) to f32.
  void (*decode_bf16)(const void* src, std::int64_t n, float* out);
  void (*decode_mxfp4)(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t n,
                       float* out);
  void (*decode_int8)(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t n,
                      float* out);
  void (*decode_fp8)(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t scale_row,
                     std::int64_t rows, std::int64_t cols, float* out);

  /// Elementwise over n; y may be any input.
  void (*exp)(const float* x, std::int64_t n, float* y);  // x <= 88
  void (*sigmoid)(const float* x, std::int64_t n, float* y);
  void (*silu)(const float* x, std::int64_t n, float* y);
  void (*tanh)(const float* x, std::int64_t n, float* y);
  void (*mul_sigmoid)(const float* x, const float* gate, std::int64_t n, float* y);
  void (*scale)(const float* x, float r, std::int64_t n, float* y);
  void (*scale_mul)(const float* x, float r, const float* w, std::int64_t n, float* y);
  void (*scale_mul_sigmoid)(const float* x, float r, const float* w, const float* gate,
                            std::int64_t n, float* y);
  void (*add_scaled)(const float* x, float alpha, const float* y, std::int64_t n, float* out);
  void (*gated_act)(const float* gate, const float* up, std::int64_t n, const ActParams& act,
                    float* y);
  /// bounded: g = bound sigmoid(rate (f + bias)); else g = -rate softplus(f + bias).
  void (*kda_gate)(const float* f, const float* bias, float rate, bool bounded, float bound,
                   std::int64_t n, float* g);
  /// p[j] = exp(s[j] - top); returns their sum in DotOrder. p may be s.
  float (*exp_sum)(const float* s, float top, std::int64_t n, float* p);
  float (*max)(const float* x, std::int64_t n);  // n >= 1

  void (*short_conv)(const ConvRun& run);
  void (*kda_recurrent)(const KdaHead& head);
  /// The chunkwise form: T <= 16 tokens, K <= 256. `bounded` promises that g summed over the chunk
  /// stays above -85, so that decays may be taken apart into factors.
  void (*kda_chunk)(const KdaHead& head, bool bounded);

  /// c[i * ldc + j] += sum_p a[i * row_a + p * col_a] b[p * ldb + j], i < m, p < k, j < n: fused, p
  /// in order within blocks that do not depend on m or n. For backward passes.
  void (*mul_add)(std::int64_t m, std::int64_t k, std::int64_t n, const float* a,
                  std::int64_t row_a, std::int64_t col_a, const float* b, std::int64_t ldb,
                  float* c, std::int64_t ldc);
  void (*kda_backward)(const grad::KdaHead<float>& head);

  /// Products in bf16; null where the instruction set has none.
  const FastTable* fast;
};

constexpr std::int64_t kMaxKdaKey = 256, kMaxKdaChunk = 16;  // of kda_chunk

namespace scalar {
const SimdTable* Table();
}
namespace avx2 {
const SimdTable* Table();
}
namespace avx512 {
const SimdTable* Table();
}
namespace avx512bf16 {
const SimdTable* Table();
}
namespace neon {
const SimdTable* Table();
}
namespace amx {
const SimdTable* Table();
}

}  // namespace k3::cpu
