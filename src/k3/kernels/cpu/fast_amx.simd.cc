// Products in bf16 with the matrix tiles of AMX. Tiles hold y transposed: weight rows come straight
// from the file as the left operand, activations are packed once as the right one.
#include <cstddef>

#include "k3/kernels/cpu/simd_functions.h"
#include "k3/kernels/cpu/vec16.h"

#if defined(__AMX_BF16__)
#include "k3/kernels/cpu/amx_tiles.h"
#include "k3/kernels/cpu/bf16_decode.h"
#include "k3/kernels/cpu/mx4_row.h"
#endif

namespace k3::cpu::K3_ISA {

#if defined(__AMX_BF16__)

namespace {

constexpr std::int64_t kRows = 16, kStep = 32;  // of a tile: rows, bf16 values in a row
constexpr std::int64_t kRepackFrom = 64;        // rows of x that pay for copying the weights

std::int64_t Blocks(std::int64_t m) { return (m + kRows - 1) / kRows; }

std::int64_t PackedBytes(std::int64_t m, std::int64_t cols) {
  return Blocks(m) * cols / kStep * kTileBytes;
}

/// Blocks of 16 rows; in each, for every 32 columns one tile [16 pairs of columns][16 rows][2].
template <bool kGrid>
void PackTiles(const float* x, std::int64_t ldx, std::int64_t m, std::int64_t cols, void* out) {
  auto* to = static_cast<std::uint8_t*>(out);
  for (std::int64_t i = 0; i < m; i += kRows) {
    const std::int64_t n = m - i < kRows ? m - i : kRows;
    for (std::int64_t k = 0; k < cols; k += kStep, to += kTileBytes) {
      __m512i r[16];
      for (std::int64_t j = 0; j < kRows; ++j) {
        const float* from = x + (i + j) * ldx + k;
        r[j] = j >= n ? _mm512_setzero_si512() : kGrid ? RoundToGrid(from) : RoundToBf16(from);
      }
      Transpose16(r);
      for (std::int64_t j = 0; j < kRows; ++j) _mm512_store_si512(to + 64 * j, r[j]);
    }
  }
}

void Pack(const float* x, std::int64_t ldx, std::int64_t m, std::int64_t cols, FastForm form,
          void* out) {
  if (form == FastForm::kMxfp4) return PackTiles<true>(x, ldx, m, cols, out);
  PackTiles<false>(x, ldx, m, cols, out);
}

/// Where the tiles of 16 weight rows lie: tile s at data + s * step, its rows `stride` apart.
struct LeftTiles {
  const std::uint8_t* data;
  std::int64_t step, stride;
};

/// y[i, r] of a tile stored as [16 r][16 i].
void StoreTransposed(const float* tile, std::int64_t n_x, std::int64_t n_rows, float* y,
                     std::int64_t ldy) {
  if (n_x == 1) {
    for (std::int64_t r = 0; r < n_rows; ++r) y[r] = tile[16 * r];
    return;
  }
  __m512i r[16];
  for (int j = 0; j < 16; ++j) r[j] = _mm512_load_si512(tile + 16 * j);
  Transpose16(r);
  const auto mask = static_cast<__mmask16>((1u << n_rows) - 1u);
  for (std::int64_t i = 0; i < n_x; ++i) {
    _mm512_mask_storeu_epi32(y + i * ldy, mask, r[i]);
  }
}

/// The product of up to 32 weight rows with up to 32 rows of x. All shapes add the same tiles in
/// the same order, so an element has the same bits in each.
struct Output {
  float* y;
  std::int64_t ldy, n_x, n_rows;
};

/// Brings weight rows that come later nearer, some lines at every step of the products before.
struct Ahead {
  const std::uint8_t* next;
  std::int64_t bytes, per_step, at;

