// Sixteen f32 lanes on whatever the instruction set has. Included by *.simd.cc files only.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(K3_SCALAR)
#include <arm_neon.h>
#endif

namespace k3::cpu::K3_ISA {

constexpr std::int64_t kLanes = 16;

#if defined(__AVX512F__)

struct Vec {
  __m512 v;
};
inline Vec Zero() { return {_mm512_setzero_ps()}; }
inline Vec Set(float x) { return {_mm512_set1_ps(x)}; }
inline Vec Load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void Store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline __mmask16 FirstN(std::int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
/// The first n < 16 lanes; the others are zero.
inline Vec LoadN(const float* p, std::int64_t n) { return {_mm512_maskz_loadu_ps(FirstN(n), p)}; }
inline void StoreN(float* p, Vec a, std::int64_t n) { _mm512_mask_storeu_ps(p, FirstN(n), a.v); }
inline Vec Mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec Add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec Sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec Div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
/// a > b ? a : b, so a NaN in b stays.
inline Vec Max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec Min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec Abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
/// |magnitude| must be magnitude: its sign bit is clear.
inline Vec WithSignOf(Vec magnitude, Vec sign) {
  const __m512i s = _mm512_and_si512(_mm512_castps_si512(sign.v), _mm512_set1_epi32(INT32_MIN));
  return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude.v), s))};
}
/// a < b ? x : y.
inline Vec IfLess(Vec a, Vec b, Vec x, Vec y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
/// 2^n of t = n + 1.5 * 2^23.
inline Vec Pow2(Vec t) {
  const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3F800000)))};
}
/// Sixteen bf16 values, and the first n of them.
inline Vec LoadBf16(const void* p) {
  const __m256i h = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline Vec LoadBf16N(const void* p, std::int64_t n) {
  const __m256i h = _mm256_maskz_loadu_epi16(FirstN(n), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
/// The values of sixteen 4-bit codes, times `scale`.
struct Mx4Table {
  __m512 value;
};
inline Mx4Table MakeMx4Table(float scale) {
  const __m512 e2m1 = _mm512_setr_ps(0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -0.5f, -1.f,
                                     -1.5f, -2.f, -3.f, -4.f, -6.f);
  return {_mm512_mul_ps(e2m1, _mm512_set1_ps(scale))};
}
/// Sixteen values from 8 bytes, low nibble first.
inline Vec LoadMx4(const std::uint8_t* p, const Mx4Table& t) {
  const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i low = _mm512_broadcastd_epi32(_mm_loadu_si32(p));
  const __m512i both = _mm512_mask_broadcastd_epi32(low, 0xFF00, _mm_loadu_si32(p + 4));
  return {_mm512_permutexvar_ps(_mm512_srlv_epi32(both, shift), t.value)};
}
/// The same values in the order 0, 8, 1, 9, .. 7, 15, which costs two operations fewer.
inline Vec LoadMx4Turned(const std::uint8_t* p, const Mx4Table& t) {
  const __m512i turn = _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28);
  std::int64_t codes;
  __builtin_memcpy(&codes, p, 8);
  return {_mm512_permutexvar_ps(_mm512_rorv_epi64(_mm512_set1_epi64(codes), turn), t.value)};
}
inline Vec Turn(Vec a) {
  const __m512i from = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  return {_mm512_permutexvar_ps(from, a.v)};
}
inline Vec TurnBack(Vec a) {
  const __m512i from = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return {_mm512_permutexvar_ps(from, a.v)};
}
/// a * b + c, rounded once.
inline Vec Fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
/// c - a * b, rounded once.
inline Vec Fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
/// Sum of each of 16 vectors in DotOrder: lane 4 i + r of the result is the sum of a[4 r + i].
inline Vec Sum16(const Vec* a) {
  __m512 s8[8], s4[4], s2[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 x = a[2 * i].v, y = a[2 * i + 1].v;
    s8[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xEE));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 x = s8[2 * i], y = s8[2 * i + 1];
    s4[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 x = s4[2 * i], y = s4[2 * i + 1];
    s2[i] = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xEE));
  }
  return {
      _mm512_add_ps(_mm512_shuffle_ps(s2[0], s2[1], 0x88), _mm512_shuffle_ps(s2[0], s2[1], 0xDD))};
}
inline float Sum(Vec a) {  // DotOrder: lane l with l + 8, + 4, + 2, + 1
  const __m256 lo = _mm512_castps512_ps256(a.v);
  const __m256 hi = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 s8 = _mm256_add_ps(lo, hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

#elif defined(__AVX2__)

struct Vec {
  __m256 lo, hi;
};
inline Vec Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec Set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void Store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
/// Sixteen set lanes, then sixteen clear ones: a window into it masks the first n < 16.
alignas(64) constexpr std::int32_t kMask[32] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                                -1, -1, -1, -1, -1, -1, -1, -1};
inline __m256i Mask(std::int64_t from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kMask + from));
}
inline Vec LoadN(const float* p, std::int64_t n) {
  return {_mm256_maskload_ps(p, Mask(16 - n)), _mm256_maskload_ps(p + 8, Mask(24 - n))};
}
inline void StoreN(float* p, Vec a, std::int64_t n) {
  _mm256_maskstore_ps(p, Mask(16 - n), a.lo);
  _mm256_maskstore_ps(p + 8, Mask(24 - n), a.hi);
}
inline Vec Mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec Add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec Sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec Div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec Max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec Min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec Abs(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline Vec WithSignOf(Vec magnitude, Vec sign) {
  const __m256 bit = _mm256_set1_ps(-0.f);
  return {_mm256_or_ps(magnitude.lo, _mm256_and_ps(bit, sign.lo)),
          _mm256_or_ps(magnitude.hi, _mm256_and_ps(bit, sign.hi))};
}
inline Vec IfLess(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline __m256 Pow2Half(__m256 t) {
  const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3F800000)));
}
inline Vec Pow2(Vec t) { return {Pow2Half(t.lo), Pow2Half(t.hi)}; }
inline __m256 Bf16Half(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline Vec LoadBf16(const void* p) {
  const auto* q = static_cast<const __m128i*>(p);
  return {Bf16Half(_mm_loadu_si128(q)), Bf16Half(_mm_loadu_si128(q + 1))};
}
inline Vec LoadBf16N(const void* p, std::int64_t n) {
  std::uint16_t t[16] = {};
  __builtin_memcpy(t, p, 2 * static_cast<std::size_t>(n));
  return LoadBf16(t);
}
struct Mx4Table {
  __m256 value;
};
inline Mx4Table MakeMx4Table(float scale) {
  const __m256 e2m1 = _mm256_setr_ps(0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
  return {_mm256_mul_ps(e2m1, _mm256_set1_ps(scale))};
}
inline __m256 Mx4Half(const std::uint8_t* p, const Mx4Table& t) {
  std::int32_t codes;
  __builtin_memcpy(&codes, p, 4);
  const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i c = _mm256_srlv_epi32(_mm256_set1_epi32(codes), shift);
  const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(c, 28));
  return _mm256_or_ps(_mm256_permutevar8x32_ps(t.value, c),
                      _mm256_and_ps(sign, _mm256_set1_ps(-0.f)));
}
inline Vec LoadMx4(const std::uint8_t* p, const Mx4Table& t) {
  return {Mx4Half(p, t), Mx4Half(p + 4, t)};
}
inline Vec Fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec Fnma(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline float Sum(Vec a) {
  const __m256 s8 = _mm256_add_ps(a.lo, a.hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

#elif defined(__aarch64__) && !defined(K3_SCALAR)

struct Vec {
  float32x4_t v[4];
};
template <class F>
inline Vec Quarters(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline Vec Set(float x) {
  return Quarters([=](int) { return vdupq_n_f32(x); });
}
inline Vec Zero() { return Set(0.f); }
inline Vec Load(const float* p) {
  return Quarters([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline void Store(float* p, Vec a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline Vec LoadN(const float* p, std::int64_t n) {
  float t[16] = {};
  for (std::int64_t i = 0; i < n; ++i) t[i] = p[i];
  return Load(t);
}
inline void StoreN(float* p, Vec a, std::int64_t n) {
  float t[16];
  Store(t, a);
  for (std::int64_t i = 0; i < n; ++i) p[i] = t[i];
}
inline Vec Mul(Vec a, Vec b) {
  return Quarters([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline Vec Add(Vec a, Vec b) {
  return Quarters([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline Vec Sub(Vec a, Vec b) {
  return Quarters([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline Vec Div(Vec a, Vec b) {
  return Quarters([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline Vec Abs(Vec a) {
  return Quarters([&](int i) { return vabsq_f32(a.v[i]); });
}
inline Vec Max(Vec a, Vec b) {  // not vmaxq: a NaN in a must lose
  return Quarters([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline Vec Min(Vec a, Vec b) {
  return Quarters([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline Vec WithSignOf(Vec magnitude, Vec sign) {
  const uint32x4_t bit = vdupq_n_u32(0x80000000u);
  return Quarters([&](int i) { return vbslq_f32(bit, sign.v[i], magnitude.v[i]); });
}
inline Vec IfLess(Vec a, Vec b, Vec x, Vec y) {
  return Quarters([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), x.v[i], y.v[i]); });
}
inline Vec Pow2(Vec t) {
  return Quarters([&](int i) {
    const uint32x4_t n = vshlq_n_u32(vreinterpretq_u32_f32(t.v[i]), 23);
    return vreinterpretq_f32_u32(vaddq_u32(n, vdupq_n_u32(0x3F800000u)));
  });
}
inline Vec LoadBf16(const void* p) {
  const auto* bytes = static_cast<const std::uint8_t*>(p);
  return Quarters([=](int i) {
    const uint16x4_t h = vreinterpret_u16_u8(vld1_u8(bytes + 8 * i));
    return vreinterpretq_f32_u32(vshll_n_u16(h, 16));
  });
}
inline Vec LoadBf16N(const void* p, std::int64_t n) {
  std::uint8_t t[32] = {};
  __builtin_memcpy(t, p, 2 * static_cast<std::size_t>(n));
  return LoadBf16(t);
}
struct Mx4Table {
  float value[16];
};
inline Mx4Table MakeMx4Table(float scale) {
  constexpr float kE2m1[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  Mx4Table t;
  for (int c = 0; c < 8; ++c) t.value[c] = kE2m1[c] * scale, t.value[c + 8] = -t.value[c];
  return t;
}
inline Vec LoadMx4(const std::uint8_t* p, const Mx4Table& t) {
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = t.value[(p[i / 2] >> (4 * (i % 2))) & 15];
  return Load(v);
}
inline Vec Fma(Vec a, Vec b, Vec c) {
  return Quarters([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline Vec Fnma(Vec a, Vec b, Vec c) {
  return Quarters([&](int i) { return vfmsq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline float Sum(Vec a) {
  const float32x4_t s8a = vaddq_f32(a.v[0], a.v[2]), s8b = vaddq_f32(a.v[1], a.v[3]);
  const float32x4_t s4 = vaddq_f32(s8a, s8b);
  const float32x2_t s2 = vadd_f32(vget_low_f32(s4), vget_high_f32(s4));
  return vget_lane_f32(s2, 0) + vget_lane_f32(s2, 1);
}

#else

struct Vec {
  float v[16];
};
template <class F>
inline Vec Map(F f) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
inline Vec Zero() {
  return Map([](int) { return 0.f; });
}
inline Vec Set(float x) {
  return Map([=](int) { return x; });
}
inline Vec Load(const float* p) {
  return Map([=](int i) { return p[i]; });
}
inline void Store(float* p, Vec a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline Vec LoadN(const float* p, std::int64_t n) {
  return Map([=](int i) { return i < n ? p[i] : 0.f; });
}
inline void StoreN(float* p, Vec a, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) p[i] = a.v[i];
}
inline Vec Mul(Vec a, Vec b) {
  return Map([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec Add(Vec a, Vec b) {
  return Map([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec Sub(Vec a, Vec b) {
  return Map([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec Div(Vec a, Vec b) {
  return Map([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec Max(Vec a, Vec b) {
  return Map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec Min(Vec a, Vec b) {
  return Map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec Abs(Vec a) {
  return Map([&](int i) { return __builtin_fabsf(a.v[i]); });
}
inline Vec WithSignOf(Vec magnitude, Vec sign) {
  return Map([&](int i) { return __builtin_copysignf(magnitude.v[i], sign.v[i]); });
}
inline Vec IfLess(Vec a, Vec b, Vec x, Vec y) {
  return Map([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
inline Vec Pow2(Vec t) {
  return Map([&](int i) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &t.v[i], 4);
    bits = (bits << 23) + 0x3F800000u;
    float y;
    __builtin_memcpy(&y, &bits, 4);
    return y;
  });
}
inline Vec LoadBf16N(const void* p, std::int64_t n) {
  const auto* bytes = static_cast<const unsigned char*>(p);
  return Map([=](int i) {  // byte loads: checkpoint data may be unaligned
    if (i >= n) return 0.f;
    const std::uint32_t bits =
        (std::uint32_t{bytes[2 * i]} << 16) | (std::uint32_t{bytes[2 * i + 1]} << 24);
    float y;
    __builtin_memcpy(&y, &bits, 4);
    return y;
  });
}
inline Vec LoadBf16(const void* p) { return LoadBf16N(p, 16); }
struct Mx4Table {
  float value[16];
};
inline Mx4Table MakeMx4Table(float scale) {
  constexpr float kE2m1[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  Mx4Table t;
  for (int c = 0; c < 8; ++c) t.value[c] = kE2m1[c] * scale, t.value[c + 8] = -t.value[c];
  return t;
}
inline Vec LoadMx4(const std::uint8_t* p, const Mx4Table& t) {
  return Map([&](int i) { return t.value[(p[i / 2] >> (4 * (i % 2))) & 15]; });
}
inline Vec Fma(Vec a, Vec b, Vec c) {
  return Map([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline Vec Fnma(Vec a, Vec b, Vec c) {
  return Map([&](int i) { return __builtin_fmaf(-a.v[i], b.v[i], c.v[i]); });
}
inline float Sum(Vec a) {
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) a.v[i] += a.v[i + step];
  }
  return a.v[0];
}

#endif

/// n <= 16 lanes; the full case avoids the masked path.
inline Vec LoadTail(const float* p, std::int64_t n) { return n >= kLanes ? Load(p) : LoadN(p, n); }
inline void StoreTail(float* p, Vec a, std::int64_t n) {
  if (n >= kLanes) {
    Store(p, a);
  } else {
    StoreN(p, a, n);
  }
}

}  // namespace k3::cpu::K3_ISA
