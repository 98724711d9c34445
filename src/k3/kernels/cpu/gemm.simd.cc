// Products in exact-mode arithmetic: DotOrder, whatever the tile or the storage of the weights.
#include <cstddef>

#include "k3/kernels/cpu/simd_functions.h"
#include "k3/kernels/cpu/vec16.h"
#include "k3/kernels/cpu/vec16_bytes.h"

namespace k3::cpu::K3_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileX = 4, kTileW = 4;  // 16 accumulators, 8 operands of 32 registers
#elif defined(__AVX2__)
constexpr int kTileX = 2, kTileW = 2;  // 4 accumulators of 2 registers each
#else
constexpr int kTileX = 1, kTileW = 1;
#endif

/// How far weights that are read once are fetched ahead, in rows. Rows are short for the
/// processor's own prefetcher: it starts anew in each, and reached half of the memory's rate.
constexpr std::int64_t kAheadRows = 8;

/// Tile indices are unsigned, addresses signed.
inline std::int64_t At(std::size_t i, std::int64_t stride) {
  return static_cast<std::int64_t>(i) * stride;
}

/// MX by MW sums to y. Element (i, r) is the DotOrder sum of acc[r][i].
template <std::size_t MX, std::size_t MW>
inline void StoreSums(const Vec (&acc)[MW][MX], float* y, std::int64_t ldy) {
#if defined(__AVX512F__)
  if constexpr (MX == 4 && MW == 4) {
    const __m512 s = Sum16(&acc[0][0]).v;
    _mm_storeu_ps(y, _mm512_castps512_ps128(s));
    _mm_storeu_ps(y + ldy, _mm512_extractf32x4_ps(s, 1));
    _mm_storeu_ps(y + 2 * ldy, _mm512_extractf32x4_ps(s, 2));
    _mm_storeu_ps(y + 3 * ldy, _mm512_extractf32x4_ps(s, 3));
    return;
  }
#endif
  for (std::size_t i = 0; i < MX; ++i) {
    for (std::size_t r = 0; r < MW; ++r) y[At(i, ldy) + At(r, 1)] = Sum(acc[r][i]);
  }
}

/// MX by MW dot products at once; each has its own accumulator, so the tile does not change bits.
template <std::size_t MX, std::size_t MW>
inline void DotTile(const float* x, std::int64_t ldx, const float* w, std::int64_t ldw,
                    std::int64_t n, float* y, std::int64_t ldy) {
  Vec acc[MW][MX];
  for (auto& row : acc) {
    for (auto& a : row) a = Zero();
  }
  auto step = [&](std::int64_t k, auto load) {
    Vec a[MX];
    for (std::size_t i = 0; i < MX; ++i) a[i] = load(x + At(i, ldx) + k);
    for (std::size_t r = 0; r < MW; ++r) {
      const Vec b = load(w + At(r, ldw) + k);
      for (std::size_t i = 0; i < MX; ++i) acc[r][i] = Fma(a[i], b, acc[r][i]);
    }
  };
  std::int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) step(k, [](const float* p) { return Load(p); });
  if (k < n) step(k, [&](const float* p) { return LoadN(p, n - k); });
  StoreSums<MX, MW>(acc, y, ldy);
}

/// The same with bf16 weight rows of n elements.
template <std::size_t MX, std::size_t MW>
inline void DotTileBf16(const float* x, std::int64_t ldx, const std::uint8_t* w, std::int64_t n,
                        float* y, std::int64_t ldy) {
  Vec acc[MW][MX];
  for (auto& row : acc) {
    for (auto& a : row) a = Zero();
  }
  std::int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    Vec a[MX];
    for (std::size_t i = 0; i < MX; ++i) a[i] = Load(x + At(i, ldx) + k);
    for (std::size_t r = 0; r < MW; ++r) {
      const Vec b = LoadBf16(w + 2 * (At(r, n) + k));
      if (k % 32 == 0) __builtin_prefetch(w + 2 * (At(r, n) + k) + 2 * kAheadRows * n);
      for (std::size_t i = 0; i < MX; ++i) acc[r][i] = Fma(a[i], b, acc[r][i]);
    }
  }
  for (std::size_t r = 0; k < n && r < MW; ++r) {
    const Vec b = LoadBf16N(w + 2 * (At(r, n) + k), n - k);
    for (std::size_t i = 0; i < MX; ++i) {
      acc[r][i] = Fma(LoadN(x + At(i, ldx) + k, n - k), b, acc[r][i]);
    }
  }
  StoreSums<MX, MW>(acc, y, ldy);
}

