// Sixteen one-byte codes as f32 lanes: signed bytes, and e4m3. Included by *.simd.cc files only.
#pragma once

#include "k3/kernels/cpu/vec16.h"

namespace k3::cpu::K3_ISA {

// e4m3 of magnitude m as bits of an f32: a normal code (m >= 8) is (m << 20) with the bias moved
// from 7 to 127. A subnormal one gets an exponent more, and the 2^-6 that its absent leading one
// would be is taken off again; f32 subnormals, slow on some processors, never appear. 127 is NaN.

/// A bf16 number at any address.
inline float Bf16At(const std::uint8_t* p) {
  const std::uint32_t bits = (std::uint32_t{p[0]} << 16) | (std::uint32_t{p[1]} << 24);
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
}

#if defined(__AVX512F__)

inline Vec I8Lanes(__m128i bytes) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))}; }
inline Vec E4m3Lanes(__m128i bytes) {
  const __m512i c = _mm512_cvtepu8_epi32(bytes);
  const __m512i m = _mm512_and_si512(c, _mm512_set1_epi32(127));
  const __mmask16 subnormal = _mm512_cmplt_epi32_mask(m, _mm512_set1_epi32(8));
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(m, _mm512_set1_epi32(127));
  __m512i t = _mm512_add_epi32(_mm512_slli_epi32(m, 20), _mm512_set1_epi32(120 << 23));
  t = _mm512_mask_add_epi32(t, subnormal, t, _mm512_set1_epi32(1 << 23));
  t = _mm512_mask_or_epi32(t, nan, t, _mm512_set1_epi32(0x7FC00000));
  __m512 f = _mm512_castsi512_ps(t);
  f = _mm512_mask_sub_ps(f, subnormal, f, _mm512_set1_ps(0x1p-6f));
  const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(c, 7), 31);
  return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(f), sign))};
}
inline Vec LoadI8(const std::uint8_t* p) {
  return I8Lanes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec LoadE4m3(const std::uint8_t* p) {
  return E4m3Lanes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
/// The first n <= 16 lanes; the others are zero.
inline Vec LoadE4m3N(const std::uint8_t* p, std::int64_t n) {
  return E4m3Lanes(_mm_maskz_loadu_epi8(FirstN(n), p));
}

#else

#if defined(__AVX2__)

inline __m256 I8Half(const std::uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
inline __m256 E4m3Half(const std::uint8_t* p) {
  const __m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i m = _mm256_and_si256(c, _mm256_set1_epi32(127));
  const __m256i subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), m);
  const __m256i nan = _mm256_cmpeq_epi32(m, _mm256_set1_epi32(127));
  __m256i t = _mm256_add_epi32(_mm256_slli_epi32(m, 20), _mm256_set1_epi32(120 << 23));
  t = _mm256_add_epi32(t, _mm256_and_si256(subnormal, _mm256_set1_epi32(1 << 23)));
  t = _mm256_or_si256(t, _mm256_and_si256(nan, _mm256_set1_epi32(0x7FC00000)));
  const __m256 one = _mm256_and_ps(_mm256_castsi256_ps(subnormal), _mm256_set1_ps(0x1p-6f));
  const __m256 f = _mm256_sub_ps(_mm256_castsi256_ps(t), one);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(c, 7), 31);
  return _mm256_or_ps(f, _mm256_castsi256_ps(sign));
}
inline Vec LoadI8(const std::uint8_t* p) { return {I8Half(p), I8Half(p + 8)}; }
inline Vec LoadE4m3(const std::uint8_t* p) { return {E4m3Half(p), E4m3Half(p + 8)}; }

#else

inline float E4m3(std::uint8_t code) {
  const std::uint32_t m = code & 127u, sign = std::uint32_t{code} >> 7 << 31;
  std::uint32_t bits = (m << 20) + (120u << 23);
  if (m < 8) bits += 1u << 23;
  if (m == 127) bits |= 0x7FC00000u;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  if (m < 8) f -= 0x1p-6f;
  __builtin_memcpy(&bits, &f, 4);
  bits |= sign;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
inline Vec LoadI8(const std::uint8_t* p) {
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = static_cast<float>(static_cast<std::int8_t>(p[i]));
  return Load(v);
}
inline Vec LoadE4m3(const std::uint8_t* p) {
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = E4m3(p[i]);
  return Load(v);
}

#endif

inline Vec LoadE4m3N(const std::uint8_t* p, std::int64_t n) {
  std::uint8_t t[16] = {};
  __builtin_memcpy(t, p, static_cast<std::size_t>(n));
  return LoadE4m3(t);
}

#endif

}  // namespace k3::cpu::K3_ISA
