// One row of x times MXFP4 weights, with the bits of the tile product and without its decoding: 16
// weight rows are lanes. A tile step sums the even and the odd products of 32 columns, each in
// order, and adds both to the result. Scales are powers of two and constant in a step, so they may
// follow the sums as long as nothing leaves the normal range of f32.
#include <cstddef>

#include "k3/kernels/cpu/simd_functions.h"
#include "k3/kernels/cpu/vec16.h"

#if defined(__AMX_BF16__)
#include "k3/kernels/cpu/mx4_row.h"

namespace k3::cpu::K3_ISA {
namespace {

constexpr std::int64_t kRows = 16, kRun = 16;  // kRun steps share one load of scales

/// 16 rows of 16 bytes, `stride` apart: dword j of row i becomes lane i of to[j].
inline void Gather(const std::uint8_t* p, std::int64_t stride, __mmask16 bytes, __m512i (&to)[4]) {
  __m512i r[4];
  for (int q = 0; q < 4; ++q) {
    const auto row = [&](int lane) {
      return _mm_maskz_loadu_epi8(bytes, p + (4 * lane + q) * stride);
    };
    r[q] = _mm512_castsi128_si512(row(0));
    r[q] = _mm512_inserti32x4(r[q], row(1), 1);
    r[q] = _mm512_inserti32x4(r[q], row(2), 2);
    r[q] = _mm512_inserti32x4(r[q], row(3), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
  to[0] = _mm512_unpacklo_epi64(a, c);
  to[1] = _mm512_unpackhi_epi64(a, c);
  to[2] = _mm512_unpacklo_epi64(b, d);
  to[3] = _mm512_unpackhi_epi64(b, d);
}

/// Sum of the products of 32 columns, scales left out.
inline __m512 Step(const float* x, const std::uint8_t* codes, std::int64_t stride) {
  const __m512 e2m1 = _mm512_setr_ps(0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -0.5f, -1.f,
                                     -1.5f, -2.f, -3.f, -4.f, -6.f);
  __m512i word[4];
  Gather(codes, stride, 0xFFFF, word);
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
    for (int c = 0; c < 8; c += 2) {  // a permutation looks at the low four bits only
      const auto code = [&](int at) {
        return _mm512_permutexvar_ps(_mm512_srli_epi32(word[j], static_cast<unsigned>(4 * at)),
                                     e2m1);
      };
      even = _mm512_fmadd_ps(_mm512_set1_ps(x[8 * j + c]), code(c), even);
      odd = _mm512_fmadd_ps(_mm512_set1_ps(x[8 * j + c + 1]), code(c + 1), odd);
    }
  }
  return _mm512_add_ps(even, odd);
}

}  // namespace

Mx4Range RangeOf(const std::uint8_t* x, std::int64_t cols) {
  __m512i low = _mm512_set1_epi16(255), high = _mm512_setzero_si512();
  for (std::int64_t k = 0; k < cols; k += 32) {
    const __m512i v = _mm512_and_si512(_mm512_loadu_si512(x + 2 * k), _mm512_set1_epi16(0x7FFF));
    const __m512i e = _mm512_srli_epi16(v, 7);
    low = _mm512_mask_min_epu16(low, _mm512_test_epi16_mask(v, v), low, e);
    high = _mm512_max_epu16(high, e);
  }
  alignas(64) std::uint16_t lows[32], highs[32];
  _mm512_store_si512(lows, low);
  _mm512_store_si512(highs, high);
  Mx4Range range{255, 0};
  for (int i = 0; i < 32; ++i) {
    range.low = lows[i] < range.low ? lows[i] : range.low;
    range.high = highs[i] > range.high ? highs[i] : range.high;
  }
  return range;
}

bool Mx4Normal(const Mx4Range& x, const std::uint8_t* scales, std::int64_t n) {
  __m512i low = _mm512_set1_epi8(-1), high = _mm512_setzero_si512();
  for (std::int64_t i = 0; i < n; i += 64) {
    const std::int64_t left = n - i < 64 ? n - i : 64;
    const __mmask64 mask = left == 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    const __m512i v = _mm512_maskz_loadu_epi8(mask, scales + i);
    low = _mm512_mask_min_epu8(low, mask, low, v);
    high = _mm512_max_epu8(high, v);
  }
  alignas(64) std::uint8_t lows[64], highs[64];
  _mm512_store_si512(lows, low);
  _mm512_store_si512(highs, high);
  int least = 255, most = 0;
  for (int i = 0; i < 64; ++i) {
    least = lows[i] < least ? lows[i] : least;
    most = highs[i] > most ? highs[i] : most;
  }
  // Products are multiples of 2^(low - 134) times the scale, and a step's sum is less than
  // 2^(high - 118) times the scale; both must be normal before and after the scale.
  return x.low >= 9 && x.high <= 244 && least >= 3 && most <= 251 && x.low + least >= 136 &&
         x.high + most <= 371;
}

void Mx4Rows16(const float* x, const std::uint8_t* codes, const std::uint8_t* scales,
               std::int64_t steps, float* y) {
  __m512 sum = _mm512_setzero_ps();
  const std::int64_t stride = 16 * steps;
  for (std::int64_t s0 = 0; s0 < steps; s0 += kRun) {
    const std::int64_t run = steps - s0 < kRun ? steps - s0 : kRun;
    __m512i scale[4];
    Gather(scales + s0, steps, run < kRun ? FirstN(run) : __mmask16{0xFFFF}, scale);
    // Lines of the run after the next one, or of the next rows.
    const std::int64_t ahead = s0 + 2 * kRun;
    const std::uint8_t* next =
        codes + (ahead < steps ? 16 * ahead : kRows * stride + 16 * (ahead - steps));
    for (std::int64_t s = 0; s < run; ++s) {
      for (std::int64_t i = 4 * (s % 4); i < 4 * (s % 4) + 4; ++i) {
        _mm_prefetch(next + i * stride + 64 * (s / 4), _MM_HINT_T0);
      }
      const __m512i bytes =
          _mm512_srlv_epi32(scale[s / 4], _mm512_set1_epi32(static_cast<int>(8 * (s % 4))));
      const __m512i power = _mm512_slli_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(255)), 23);
      sum = _mm512_fmadd_ps(Step(x + 32 * (s0 + s), codes + 16 * (s0 + s), stride),
                            _mm512_castsi512_ps(power), sum);
    }
  }
  _mm512_storeu_ps(y, sum);
}

}  // namespace k3::cpu::K3_ISA

#endif