/// 2^(e - 127); e = 0 is subnormal, 255 was refused by the loader.
inline float E8m0(std::uint8_t e) {
  const std::uint32_t bits = e == 0 ? 0x00400000u : std::uint32_t{e} << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, 4);
  return scale;
}

/// The scales of up to 16 blocks.
inline void ReadE8m0(const std::uint8_t* scales, std::int64_t n, float* to) {
#if defined(__AVX512F__)
  const __m128i bytes = n < 16 ? _mm_maskz_loadu_epi8(FirstN(n), scales)
                               : _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
  const __m512i e = _mm512_cvtepu8_epi32(bytes);
  const __mmask16 zero = _mm512_testn_epi32_mask(e, e);
  _mm512_storeu_si512(
      to, _mm512_mask_mov_epi32(_mm512_slli_epi32(e, 23), zero, _mm512_set1_epi32(0x00400000)));
#else
  for (std::int64_t j = 0; j < n; ++j) to[j] = E8m0(scales[j]);
#endif
}

// With AVX-512 all vectors of a tile have their lanes turned until the end.
#if defined(__AVX512F__)
inline Vec Mx4(const std::uint8_t* p, const Mx4Table& t) { return LoadMx4Turned(p, t); }
#else
inline Vec Mx4(const std::uint8_t* p, const Mx4Table& t) { return LoadMx4(p, t); }
inline Vec Turn(Vec a) { return a; }
inline Vec TurnBack(Vec a) { return a; }
#endif

template <std::size_t MX, std::size_t MW>
inline void DotTileMxfp4(const float* x, std::int64_t ldx, const std::uint8_t* codes,
                         const std::uint8_t* scales, std::int64_t n, float* y, std::int64_t ldy) {
  Vec acc[MW][MX];
  for (auto& row : acc) {
    for (auto& a : row) a = Zero();
  }
  constexpr std::int64_t kBlocks = 16;  // scales decoded together
  alignas(64) float scale[MW][kBlocks];
  for (std::int64_t k0 = 0; k0 < n; k0 += 32 * kBlocks) {
    const std::int64_t blocks = (n - k0) / 32 < kBlocks ? (n - k0) / 32 : kBlocks;
    for (std::size_t r = 0; r < MW; ++r) {
      ReadE8m0(scales + At(r, n / 32) + k0 / 32, blocks, scale[r]);
    }
    for (std::int64_t j = 0; j < blocks; ++j) {
      const std::int64_t k = k0 + 32 * j;
      Vec a[2][MX];
      for (std::size_t i = 0; i < MX; ++i) {
        a[0][i] = Turn(Load(x + At(i, ldx) + k));
        a[1][i] = Turn(Load(x + At(i, ldx) + k + kLanes));
      }
      for (std::size_t r = 0; r < MW; ++r) {
        const Mx4Table table = MakeMx4Table(scale[r][j]);
        const std::uint8_t* c = codes + At(r, n / 2) + k / 2;
        if (j % 4 == 0) __builtin_prefetch(c + kAheadRows * n / 2);
        const Vec b0 = Mx4(c, table), b1 = Mx4(c + 8, table);
        for (std::size_t i = 0; i < MX; ++i) {
          acc[r][i] = Fma(a[1][i], b1, Fma(a[0][i], b0, acc[r][i]));
        }
      }
    }
  }
  for (auto& row : acc) {
    for (auto& a : row) a = TurnBack(a);
  }
  StoreSums<MX, MW>(acc, y, ldy);
}

/// Rows of one-byte codes. Block gives 32 columns of row r from column k on, Tail the n < 32 that
/// are left at the end of a row.
struct Int8Rows {
  const std::uint8_t *codes, *scales;
  std::int64_t n;

