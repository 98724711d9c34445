// Products in bf16 with VDPBF16PS: rows of 16 interleaved pair sums, added as in DotOrder.
#include <cstddef>

#include "k3/kernels/cpu/simd_functions.h"
#include "k3/kernels/cpu/vec16.h"

#if defined(__AVX512BF16__)
#include "k3/kernels/cpu/bf16_decode.h"
#endif

namespace k3::cpu::K3_ISA {

#if defined(__AVX512BF16__)

namespace {

constexpr std::int64_t kStep = 32;  // bf16 values of a register

inline std::int64_t At(std::size_t i, std::int64_t stride) {
  return static_cast<std::int64_t>(i) * stride;
}

std::int64_t PackedBytes(std::int64_t m, std::int64_t cols) { return 2 * m * cols; }

void Pack(const float* x, std::int64_t ldx, std::int64_t m, std::int64_t cols, FastForm,
          void* out) {
  auto* to = static_cast<std::uint8_t*>(out);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t k = 0; k < cols; k += kStep) {
      _mm512_storeu_si512(to + 2 * (i * cols + k), RoundToBf16(x + i * ldx + k));
    }
  }
}

template <std::size_t MX, std::size_t MW>
inline void Tile(const std::uint8_t* x, const std::uint8_t* w, std::int64_t cols, float* y,
                 std::int64_t ldy) {
  __m512 acc[MW][MX];
  for (auto& row : acc) {
    for (auto& a : row) a = _mm512_setzero_ps();
  }
  for (std::int64_t k = 0; k < cols; k += kStep) {
    __m512i b[MW];
    for (std::size_t r = 0; r < MW; ++r) b[r] = _mm512_loadu_si512(w + 2 * (At(r, cols) + k));
    for (std::size_t i = 0; i < MX; ++i) {
      const __m512i a = _mm512_loadu_si512(x + 2 * (At(i, cols) + k));
      for (std::size_t r = 0; r < MW; ++r) {
        acc[r][i] = _mm512_dpbf16_ps(acc[r][i], reinterpret_cast<__m512bh>(a),
                                     reinterpret_cast<__m512bh>(b[r]));
      }
    }
  }
  if constexpr (MX == 4 && MW == 4) {
    Vec flat[16];
    for (std::size_t j = 0; j < 16; ++j) flat[j] = {acc[j / 4][j % 4]};
    const __m512 s = Sum16(flat).v;
    _mm_storeu_ps(y, _mm512_castps512_ps128(s));
    _mm_storeu_ps(y + ldy, _mm512_extractf32x4_ps(s, 1));
    _mm_storeu_ps(y + 2 * ldy, _mm512_extractf32x4_ps(s, 2));
    _mm_storeu_ps(y + 3 * ldy, _mm512_extractf32x4_ps(s, 3));
  } else {
    for (std::size_t i = 0; i < MX; ++i) {
      for (std::size_t r = 0; r < MW; ++r) y[At(i, ldy) + At(r, 1)] = Sum({acc[r][i]});
    }
  }
}

template <std::size_t MW>
inline void Rows(const std::uint8_t* x, std::int64_t m, const std::uint8_t* w, std::int64_t cols,
                 float* y, std::int64_t ldy) {
  std::int64_t i = 0;
  for (; i + 4 <= m; i += 4) Tile<4, MW>(x + 2 * i * cols, w, cols, y + i * ldy, ldy);
  for (; i < m; ++i) Tile<1, MW>(x + 2 * i * cols, w, cols, y + i * ldy, ldy);
}

void Round(const float* x, std::int64_t ldx, std::int64_t m, std::int64_t cols, std::uint8_t* out,
           std::int64_t ld_out) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t k = 0; k < cols; k += kStep) {
      _mm512_storeu_si512(out + 2 * (i * ld_out + k), RoundToBf16(x + i * ldx + k));
    }
  }
}

std::int64_t ScratchBytes(std::int64_t, std::int64_t cols) { return 2 * 4 * cols; }

void Gemm(const void* packed, std::int64_t m, FastWeight w, std::int64_t rows, std::int64_t cols,
          float* y, std::int64_t ldy, void* scratch) {
  const auto* x = static_cast<const std::uint8_t*>(packed);
  auto* panel = static_cast<std::uint8_t*>(scratch);
  for (std::int64_t r = 0; r < rows; r += 4) {
    const std::int64_t n = rows - r < 4 ? rows - r : 4;
    const std::uint8_t* at = w.data + 2 * r * cols;
    if (w.form == FastForm::kFp8 || w.form == FastForm::kInt8) {
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t k = 0; k < cols; k += kStep) {
          _mm512_store_si512(panel + 2 * (i * cols + k), DecodeBytesToBf16(w, r + i, k, cols));
        }
      }
      at = panel;
    } else if (w.form == FastForm::kMxfp4) {  // decoded once, read by all rows of x
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t blocks = cols / 32;
        for (std::int64_t b0 = 0; b0 < blocks; b0 += 16) {
          const std::int64_t first = (r + i) * blocks + b0, count = blocks - b0;
          Mx4Scales scales;
          ReadScales(w.scales + first, count, scales);
          for (std::int64_t b = 0; b < (count < 16 ? count : 16); ++b) {
            _mm512_store_si512(
                panel + 2 * (i * cols + 32 * (b0 + b)),
                DecodeMx4ToBf16(w.data + 16 * (first + b), scales, w.scales + first, b));
          }
        }
      }
      at = panel;
    }
    if (n == 4) {
      Rows<4>(x, m, at, cols, y + r, ldy);
    } else {
      for (std::int64_t i = 0; i < n; ++i) Rows<1>(x, m, at + 2 * i * cols, cols, y + r + i, ldy);
    }
  }
}

}  // namespace

const FastTable* Bf16Products() {
  static const FastTable table{PackedBytes, Pack,    Round,   ScratchBytes, Gemm,
                               nullptr,     nullptr, nullptr, nullptr,      nullptr};
  return &table;
}

#else

const FastTable* Bf16Products() { return nullptr; }

#endif

}  // namespace k3::cpu::K3_ISA
