// Exact-mode loops, compiled once per instruction set. No standard library beyond fixed-width
// integers: a helper compiled with AVX-512 flags must not become the program's only copy.
#include <cstddef>
#include <cstdint>

#include "k3/kernels/cpu/simd_table.h"
#include "k3/kernels/cpu/vec16.h"

namespace k3::cpu::K3_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileX = 4, kTileW = 4;  // 16 accumulators, 8 operands of 32 registers
#elif defined(__AVX2__)
constexpr int kTileX = 2, kTileW = 2;  // 4 accumulators of 2 registers each
#else
constexpr int kTileX = 1, kTileW = 1;
#endif

/// Tile indices are unsigned, addresses signed.
inline std::int64_t At(std::size_t i, std::int64_t stride) {
  return static_cast<std::int64_t>(i) * stride;
}

/// MX by MW dot products at once; each has its own accumulator, so the tile does not change bits.
template <std::size_t MX, std::size_t MW>
void DotTile(const float* x, std::int64_t ldx, const float* w, std::int64_t n, float* y,
             std::int64_t ldy) {
  Vec acc[MX][MW];
  for (auto& row : acc) {
    for (auto& a : row) a = Zero();
  }
  auto step = [&](std::int64_t k, auto load) {
    Vec b[MW];
    for (std::size_t r = 0; r < MW; ++r) b[r] = load(w + At(r, n) + k);
    for (std::size_t i = 0; i < MX; ++i) {
      const Vec a = load(x + At(i, ldx) + k);
      for (std::size_t r = 0; r < MW; ++r) acc[i][r] = Fma(a, b[r], acc[i][r]);
    }
  };
  std::int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) step(k, [](const float* p) { return Load(p); });
  if (k < n) step(k, [&](const float* p) { return LoadN(p, n - k); });
  for (std::size_t i = 0; i < MX; ++i) {
    for (std::size_t r = 0; r < MW; ++r) y[At(i, ldy) + At(r, 1)] = Sum(acc[i][r]);
  }
}

float Dot(const float* a, const float* b, std::int64_t n) {
  float y;
  DotTile<1, 1>(a, 0, b, n, &y, 0);
  return y;
}

void DotBlock(const float* x, std::int64_t ldx, std::int64_t m, const float* w, std::int64_t rows,
              std::int64_t n, float* y, std::int64_t ldy) {
  std::int64_t r = 0;
  for (; r + kTileW <= rows; r += kTileW) {
    std::int64_t i = 0;
    for (; i + kTileX <= m; i += kTileX) {
      DotTile<kTileX, kTileW>(x + i * ldx, ldx, w + r * n, n, y + i * ldy + r, ldy);
    }
    for (; i < m; ++i) DotTile<1, kTileW>(x + i * ldx, ldx, w + r * n, n, y + i * ldy + r, ldy);
  }
  for (; r < rows; ++r) {
    for (std::int64_t i = 0; i < m; ++i) {
      DotTile<1, 1>(x + i * ldx, ldx, w + r * n, n, y + i * ldy + r, ldy);
    }
  }
}

void Axpy(float a, const float* x, float* y, std::int64_t n) {
  const Vec va = Set(a);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    StoreTail(y + i, Fma(va, LoadTail(x + i, n - i), LoadTail(y + i, n - i)), n - i);
  }
}

void DecodeBf16(const void* src, std::int64_t n, float* out) {
  const auto* s = static_cast<const unsigned char*>(src);
  for (std::int64_t i = 0; i < n; ++i) {  // byte loads: checkpoint data may be unaligned
    const std::uint32_t bits =
        (std::uint32_t{s[2 * i]} << 16) | (std::uint32_t{s[2 * i + 1]} << 24);
    __builtin_memcpy(out + i, &bits, 4);
  }
}