  inline void Block(std::int64_t r, std::int64_t k, Vec* b) const {
    const Vec scale = Set(Bf16At(scales + 2 * ((r * n + k) / 32)));
    const std::uint8_t* p = codes + r * n + k;
    b[0] = Mul(LoadI8(p), scale);
    b[1] = Mul(LoadI8(p + kLanes), scale);
  }
  inline Vec Tail(std::int64_t, std::int64_t, std::int64_t) const { return Zero(); }
};

struct Fp8Rows {
  const std::uint8_t *codes, *scales;
  std::int64_t n, scale_row;

  inline Vec Scale(std::int64_t r, std::int64_t k) const {
    float scale;
    __builtin_memcpy(&scale, scales + 4 * ((scale_row + r) / 128 * ((n + 127) / 128) + k / 128), 4);
    return Set(scale);
  }
  inline void Block(std::int64_t r, std::int64_t k, Vec* b) const {
    const Vec scale = Scale(r, k);
    const std::uint8_t* p = codes + r * n + k;
    b[0] = Mul(LoadE4m3(p), scale);
    b[1] = Mul(LoadE4m3(p + kLanes), scale);
  }
  inline Vec Tail(std::int64_t r, std::int64_t k, std::int64_t left) const {
    return Mul(LoadE4m3N(codes + r * n + k, left), Scale(r, k));
  }
};

template <std::size_t MX, std::size_t MW, class Rows>
inline void DotTileBytes(const float* x, std::int64_t ldx, const Rows& w, std::int64_t row,
                         float* y, std::int64_t ldy) {
  Vec acc[MW][MX];
  for (auto& line : acc) {
    for (auto& a : line) a = Zero();
  }
  const std::int64_t n = w.n;
  std::int64_t k = 0;
  for (; k + 32 <= n; k += 32) {
    Vec a[2][MX];
    for (std::size_t i = 0; i < MX; ++i) {
      a[0][i] = Load(x + At(i, ldx) + k);
      a[1][i] = Load(x + At(i, ldx) + k + kLanes);
    }
    for (std::size_t r = 0; r < MW; ++r) {
      Vec b[2];
      w.Block(row + At(r, 1), k, b);
      if (k % 64 == 0) __builtin_prefetch(w.codes + (row + At(r, 1) + kAheadRows) * n + k);
      for (std::size_t i = 0; i < MX; ++i) {
        acc[r][i] = Fma(a[1][i], b[1], Fma(a[0][i], b[0], acc[r][i]));
      }
    }
  }
  for (; k < n; k += kLanes) {
    const std::int64_t left = n - k < kLanes ? n - k : kLanes;
    for (std::size_t r = 0; r < MW; ++r) {
      const Vec b = w.Tail(row + At(r, 1), k, left);
      for (std::size_t i = 0; i < MX; ++i) {
        acc[r][i] = Fma(LoadTail(x + At(i, ldx) + k, left), b, acc[r][i]);
      }
    }
  }
  StoreSums<MX, MW>(acc, y, ldy);
}

/// Calls tile(i, r, std::integral-like MX, MW) over all of m by rows.
template <std::size_t N>
struct Count {};

template <class Tile>
inline void Tiles(std::int64_t m, std::int64_t rows, Tile tile) {
  std::int64_t r = 0;
  for (; r + kTileW <= rows; r += kTileW) {
    std::int64_t i = 0;
    for (; i + kTileX <= m; i += kTileX) tile(i, r, Count<kTileX>{}, Count<kTileW>{});
    for (; i < m; ++i) tile(i, r, Count<1>{}, Count<kTileW>{});
  }
  for (; r < rows; ++r) {
    for (std::int64_t i = 0; i < m; ++i) tile(i, r, Count<1>{}, Count<1>{});
  }
}

}  // namespace

float Dot(const float* a, const float* b, std::int64_t n) {
  float y;
  DotTile<1, 1>(a, 0, b, 0, n, &y, 0);
  return y;
}

void DotBlock(const float* x, std::int64_t ldx, std::int64_t m, const float* w, std::int64_t ldw,
              std::int64_t rows, std::int64_t n, float* y, std::int64_t ldy) {
  Tiles(m, rows,
        [&]<std::size_t MX, std::size_t MW>(std::int64_t i, std::int64_t r, Count<MX>, Count<MW>) {
          DotTile<MX, MW>(x + i * ldx, ldx, w + r * ldw, ldw, n, y + i * ldy + r, ldy);
        });
}

