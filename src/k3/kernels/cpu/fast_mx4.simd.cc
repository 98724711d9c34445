// One row of x times MXFP4 weights, with the bits of the tile product and without its decoding.
// On the grid of RoundToGrid both sides of a block of 32 are whole numbers: x in 15 bits as two
// signed bytes, twice a code in 4 bits and a sign. Their sum is exact here and in a tile step; what
// is rounded is only its addition to the sum of the blocks before.
//
// Rows are read one after the other: memory in order is what the processor's own prefetching
// understands. 16 rows are lanes only when their sums are scaled and added.
#include <cstddef>

#include "k3/kernels/cpu/simd_functions.h"
#include "k3/kernels/cpu/vec16.h"

#if defined(__AMX_BF16__)
#include "k3/kernels/cpu/mx4_row.h"

namespace k3::cpu::K3_ISA {
namespace {

constexpr std::int64_t kRows = 16;
constexpr std::int64_t kChunk = 64;          // quads whose sums wait in the nearest cache
constexpr std::int64_t kQuadBytes = 5 * 64;  // of x, for four blocks of 32
constexpr std::int64_t kAheadBytes = 6144;   // codes fetched into level two

/// A packed row: this, the quads, and for every block what to add to the exponent of its scales.
/// A quad is four vectors with a 128-bit lane for each block: upper and lower bytes of the x that
/// meet low nibbles, then of those that meet high ones. Then a vector that undoes, when added to
/// the sums, that codes are unsigned. Blocks beyond the end are zero.
struct alignas(64) Mx4Header {
  int scale_low, scale_high;  // scales that keep everything in the normal range
};

inline std::int64_t Quads(std::int64_t steps) { return (steps + 3) / 4; }

/// Twice the value of a code, plus 12, at all bytes that share its low four bits.
inline __m512i Codes() {
  return _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

/// Dword i of row r, in each 128-bit lane, becomes dword r of to[i].
inline void Transpose4(const __m512i (&r)[4], __m512i (&to)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
  to[0] = _mm512_unpacklo_epi64(a, c);
  to[1] = _mm512_unpackhi_epi64(a, c);
  to[2] = _mm512_unpacklo_epi64(b, d);
  to[3] = _mm512_unpackhi_epi64(b, d);
}

/// Up to 16 scale bytes of 16 rows, `stride` apart: dword j of row i becomes lane i of to[j].
inline void GatherScales(const std::uint8_t* p, std::int64_t stride, __mmask16 bytes,
                         __m512i (&to)[4]) {
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
  Transpose4(r, to);
}

/// One row times a quad: the dwords of a 128-bit lane are parts of its block's sum.
inline __m512i RowSums(const std::uint8_t* x, __m512i codes) {
  const __m512i even = _mm512_permutexvar_epi8(codes, Codes());
  const __m512i odd = _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), Codes());
  __m512i upper = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, _mm512_load_si512(x));
  __m512i lower = _mm512_dpbusd_epi32(_mm512_load_si512(x + 256), even, _mm512_load_si512(x + 64));
  upper = _mm512_dpbusd_epi32(upper, odd, _mm512_load_si512(x + 128));
  lower = _mm512_dpbusd_epi32(lower, odd, _mm512_load_si512(x + 192));
  return _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
}

/// Of four rows: dword r of a lane becomes the sum of row r's block.
inline __m512i FourRows(__m512i r0, __m512i r1, __m512i r2, __m512i r3) {
  const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(r0, r1), _mm512_unpackhi_epi32(r0, r1));
  const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(r2, r3), _mm512_unpackhi_epi32(r2, r3));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

/// Of four times four rows: to[j] holds block j's sums of all sixteen.
inline void SixteenRows(__m512i f0, __m512i f1, __m512i f2, __m512i f3, __m512i (&to)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(f0, f1, 0x44), b = _mm512_shuffle_i32x4(f2, f3, 0x44);
  const __m512i c = _mm512_shuffle_i32x4(f0, f1, 0xEE), d = _mm512_shuffle_i32x4(f2, f3, 0xEE);
  to[0] = _mm512_shuffle_i32x4(a, b, 0x88);
  to[1] = _mm512_shuffle_i32x4(a, b, 0xDD);
  to[2] = _mm512_shuffle_i32x4(c, d, 0x88);
  to[3] = _mm512_shuffle_i32x4(c, d, 0xDD);
}

