// Sixteen f32 lanes on whatever the instruction set has. Included by *.simd.cc files only.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
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
/// a * b + c, rounded once.
inline Vec Fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
/// c - a * b, rounded once.
inline Vec Fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
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