void DotBlockBf16(const float* x, std::int64_t ldx, std::int64_t m, const void* w,
                  std::int64_t rows, std::int64_t n, float* y, std::int64_t ldy) {
  const auto* bytes = static_cast<const std::uint8_t*>(w);
  Tiles(m, rows,
        [&]<std::size_t MX, std::size_t MW>(std::int64_t i, std::int64_t r, Count<MX>, Count<MW>) {
          DotTileBf16<MX, MW>(x + i * ldx, ldx, bytes + 2 * r * n, n, y + i * ldy + r, ldy);
        });
}

void DotBlockMxfp4(const float* x, std::int64_t ldx, std::int64_t m, const std::uint8_t* codes,
                   const std::uint8_t* scales, std::int64_t rows, std::int64_t n, float* y,
                   std::int64_t ldy) {
  Tiles(m, rows,
        [&]<std::size_t MX, std::size_t MW>(std::int64_t i, std::int64_t r, Count<MX>, Count<MW>) {
          DotTileMxfp4<MX, MW>(x + i * ldx, ldx, codes + r * n / 2, scales + r * n / 32, n,
                               y + i * ldy + r, ldy);
        });
}

void DotBlockInt8(const float* x, std::int64_t ldx, std::int64_t m, const std::uint8_t* codes,
                  const std::uint8_t* scales, std::int64_t rows, std::int64_t n, float* y,
                  std::int64_t ldy) {
  const Int8Rows w{codes, scales, n};
  Tiles(m, rows,
        [&]<std::size_t MX, std::size_t MW>(std::int64_t i, std::int64_t r, Count<MX>, Count<MW>) {
          DotTileBytes<MX, MW>(x + i * ldx, ldx, w, r, y + i * ldy + r, ldy);
        });
}

void DotBlockFp8(const float* x, std::int64_t ldx, std::int64_t m, const std::uint8_t* codes,
                 const std::uint8_t* scales, std::int64_t scale_row, std::int64_t rows,
                 std::int64_t n, float* y, std::int64_t ldy) {
  const Fp8Rows w{codes, scales, n, scale_row};
  Tiles(m, rows,
        [&]<std::size_t MX, std::size_t MW>(std::int64_t i, std::int64_t r, Count<MX>, Count<MW>) {
          DotTileBytes<MX, MW>(x + i * ldx, ldx, w, r, y + i * ldy + r, ldy);
        });
}

void Axpy(float a, const float* x, float* y, std::int64_t n) {
  const Vec va = Set(a);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(y + i, Fma(va, Load(x + i), Load(y + i)));
  if (i < n) StoreN(y + i, Fma(va, LoadN(x + i, n - i), LoadN(y + i, n - i)), n - i);
}

namespace {

/// MX rows by W vectors of columns, the last of `lanes` lanes.
template <std::size_t MX, std::size_t W>
inline void WeightedTile(const float* p, std::int64_t ldp, const float* rows, std::int64_t ld,
                         std::int64_t n_rows, float* y, std::int64_t ldy, std::int64_t lanes) {
  Vec acc[MX][W];
  for (std::size_t i = 0; i < MX; ++i) {
    for (std::size_t c = 0; c < W; ++c) acc[i][c] = LoadTail(y + At(i, ldy) + At(c, 16), lanes);
  }
  for (std::int64_t j = 0; j < n_rows; ++j) {
    Vec v[W];
    for (std::size_t c = 0; c < W; ++c) v[c] = LoadTail(rows + j * ld + At(c, 16), lanes);
    for (std::size_t i = 0; i < MX; ++i) {
      const Vec a = Set(p[At(i, ldp) + j]);
      for (std::size_t c = 0; c < W; ++c) acc[i][c] = Fma(a, v[c], acc[i][c]);
    }
  }
  for (std::size_t i = 0; i < MX; ++i) {
    for (std::size_t c = 0; c < W; ++c) StoreTail(y + At(i, ldy) + At(c, 16), acc[i][c], lanes);
  }
}

}  // namespace

