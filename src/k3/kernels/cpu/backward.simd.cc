// Loops of the backward passes.
#include <cstddef>

#include "k3/kernels/cpu/simd_functions.h"
#include "k3/kernels/cpu/vec16.h"

namespace k3::cpu::K3_ISA {
namespace {

inline std::int64_t At(std::size_t i, std::int64_t stride) {
  return static_cast<std::int64_t>(i) * stride;
}

/// A tile of c, held in registers over a block of k.
template <std::size_t M, std::size_t W>
void MulAddTile(std::int64_t k, const float* a, std::int64_t row_a, std::int64_t col_a,
                const float* b, std::int64_t ldb, float* c, std::int64_t ldc, std::int64_t n) {
  auto lanes = [&](std::size_t w) { return n - At(w, kLanes); };
  Vec acc[M][W];
  for (std::size_t i = 0; i < M; ++i) {
    for (std::size_t w = 0; w < W; ++w) {
      acc[i][w] = LoadTail(c + At(i, ldc) + At(w, kLanes), lanes(w));
    }
  }
  for (std::int64_t p = 0; p < k; ++p) {
    Vec row[W];
    for (std::size_t w = 0; w < W; ++w) row[w] = LoadTail(b + p * ldb + At(w, kLanes), lanes(w));
    for (std::size_t i = 0; i < M; ++i) {
      const Vec x = Set(a[At(i, row_a) + p * col_a]);
      for (std::size_t w = 0; w < W; ++w) acc[i][w] = Fma(x, row[w], acc[i][w]);
    }
  }
  for (std::size_t i = 0; i < M; ++i) {
    for (std::size_t w = 0; w < W; ++w) {
      StoreTail(c + At(i, ldc) + At(w, kLanes), acc[i][w], lanes(w));
    }
  }
}

#if defined(__AVX512F__)
constexpr int kMulRows = 6, kMulVecs = 4;  // 24 accumulators
#elif defined(__AVX2__)
constexpr int kMulRows = 4, kMulVecs = 1;  // 8 registers
#else
constexpr int kMulRows = 1, kMulVecs = 1;
#endif

/// Columns [0, n) of c, n at most W vectors.
template <std::size_t W>
void MulAddColumns(std::int64_t m, std::int64_t k, std::int64_t n, const float* a,
                   std::int64_t row_a, std::int64_t col_a, const float* b, std::int64_t ldb,
                   float* c, std::int64_t ldc) {
  std::int64_t i = 0;
  for (; i + kMulRows <= m; i += kMulRows) {
    MulAddTile<kMulRows, W>(k, a + i * row_a, row_a, col_a, b, ldb, c + i * ldc, ldc, n);
  }
  for (; i < m; ++i) {
    MulAddTile<1, W>(k, a + i * row_a, row_a, col_a, b, ldb, c + i * ldc, ldc, n);
  }
}

/// MulAddColumns with as many vectors as n needs, at most W.
template <std::size_t W>
void LastColumns(std::int64_t m, std::int64_t k, std::int64_t n, const float* a, std::int64_t row_a,
                 std::int64_t col_a, const float* b, std::int64_t ldb, float* c, std::int64_t ldc) {
  if constexpr (W > 1) {
    if (n <= At(W - 1, kLanes)) {
      return LastColumns<W - 1>(m, k, n, a, row_a, col_a, b, ldb, c, ldc);
    }
  }
  MulAddColumns<W>(m, k, n, a, row_a, col_a, b, ldb, c, ldc);
}

struct KdaMath {
  static float Dot(const float* a, const float* b, std::int64_t n) {
    return cpu::K3_ISA::Dot(a, b, n);
  }
  static void Axpy(float a, const float* x, float* y, std::int64_t n) {
    cpu::K3_ISA::Axpy(a, x, y, n);
  }
};

}  // namespace

void MulAdd(std::int64_t m, std::int64_t k, std::int64_t n, const float* a, std::int64_t row_a,
            std::int64_t col_a, const float* b, std::int64_t ldb, float* c, std::int64_t ldc) {
  constexpr std::int64_t kDepth = 256;  // keeps the block of b near
  constexpr std::int64_t kWide = kMulVecs * kLanes;
  for (std::int64_t p = 0; p < k; p += kDepth) {
    const std::int64_t depth = k - p < kDepth ? k - p : kDepth;
    const float *ap = a + p * col_a, *bp = b + p * ldb;
    std::int64_t j = 0;
    for (; j + kWide <= n; j += kWide) {
      MulAddColumns<kMulVecs>(m, depth, kWide, ap, row_a, col_a, bp + j, ldb, c + j, ldc);
    }
    // What is left is narrower than kMulVecs vectors: as few passes over a as registers allow.
    const std::int64_t left = n - j;
    if (left > 0) {
      LastColumns<kMulVecs>(m, depth, left, ap, row_a, col_a, bp + j, ldb, c + j, ldc);
    }
  }
}

void KdaBackward(const grad::KdaHead<float>& h) { grad::KdaHeadBackward<float, KdaMath>(h); }

}  // namespace k3::cpu::K3_ISA
