// Conversions to bf16 in AVX-512 registers. Included by *.simd.cc files compiled with AVX512-BF16.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "k3/kernels/cpu/simd_table.h"
#include "k3/kernels/cpu/vec16_bytes.h"

namespace k3::cpu::K3_ISA {

/// 32 f32 values to bf16, nearest even.
inline __m512i RoundToBf16(const float* p) {
  return reinterpret_cast<__m512i>(
      _mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + 16), _mm512_loadu_ps(p)));
}

/// Sixteen scale bytes as what to add to the bf16 bits of a code, twice in each 32-bit lane. Scale
/// bytes below 3 or above 251 leave the normal range of bf16: `odd` has their bits set.
struct Mx4Scales {
  alignas(64) std::uint32_t add[16];
  std::uint32_t odd;
};
inline void ReadScales(const std::uint8_t* scales, std::int64_t n, Mx4Scales& to) {
  const auto mask = static_cast<__mmask16>(n >= 16 ? 0xFFFF : (1u << n) - 1u);
  const __m512i e = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, scales));
  const __m512i shift = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(127)), 7);
  const __m512i low = _mm512_and_si512(shift, _mm512_set1_epi32(0xFFFF));
  _mm512_store_si512(to.add, _mm512_or_si512(low, _mm512_slli_epi32(shift, 16)));
  to.odd = static_cast<std::uint32_t>(_mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(3)) |
                                      _mm512_cmpgt_epi32_mask(e, _mm512_set1_epi32(251)));
}

/// Block j of up to sixteen blocks of 32 codes, as bf16. Exact unless the product leaves the normal
/// range of bf16, where it becomes 0 or infinite.
inline __m512i DecodeMx4ToBf16(const std::uint8_t* codes, const Mx4Scales& scales,
                               const std::uint8_t* scale_bytes, std::int64_t j) {
  // bf16 bits of the sixteen codes; the table is there twice because the index has five bits.
  alignas(64) static constexpr std::uint16_t kBits[32] = {
      0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80,
      0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040,
      0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
  const __m512i table = _mm512_load_si512(kBits);
  // Byte b of a 32-bit lane: its low nibble indexes the low half, its high nibble the high half.
  const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m512i index = _mm512_or_si512(b, _mm512_slli_epi32(b, 12));
  if ((scales.odd >> j & 1u) != 0) {
    if (scale_bytes[j] < 3) return _mm512_setzero_si512();
    const __m512i v = _mm512_permutexvar_epi16(index, table);
    const __mmask32 zero = _mm512_testn_epi16_mask(v, _mm512_set1_epi16(0x7FFF));
    const __m512i infinite =
        _mm512_or_si512(_mm512_and_si512(v, _mm512_set1_epi16(-0x8000)), _mm512_set1_epi16(0x7F80));
    return _mm512_mask_mov_epi16(infinite, zero, v);
  }
  constexpr __mmask32 kNonzero = 0xFEFEFEFEu;
  const __m512i add = _mm512_broadcastd_epi32(_mm_loadu_si32(&scales.add[j]));
  return _mm512_permutexvar_epi16(index, _mm512_mask_add_epi16(table, kNonzero, table, add));
}

/// Columns [k, k + 32) of row r of kFp8 or kInt8 weights as bf16, nearest even. e4m3 codes with
/// powers of two as scales stay exact; an int8 code times its scale has up to 15 bits and loses at
/// most 2^-9 of itself.
inline __m512i DecodeBytesToBf16(const FastWeight& w, std::int64_t r, std::int64_t k,
                                 std::int64_t cols) {
  const std::uint8_t* p = w.data + r * cols + k;
  __m512 low, high, scale;
  if (w.form == FastForm::kInt8) {
    scale = _mm512_set1_ps(Bf16At(w.scales + 2 * ((r * cols + k) / 32)));
    low = LoadI8(p).v, high = LoadI8(p + 16).v;
  } else {
    const std::int64_t block = (w.scale_row + r) / 128 * ((cols + 127) / 128) + k / 128;
    float s;
    __builtin_memcpy(&s, w.scales + 4 * block, 4);
    scale = _mm512_set1_ps(s);
    low = LoadE4m3(p).v, high = LoadE4m3(p + 16).v;
  }
  return reinterpret_cast<__m512i>(
      _mm512_cvtne2ps_pbh(_mm512_mul_ps(high, scale), _mm512_mul_ps(low, scale)));
}

}  // namespace k3::cpu::K3_ISA