constexpr float kCode[16] = {0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                             -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

void DecodeMxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t n,
                 float* out) {
  for (std::int64_t b = 0; b < n / 32; ++b) {
    // 2^(e - 127); e = 0 is subnormal, 255 was refused by the loader.
    const std::uint32_t bits = scales[b] == 0 ? 0x00400000u : std::uint32_t{scales[b]} << 23;
    float scale;
    __builtin_memcpy(&scale, &bits, 4);
    float value[16];
    for (int c = 0; c < 16; ++c) value[c] = kCode[c] * scale;
    for (std::int64_t i = 0; i < 16; ++i) {
      const std::uint8_t byte = codes[16 * b + i];
      out[32 * b + 2 * i] = value[byte & 15];
      out[32 * b + 2 * i + 1] = value[byte >> 4];
    }
  }
}

/// Columns [c, c + 16 * W) of the state, over all tokens: they never meet other columns.
template <std::size_t W>
void KdaColumns(const SimdTable::KdaHead& h, std::int64_t c, std::int64_t width) {
  auto lanes = [&](std::size_t w) { return width - At(w, kLanes); };
  for (std::int64_t t = 0; t < h.T; ++t) {
    const float *q = h.q + t * h.ld_q, *k = h.k + t * h.ld_k, *alpha = h.alpha + t * h.ld_alpha;
    Vec u[W], o[W];
    for (std::size_t w = 0; w < W; ++w) {
      u[w] = LoadTail(h.v + t * h.ld_v + c + At(w, kLanes), lanes(w));
      o[w] = Zero();
    }
    for (std::int64_t d = 0; d < h.K; ++d) {
      float* s = h.S + d * h.V + c;
      const Vec decay = Set(alpha[d]), key = Set(k[d]);
      for (std::size_t w = 0; w < W; ++w) {
        const Vec x = Mul(LoadTail(s + At(w, kLanes), lanes(w)), decay);
        StoreTail(s + At(w, kLanes), x, lanes(w));
        u[w] = Fnma(x, key, u[w]);
      }
    }
    const Vec beta = Set(h.beta[t * h.ld_beta]);
    for (std::size_t w = 0; w < W; ++w) u[w] = Mul(u[w], beta);
    for (std::int64_t d = 0; d < h.K; ++d) {
      float* s = h.S + d * h.V + c;
      const Vec key = Set(k[d]), query = Set(q[d] * h.scale);
      for (std::size_t w = 0; w < W; ++w) {
        const Vec x = Fma(key, u[w], LoadTail(s + At(w, kLanes), lanes(w)));
        StoreTail(s + At(w, kLanes), x, lanes(w));
        o[w] = Fma(x, query, o[w]);
      }
    }
    for (std::size_t w = 0; w < W; ++w)
      StoreTail(h.o + t * h.ld_o + c + At(w, kLanes), o[w], lanes(w));
  }
}

void KdaRecurrent(const SimdTable::KdaHead& h) {
  std::int64_t c = 0;
  for (; c + 4 * kLanes <= h.V; c += 4 * kLanes) KdaColumns<4>(h, c, 4 * kLanes);
  for (; c < h.V; c += kLanes) KdaColumns<1>(h, c, h.V - c < kLanes ? h.V - c : kLanes);
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
    for (; j < n; j += kLanes) {
      const std::int64_t width = n - j < kLanes ? n - j : kLanes;
      MulAddColumns<1>(m, depth, width, ap, row_a, col_a, bp + j, ldb, c + j, ldc);
    }
  }
}

struct KdaMath {
  static float Dot(const float* a, const float* b, std::int64_t n) {
    return cpu::K3_ISA::Dot(a, b, n);
  }
  static void Axpy(float a, const float* x, float* y, std::int64_t n) {
    cpu::K3_ISA::Axpy(a, x, y, n);
  }
};

void KdaBackward(const grad::KdaHead<float>& h) { grad::KdaHeadBackward<float, KdaMath>(h); }

#define K3_STRING_(x) #x
#define K3_STRING(x) K3_STRING_(x)

constexpr SimdTable kTable{K3_STRING(K3_ISA), Dot,          DotBlock, Axpy,       DecodeBf16,
                           DecodeMxfp4,       KdaRecurrent, MulAdd,   KdaBackward};

}  // namespace

const SimdTable* Table() { return &kTable; }

}  // namespace k3::cpu::K3_ISA