void WeightedRows(const float* p, std::int64_t ldp, std::int64_t m, const float* rows,
                  std::int64_t ld, std::int64_t n_rows, std::int64_t n, float* y,
                  std::int64_t ldy) {
  constexpr std::int64_t kWide = 4;
  std::int64_t c = 0;
  for (; c + kWide * kLanes <= n; c += kWide * kLanes) {
    std::int64_t i = 0;
    for (; i + kTileX <= m; i += kTileX) {
      WeightedTile<kTileX, kWide>(p + i * ldp, ldp, rows + c, ld, n_rows, y + i * ldy + c, ldy,
                                  kLanes);
    }
    for (; i < m; ++i) {
      WeightedTile<1, kWide>(p + i * ldp, ldp, rows + c, ld, n_rows, y + i * ldy + c, ldy, kLanes);
    }
  }
  for (; c < n; c += kLanes) {
    const std::int64_t lanes = n - c < kLanes ? n - c : kLanes;
    for (std::int64_t i = 0; i < m; ++i) {
      WeightedTile<1, 1>(p + i * ldp, ldp, rows + c, ld, n_rows, y + i * ldy + c, ldy, lanes);
    }
  }
}

namespace {

/// As WeightedTile with one row of p and bf16 rows.
template <std::size_t W>
inline void WeightedTileBf16(const float* p, const std::uint8_t* rows, std::int64_t ld,
                             std::int64_t n_rows, float* y, std::int64_t lanes) {
  Vec acc[W];
  for (std::size_t c = 0; c < W; ++c) acc[c] = LoadTail(y + At(c, 16), lanes);
  for (std::int64_t j = 0; j < n_rows; ++j) {
    const Vec a = Set(p[j]);
    for (std::size_t c = 0; c < W; ++c) {
      const std::uint8_t* at = rows + 2 * (j * ld + At(c, 16));
      acc[c] = Fma(a, lanes < kLanes ? LoadBf16N(at, lanes) : LoadBf16(at), acc[c]);
    }
  }
  for (std::size_t c = 0; c < W; ++c) StoreTail(y + At(c, 16), acc[c], lanes);
}

}  // namespace

void WeightedRowsBf16(const float* p, const void* rows, std::int64_t ld, std::int64_t n_rows,
                      std::int64_t n, float* y) {
  const auto* bytes = static_cast<const std::uint8_t*>(rows);
  std::int64_t c = 0;
  for (; c + 8 * kLanes <= n; c += 8 * kLanes) {
    WeightedTileBf16<8>(p, bytes + 2 * c, ld, n_rows, y + c, kLanes);
  }
  for (; c < n; c += kLanes) {
    WeightedTileBf16<1>(p, bytes + 2 * c, ld, n_rows, y + c, n - c < kLanes ? n - c : kLanes);
  }
}

void DecodeBf16(const void* src, std::int64_t n, float* out) {
  const auto* s = static_cast<const std::uint8_t*>(src);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(out + i, LoadBf16(s + 2 * i));
  if (i < n) StoreN(out + i, LoadBf16N(s + 2 * i, n - i), n - i);
}

void DecodeMxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t n,
                 float* out) {
  for (std::int64_t b = 0; b < n / 32; ++b) {
    const Mx4Table table = MakeMx4Table(E8m0(scales[b]));
    Store(out + 32 * b, LoadMx4(codes + 16 * b, table));
    Store(out + 32 * b + 16, LoadMx4(codes + 16 * b + 8, table));
  }
}

void DecodeInt8(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t n, float* out) {
  const Int8Rows w{codes, scales, n};
  for (std::int64_t k = 0; k < n; k += 32) {
    Vec b[2];
    w.Block(0, k, b);
    Store(out + k, b[0]);
    Store(out + k + kLanes, b[1]);
  }
}

void DecodeFp8(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t scale_row,
               std::int64_t rows, std::int64_t cols, float* out) {
  const Fp8Rows w{codes, scales, cols, scale_row};
  for (std::int64_t r = 0; r < rows; ++r, out += cols) {
    std::int64_t k = 0;
    for (; k + 32 <= cols; k += 32) {
      Vec b[2];
      w.Block(r, k, b);
      Store(out + k, b[0]);
      Store(out + k + kLanes, b[1]);
    }
    for (; k < cols; k += kLanes) {
      const std::int64_t left = cols - k < kLanes ? cols - k : kLanes;
      StoreTail(out + k, w.Tail(r, k, left), left);
    }
  }
}

}  // namespace k3::cpu::K3_ISA
