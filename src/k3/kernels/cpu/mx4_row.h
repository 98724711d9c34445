// One row of x times MXFP4 weights in whole numbers (fast_mx4.simd.cc). Included by *.simd.cc files
// compiled with AMX.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace k3::cpu::K3_ISA {

/// Bits of the largest of 32 magnitudes, in all lanes.
inline __m512i Largest32(const float* p) {
  const __m512i magnitude = _mm512_set1_epi32(INT32_MAX);
  __m512i m = _mm512_max_epi32(_mm512_and_si512(_mm512_loadu_si512(p), magnitude),
                               _mm512_and_si512(_mm512_loadu_si512(p + 16), magnitude));
  m = _mm512_max_epi32(m, _mm512_shuffle_i32x4(m, m, 0x4E));
  m = _mm512_max_epi32(m, _mm512_shuffle_i32x4(m, m, 0xB1));
  m = _mm512_max_epi32(m, _mm512_shuffle_epi32(m, _MM_PERM_BADC));
  return _mm512_max_epi32(m, _mm512_shuffle_epi32(m, _MM_PERM_CDAB));
}

constexpr int kMx4Bits = 13;      // of x below the leading one of the largest in 32
constexpr int kMx4Largest = 244;  // biased exponents above are not put on a grid

/// 32 values of x to bf16, nearest even, after rounding them to multiples of 2^(E - 13), where 2^E
/// is the power of two in the largest. Sums of their products with 32 codes fit 24 bits, so that
/// f32 holds them exactly in any order.
inline __m512i RoundToGrid(const float* p) {
  const __m512i e = _mm512_and_si512(Largest32(p), _mm512_set1_epi32(0x7F800000));
  const __mmask16 fits = _mm512_cmple_epi32_mask(e, _mm512_set1_epi32(kMx4Largest << 23));
  // 1.5 * 2^(E + 10): adding it leaves no bits below the grid.
  const __m512 magic = _mm512_castsi512_ps(
      _mm512_maskz_add_epi32(fits, e, _mm512_set1_epi32(((23 - kMx4Bits) << 23) | 0x400000)));
  const __m512 low = _mm512_sub_ps(_mm512_add_ps(_mm512_loadu_ps(p), magic), magic);
  const __m512 high = _mm512_sub_ps(_mm512_add_ps(_mm512_loadu_ps(p + 16), magic), magic);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

/// What Mx4Rows16 reads of a row of x.
std::int64_t Mx4PackBytes(std::int64_t cols);
void Mx4Pack(const float* x, std::int64_t cols, std::uint8_t* out);  // out: 64-byte aligned

/// Whether products of x with n blocks of codes under these scales have the bits of tile products:
/// no intermediate may be subnormal or overflow.
bool Mx4Normal(const std::uint8_t* packed, const std::uint8_t* scales, std::int64_t n);

/// y of 16 weight rows of 32 * steps columns.
void Mx4Rows16(const std::uint8_t* packed, const std::uint8_t* codes, const std::uint8_t* scales,
               std::int64_t steps, float* y);

}  // namespace k3::cpu::K3_ISA