/// Columns of weight rows: `full` quads, and the rest's dwords.
struct Span {
  std::int64_t full;
  __mmask16 rest;
};
/// fn(q, codes) for every quad of a row.
template <class F>
__attribute__((always_inline)) inline void ForQuads(const std::uint8_t* codes, const Span& span,
                                                    F&& fn) {
  for (std::int64_t q = 0; q < span.full; ++q) {
    _mm_prefetch(codes + 64 * q + kAheadBytes, _MM_HINT_T1);
    fn(q, _mm512_loadu_si512(codes + 64 * q));
  }
  if (span.rest != 0) fn(span.full, _mm512_maskz_loadu_epi32(span.rest, codes + 64 * span.full));
}

/// Adds n blocks of a quad: their sums times the powers of two of scales and x.
inline __m512 AddBlocks(__m512 sum, const __m512i (&block)[4], __m512i scales,
                        const std::uint8_t* powers, std::int64_t n) {
  std::int32_t power[4];
  __builtin_memcpy(power, powers, sizeof power);
#pragma GCC unroll 4
  for (int j = 0; j < n; ++j) {  // byte j to where the exponent is
    const __m512i turned = _mm512_rolv_epi32(scales, _mm512_set1_epi32((23 - 8 * j) & 31));
    const __m512i e = _mm512_add_epi32(_mm512_and_si512(turned, _mm512_set1_epi32(0x7F800000)),
                                       _mm512_set1_epi32(power[j]));
    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(block[j]), _mm512_castsi512_ps(e), sum);
  }
  return sum;
}

/// Block j of a quad of x.
void PackBlock(const float* x, std::int64_t j, int exponent, std::uint8_t* quad) {
  // Values to whole numbers of the grid; a row of wilder values never comes to use.
  const bool usable = exponent > kMx4Bits && exponent <= kMx4Largest;
  const __m512 to_grid =
      _mm512_castsi512_ps(_mm512_set1_epi32(usable ? (2 * 127 + kMx4Bits - exponent) << 23 : 0));
  alignas(64) std::uint8_t rounded[64];
  _mm512_store_si512(rounded, RoundToGrid(x));
  __m512i n[2];
  __m128i upper[2], lower[2];
  for (int i = 0; i < 2; ++i) {
    n[i] = usable ? _mm512_cvtps_epi32(_mm512_mul_ps(LoadBf16(rounded + 32 * i).v, to_grid))
                  : _mm512_setzero_si512();
    upper[i] =
        _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(n[i], _mm512_set1_epi32(128)), 8));
    lower[i] = _mm512_cvtepi32_epi8(n[i]);
  }
  const auto put = [&](const __m128i(&halves)[2], std::uint8_t* to) {  // even ones, then odd ones
    const __m256i turn = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const __m256i both = _mm256_permute4x64_epi64(
        _mm256_shuffle_epi8(_mm256_set_m128i(halves[1], halves[0]), turn), 0xD8);
    _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(both));
    _mm_store_si128(reinterpret_cast<__m128i*>(to + 128), _mm256_extracti128_si256(both, 1));
  };
  put(upper, quad + 16 * j);
  put(lower, quad + 16 * j + 64);
  const int total = _mm512_reduce_add_epi32(_mm512_add_epi32(n[0], n[1]));
  _mm_store_si128(reinterpret_cast<__m128i*>(quad + 256 + 16 * j), _mm_cvtsi32_si128(-12 * total));
}

}  // namespace

std::int64_t Mx4PackBytes(std::int64_t cols) {
  return static_cast<std::int64_t>(sizeof(Mx4Header)) + Quads(cols / 32) * (kQuadBytes + 16);
}