  inline void Step() {
    const std::int64_t end = at + per_step < bytes ? at + per_step : bytes;
    for (; at < end; at += 64) _mm_prefetch(next + at, _MM_HINT_T1);
  }
};

void Product22(const LeftTiles& a0, const LeftTiles& a1, const std::uint8_t* b0,
               const std::uint8_t* b1, std::int64_t steps, Ahead& ahead, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t s = 0; s < steps; ++s) {
    ahead.Step();
    _tile_loadd(4, a0.data + s * a0.step, a0.stride);
    _tile_loadd(5, a1.data + s * a1.step, a1.stride);
    _tile_loadd(6, b0 + s * kTileBytes, 64);
    _tile_loadd(7, b1 + s * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
  _tile_stored(2, out + 512, 64);
  _tile_stored(3, out + 768, 64);
}

void Product21(const LeftTiles& a0, const LeftTiles& a1, const std::uint8_t* b0, std::int64_t steps,
               Ahead& ahead, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  for (std::int64_t s = 0; s < steps; ++s) {
    ahead.Step();
    _tile_loadd(6, b0 + s * kTileBytes, 64);
    _tile_loadd(4, a0.data + s * a0.step, a0.stride);
    _tile_loadd(5, a1.data + s * a1.step, a1.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
}

void Product11(const LeftTiles& a0, const std::uint8_t* b0, std::int64_t steps, float* out) {
  _tile_zero(0);
  for (std::int64_t s = 0; s < steps; ++s) {
    _tile_loadd(6, b0 + s * kTileBytes, 64);
    _tile_loadd(4, a0.data + s * a0.step, a0.stride);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, out, 64);
}

/// 32 rows of decoded or copied weights.
std::int64_t ScratchBytes(std::int64_t, std::int64_t cols) { return 2 * cols / kStep * kTileBytes; }

constexpr std::int64_t kRun = 16;  // steps of a row decoded together: their scales, whole lines

/// Steps [s0, s0 + run) of n <= 16 weight rows from row r on as dense tiles; rows beyond n are
/// zero. Codes `ahead` steps later are fetched.
void DecodeRun(const FastWeight& w, std::int64_t r, std::int64_t n, std::int64_t cols,
               std::int64_t s0, std::int64_t run, std::int64_t ahead, std::uint8_t* tiles) {
  const std::int64_t steps = cols / kStep;
  for (std::int64_t i = 0; i < kRows; ++i) {
    const std::int64_t first = (r + i) * steps + s0;
    std::uint8_t* to = tiles + 64 * i;
    if (i >= n) {
      for (std::int64_t s = 0; s < run; ++s) {
        _mm512_store_si512(to + s * kTileBytes, _mm512_setzero_si512());
      }
    } else if (w.form == FastForm::kFp8 || w.form == FastForm::kInt8) {
      const std::uint8_t* codes = w.data + 32 * first;
      for (std::int64_t s = 0; s < run; s += 2) {
        _mm_prefetch(codes + 32 * (s + ahead), _MM_HINT_T0);
      }
      for (std::int64_t s = 0; s < run; ++s) {
        _mm512_store_si512(to + s * kTileBytes,
                           DecodeBytesToBf16(w, r + i, kStep * (s0 + s), cols));
      }
    } else if (w.form == FastForm::kBf16) {
      for (std::int64_t s = 0; s < run; ++s) {
        _mm512_store_si512(to + s * kTileBytes, _mm512_loadu_si512(w.data + 64 * (first + s)));
      }
    } else {
      Mx4Scales scales;
      ReadScales(w.scales + first, run, scales);
      const std::uint8_t* codes = w.data + 16 * first;
      for (std::int64_t s = 0; s < run; s += 4) {
        _mm_prefetch(codes + 16 * (s + ahead), _MM_HINT_T0);
      }
      for (std::int64_t s = 0; s < run; ++s) {
        _mm512_store_si512(to + s * kTileBytes,
                           DecodeMx4ToBf16(codes + 16 * s, scales, w.scales + first, s));
      }
    }
  }
}

/// n <= 16 weight rows from row r on: where they are, or gathered into `panel` as dense tiles.
LeftTiles Left(const FastWeight& w, std::int64_t r, std::int64_t n, std::int64_t cols, bool copy,
               std::uint8_t* panel) {
  if (w.form == FastForm::kBf16 && n == kRows && !copy)
    return {w.data + 2 * r * cols, 64, 2 * cols};
  const std::int64_t steps = cols / kStep;
  for (std::int64_t s0 = 0; s0 < steps; s0 += kRun) {
    DecodeRun(w, r, n, cols, s0, steps - s0 < kRun ? steps - s0 : kRun, 2 * kRows * steps,
              panel + s0 * kTileBytes);
  }
  return {panel, kTileBytes, 64};
}

void Gemm(const void* packed, std::int64_t m, FastWeight w, std::int64_t rows, std::int64_t cols,
          float* y, std::int64_t ldy, void* scratch) {
  const auto* x = static_cast<const std::uint8_t*>(packed);
  auto* panel = static_cast<std::uint8_t*>(scratch);
  const std::int64_t steps = cols / kStep, block = steps * kTileBytes, blocks = Blocks(m);
  const TileConfig config;
  _tile_loadconfig(&config);
  alignas(64) float out[4 * 256];
  auto n_x = [&](std::int64_t b) { return m - b * kRows < kRows ? m - b * kRows : kRows; };
  for (std::int64_t r = 0; r < rows; r += 2 * kRows) {
    const std::int64_t n0 = rows - r < kRows ? rows - r : kRows;
    const std::int64_t n1 = rows - r - kRows < kRows ? rows - r - kRows : kRows;
    const bool copy = m >= kRepackFrom;
    // Other forms are fetched where they are decoded.
    const bool more = w.form == FastForm::kBf16 && r + 4 * kRows <= rows;
    Ahead ahead{w.data + 2 * (r + 2 * kRows) * cols, more ? 4 * kRows * cols : 0,
                64 * ((4 * kRows * cols / 64 - 1) / (steps * ((blocks + 1) / 2)) + 1), 0};
    const LeftTiles a0 = Left(w, r, n0, cols, copy, panel);
    auto store = [&](std::int64_t b, std::int64_t half, const float* tile) {
      StoreTransposed(tile, n_x(b), half == 0 ? n0 : n1, y + b * kRows * ldy + r + half * kRows,
                      ldy);
    };
    if (n1 <= 0) {
      for (std::int64_t b = 0; b < blocks; ++b) {
        Product11(a0, x + b * block, steps, out);
        store(b, 0, out);
      }
      continue;
    }
    const LeftTiles a1 = Left(w, r + kRows, n1, cols, copy, panel + block);
    std::int64_t b = 0;
    for (; b + 2 <= blocks; b += 2) {
      Product22(a0, a1, x + b * block, x + (b + 1) * block, steps, ahead, out);
      store(b, 0, out);
      store(b, 1, out + 256);
      store(b + 1, 0, out + 512);
      store(b + 1, 1, out + 768);
    }
    if (b < blocks) {
      Product21(a0, a1, x + b * block, steps, ahead, out);
      store(b, 0, out);
      store(b, 1, out + 256);
    }
  }
  _tile_release();
}

/// Tiles of a product with one row of x: 0 and 1 are sums, 4 and 5 weights, 6 is x, whose tiles of
/// 32 values are columns of 16 pairs. Same sums in the same order as in Gemm.
struct GemvConfig : TileConfig {
  GemvConfig() { row_bytes[0] = row_bytes[1] = row_bytes[6] = 4; }
};

/// y of 16 or 32 rows of bf16 where they are.
void GemvInPlace(const std::uint8_t* x, const std::uint8_t* w, bool both, std::int64_t cols,
                 float* y) {
  _tile_zero(0);
  _tile_zero(1);
  const std::uint8_t* second = w + 2 * kRows * cols;
  for (std::int64_t s = 0; s < cols / kStep; ++s) {
    _tile_loadd(6, x + 64 * s, 4);
    _tile_loadd(4, w + 64 * s, 2 * cols);
    _tile_dpbf16ps(0, 4, 6);
    if (both) {
      _tile_loadd(5, second + 64 * s, 2 * cols);
      _tile_dpbf16ps(1, 5, 6);
    }
  }
  _tile_stored(0, y, 4);
  if (both) _tile_stored(1, y + kRows, 4);
}

/// Rows of MXFP4 weights are multiplied one at a time up to here: decoding them for tiles costs as
/// much as three rows.
std::int64_t GemvRows(FastForm form) { return form == FastForm::kMxfp4 ? 3 : 1; }

/// What Gemv reads of a row: x as bf16, then, for MXFP4, what Mx4Rows16 reads. A multiple of 64.
std::int64_t RowBytes(std::int64_t cols) { return (2 * cols + Mx4PackBytes(cols) + 63) / 64 * 64; }
std::int64_t GemvBytes(std::int64_t m, std::int64_t cols) { return m * RowBytes(cols); }

void GemvPack(const float* x, std::int64_t ldx, std::int64_t m, std::int64_t cols, FastForm form,
              void* out) {
  auto* rounded = static_cast<std::uint8_t*>(out);
  const bool grid = form == FastForm::kMxfp4;
  for (std::int64_t i = 0; i < m; ++i, x += ldx, rounded += RowBytes(cols)) {
    for (std::int64_t k = 0; k < cols; k += kStep) {
      _mm512_store_si512(rounded + 2 * k, grid ? RoundToGrid(x + k) : RoundToBf16(x + k));
    }
    if (grid) Mx4Pack(x, cols, rounded + 2 * cols);
  }
}

/// y of n <= 16 rows in any form, decoded a run at a time.
void GemvDecoded(const std::uint8_t* x, const FastWeight& w, std::int64_t r, std::int64_t n,
                 std::int64_t cols, float* y) {
  alignas(64) std::uint8_t panel[kRun * kTileBytes];  // stays in the nearest cache
  const std::int64_t steps = cols / kStep;
  _tile_zero(0);
  for (std::int64_t s0 = 0; s0 < steps; s0 += kRun) {
    const std::int64_t run = steps - s0 < kRun ? steps - s0 : kRun;
    const std::int64_t ahead = s0 + kRun < steps ? kRun : kRows * steps - s0;  // the next run
    DecodeRun(w, r, n, cols, s0, run, ahead, panel);
    for (std::int64_t s = 0; s < run; ++s) {
      _tile_loadd(6, x + 64 * (s0 + s), 4);
      _tile_loadd(4, panel + s * kTileBytes, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
  }
  float out[kRows];
  _tile_stored(0, out, 4);
  for (std::int64_t i = 0; i < n; ++i) y[i] = out[i];
}

void Gemv(const void* packed, std::int64_t m, FastWeight w, std::int64_t rows, std::int64_t cols,
          float* y, std::int64_t ldy) {
  const std::int64_t steps = cols / kStep;
  const GemvConfig config;
  _tile_loadconfig(&config);
  for (std::int64_t r = 0; r < rows; r += kRows) {
    const std::int64_t n = rows - r < kRows ? rows - r : kRows;
    const bool both = w.form == FastForm::kBf16 && rows - r >= 2 * kRows;
    const auto* x = static_cast<const std::uint8_t*>(packed);
    for (std::int64_t i = 0; i < m; ++i, x += RowBytes(cols)) {
      float* to = y + i * ldy + r;
      const std::uint8_t* scales = w.scales + r * steps;
      if (w.form == FastForm::kBf16 && n == kRows) {
        GemvInPlace(x, w.data + 2 * r * cols, both, cols, to);
      } else if (w.form == FastForm::kMxfp4 && n == kRows &&
                 Mx4Normal(x + 2 * cols, scales, kRows * steps)) {
        Mx4Rows16(x + 2 * cols, w.data + 16 * r * steps, scales, steps, to);
      } else {
        GemvDecoded(x, w, r, n, cols, to);
      }
    }
    if (both) r += kRows;
  }
  _tile_release();
}

void Round(const float* x, std::int64_t ldx, std::int64_t m, std::int64_t cols, std::uint8_t* out,
           std::int64_t ld_out) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t k = 0; k < cols; k += kStep) {
      _mm512_storeu_si512(out + 2 * (i * ld_out + k), RoundToBf16(x + i * ldx + k));
    }
  }
}

}  // namespace

const FastTable* AmxProducts() {
  static const FastTable table{PackedBytes, Pack,      Round,    ScratchBytes, Gemm,
                               GemvRows,    GemvBytes, GemvPack, Gemv,         AmxKdaChunks};
  return &table;
}

#else

const FastTable* AmxProducts() { return nullptr; }

#endif

}  // namespace k3::cpu::K3_ISA