void Mx4Pack(const float* x, std::int64_t cols, std::uint8_t* out) {
  const std::int64_t steps = cols / 32, quads = Quads(steps);
  std::uint8_t* quad = out + sizeof(Mx4Header);
  std::uint8_t* powers = quad + quads * kQuadBytes;
  if (steps % 4 != 0) __builtin_memset(quad + (quads - 1) * kQuadBytes, 0, kQuadBytes);
  int least = 255, most = 0;  // biased exponents of the grid, and of the largest values
  for (std::int64_t s = 0; s < steps; ++s) {
    const int bits = _mm512_cvtsi512_si32(Largest32(x + 32 * s)), exponent = bits >> 23;
    if (bits != 0) {
      least = exponent - kMx4Bits < least ? exponent - kMx4Bits : least;
      most = exponent > most ? exponent : most;
    }
    PackBlock(x + 32 * s, s % 4, exponent, quad + s / 4 * kQuadBytes);
    // Twice a code makes one more than both biases.
    const int power =
        bits == 0 ? 0 : static_cast<int>(static_cast<unsigned>(exponent - kMx4Bits - 128) << 23);
    __builtin_memcpy(powers + 4 * s, &power, 4);
  }
  // Products are multiples of 2^(least - 128) times the scale, and a step's sum is less than
  // 2^(most - 118) times the scale; both must be normal before and after the scale.
  Mx4Header header{129 - least > 3 ? 129 - least : 3, 371 - most < 251 ? 371 - most : 251};
  if (least < 9 || most > kMx4Largest) header.scale_high = -1;
  __builtin_memcpy(out, &header, sizeof header);
}

bool Mx4Normal(const std::uint8_t* packed, const std::uint8_t* scales, std::int64_t n) {
  Mx4Header header;
  __builtin_memcpy(&header, packed, sizeof header);
  if (header.scale_low > header.scale_high) return false;
  const __m512i low = _mm512_set1_epi8(static_cast<char>(header.scale_low));
  const __m512i width = _mm512_set1_epi8(static_cast<char>(header.scale_high - header.scale_low));
  __mmask64 outside = 0;
  for (std::int64_t i = 0; i < n; i += 64) {
    const std::int64_t left = n - i < 64 ? n - i : 64;
    const __mmask64 mask = left == 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    const __m512i v = _mm512_maskz_loadu_epi8(mask, scales + i);
    outside |= _mm512_mask_cmpgt_epu8_mask(mask, _mm512_sub_epi8(v, low), width);
  }
  return outside == 0;
}

void Mx4Rows16(const std::uint8_t* packed, const std::uint8_t* codes, const std::uint8_t* scales,
               std::int64_t steps, float* y) {
  const std::int64_t stride = 16 * steps, quads = Quads(steps);
  const std::uint8_t* x = packed + sizeof(Mx4Header);
  const std::uint8_t* powers = x + quads * kQuadBytes;
  __m512i row[3][kChunk], four[3][kChunk], scale[4];
  __m512 sum = _mm512_setzero_ps();
  for (std::int64_t q0 = 0; q0 < quads; q0 += kChunk, codes += 64 * kChunk) {
    const std::int64_t left = steps - 4 * q0;
    const Span span = left >= 4 * kChunk ? Span{kChunk, 0} : Span{left / 4, FirstN(left % 4 * 4)};
    const std::uint8_t* from = x + q0 * kQuadBytes;
    for (int r = 0; r < kRows; ++r) {
      const std::uint8_t* at = codes + r * stride;
      const auto sums = [&](std::int64_t q, __m512i c) {
        return RowSums(from + q * kQuadBytes, c);
      };
      const auto rows4 = [&](std::int64_t q, __m512i c) {
        return FourRows(row[0][q], row[1][q], row[2][q], sums(q, c));
      };
      if (r % 4 < 3) {
        ForQuads(at, span, [&](std::int64_t q, __m512i c) { row[r % 4][q] = sums(q, c); });
      } else if (r < kRows - 1) {
        ForQuads(at, span, [&](std::int64_t q, __m512i c) { four[r / 4][q] = rows4(q, c); });
      } else {
        ForQuads(at, span, [&](std::int64_t q, __m512i c) {
          const std::int64_t block0 = 4 * (q0 + q), n = steps - block0;
          _mm_prefetch(scales + kRows * steps + 4 * kRows * (q0 + q), _MM_HINT_T1);
          if (q % 4 == 0) {
            GatherScales(scales + block0, steps, n < 16 ? FirstN(n) : __mmask16{0xFFFF}, scale);
          }
          __m512i block[4];
          SixteenRows(four[0][q], four[1][q], four[2][q], rows4(q, c), block);
          sum = AddBlocks(sum, block, scale[q % 4], powers + 4 * block0, n < 4 ? n : 4);
        });
      }
    }
  }
  _mm512_storeu_ps(y, sum);
}

}  // namespace k3::cpu::K3_ISA

#endif
