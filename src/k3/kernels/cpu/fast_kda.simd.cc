// The chunkwise form of Kimi Delta Attention with the matrix tiles of AMX: operands in bf16, state
// and sums in f32. Same algebra as kda.simd.cc, chunks of exactly 16 tokens.
#include <cstddef>

#include "k3/kernels/cpu/simd_functions.h"
#include "k3/kernels/cpu/vec_math.h"

#if defined(__AMX_BF16__)
#include "k3/kernels/cpu/amx_tiles.h"
#include "k3/kernels/cpu/bf16_decode.h"
#endif

namespace k3::cpu::K3_ISA {

#if defined(__AMX_BF16__)

namespace {

constexpr std::int64_t kC = 16;      // tokens of a chunk
constexpr std::int64_t kChunks = 4;  // that a block of columns passes before the next block
constexpr std::int64_t kBlock = 32;  // columns
constexpr std::int64_t kMaxSteps = kMaxKdaKey / 32, kMaxGroups = kMaxKdaKey / 16;
constexpr std::int64_t kHalfTile = 512;

/// One chunk, for all columns. Tiles are 16 rows of 64 bytes. kd and qd: 16 tokens by 32 keys. ki:
/// pairs of keys by tokens. kr: 16 keys by 16 tokens in 32 bytes; a tile row reaches into the next,
/// where u has zeros. Decays are relative to the middle token m:
///   kd = k exp(G - G_m), qd = q exp(G - G_m), ki = k exp(G_m - G), kr = k exp(G_C - G),
///   f0 = exp(G_m), all = exp(G_C).
struct ChunkOperands {
  alignas(64) std::uint8_t kd[kMaxSteps][kTileBytes], qd[kMaxSteps][kTileBytes],
      kr[kMaxGroups * kHalfTile + 64], scores[kTileBytes];
  alignas(64) float f0[kMaxKdaKey], all[kMaxKdaKey], l[kC * kC];
};

/// The state's columns in one dense piece, which stays in the nearest cache, and what a block of
/// columns works with.
struct Panel {
  alignas(64) float s[kMaxKdaKey * kBlock], x[2][kC * 16];
  alignas(64) std::uint8_t state[2][kMaxSteps][kTileBytes], u[2][kTileBytes];
};

inline __m256i Round16(__m512 v) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)); }

/// bf16 of low and high, taking turns: the pairs a tile product multiplies.
inline __m512i Pairs(__m512 low, __m512 high) {
  alignas(64) static constexpr std::uint16_t kTurns[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kTurns),
                                  reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
}

/// e^x for |x| <= 80, within 2^-17 of itself: its products are rounded to 8 bits.
inline __m512 ShortExp(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269504f), magic = _mm512_set1_ps(12582912.f);
  const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(x, log2e, magic), magic);
  const __m512 r = _mm512_fmsub_ps(x, log2e, n);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.00956051021f), r, _mm512_set1_ps(0.0559170392f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240249811f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693121968f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.999999191f));
  return _mm512_scalef_ps(p, n);
}

/// Keys [d, d + 16) of all tokens. Half a tile of ki, still with keys as columns, goes to `ki`.
void PrepareKeys(const KdaHead& h, std::int64_t t0, std::int64_t d, ChunkOperands& s,
                 std::uint8_t* ki) {
  Vec sum[kC];
  for (std::int64_t r = 0; r < kC; ++r) {
    const Vec g = Load(h.g + (t0 + r) * h.ld_g + d);
    sum[r] = r == 0 ? g : Add(sum[r - 1], g);
  }
  const Vec middle = sum[kC / 2 - 1];
  const Vec f1 = Exp(Sub(sum[kC - 1], middle)), f0 = Exp(middle);
  Store(s.f0 + d, f0);
  Store(s.all + d, Mul(f0, f1));
  const std::int64_t step = d / 32, at = 2 * (d % 32);
  Vec kr[kC];
  for (std::int64_t r = 0; r < kC; ++r) {
    const Vec e = {ShortExp(Sub(sum[r], middle).v)}, k = Load(h.k + (t0 + r) * h.ld_k + d);
    const Vec inverse = {_mm512_mul_ps(k.v, _mm512_rcp14_ps(e.v))};
    auto put = [&](std::uint8_t* tile, Vec v) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(tile + 64 * r + at), Round16(v.v));
    };
    put(s.kd[step], Mul(k, e));
    put(s.qd[step], Mul(Load(h.q + (t0 + r) * h.ld_q + d), e));
    put(ki, inverse);
    kr[r] = Mul(inverse, f1);
  }
  __m512i rows[16];
  for (std::int64_t j = 0; j < 8; ++j) {
    rows[j] = Pairs(kr[2 * j].v, kr[2 * j + 1].v);
    rows[j + 8] = _mm512_setzero_si512();
  }
  Transpose16(rows);
  for (int j = 0; j < 16; ++j) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(s.kr + d / 16 * kHalfTile + 32 * j),
                       _mm512_castsi512_si256(rows[j]));
  }
}

/// All of a chunk's operands: l = kd ki^T, scores = tril(qd ki^T) as a left tile.
void Prepare(const KdaHead& h, std::int64_t t0, ChunkOperands& s) {
  alignas(64) std::uint8_t ki[kTileBytes];
  alignas(64) float a[kC * kC];
  _tile_zero(0);
  _tile_zero(1);
  for (std::int64_t d = 0; d < h.K; d += 32) {
    PrepareKeys(h, t0, d, s, ki);
    PrepareKeys(h, t0, d + 16, s, ki);
    __m512i rows[16];
    for (int j = 0; j < 16; ++j) rows[j] = _mm512_load_si512(ki + 64 * j);
    Transpose16(rows);
    for (int j = 0; j < 16; ++j) _mm512_store_si512(ki + 64 * j, rows[j]);
    _tile_loadd(4, s.kd[d / 32], 64);
    _tile_loadd(5, s.qd[d / 32], 64);
    _tile_loadd(6, ki, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
  }
  _tile_stored(0, s.l, 64);
  _tile_stored(1, a, 64);
  for (int r = 0; r < 16; ++r) {
    const auto lower = static_cast<__mmask16>((2u << r) - 1u);
    const __m256i row = Round16(_mm512_maskz_load_ps(lower, a + 16 * r));
    _mm512_store_si512(s.scores + 64 * r, _mm512_zextsi256_si512(row));
  }
}

/// From 32 columns of the state: f0 S to the panel's tiles, exp(G_C) S to the panel.
void DecayState(const float* from, std::int64_t ld, std::int64_t keys, const ChunkOperands& s,
                Panel& p) {
  for (std::int64_t d = 0; d < keys; d += 2) {
    const Vec f0 = Set(s.f0[d]), f1 = Set(s.f0[d + 1]), a0 = Set(s.all[d]), a1 = Set(s.all[d + 1]);
    for (std::int64_t half = 0; half < 2; ++half) {
      const Vec x0 = Load(from + d * ld + 16 * half), x1 = Load(from + (d + 1) * ld + 16 * half);
      _mm512_store_si512(p.state[half][d / 32] + 32 * (d % 32),
                         Pairs(Mul(x0, f0).v, Mul(x1, f1).v));
      Store(p.s + kBlock * d + 16 * half, Mul(x0, a0));
      Store(p.s + kBlock * (d + 1) + 16 * half, Mul(x1, a1));
    }
  }
}

/// u = (1 + diag(beta) tril(l, -1))^-1 diag(beta) (v - x) of 16 columns, as a right tile.
void Substitute(const KdaHead& h, std::int64_t t0, std::int64_t c, const float* x, const float* l,
                std::uint8_t* tile) {
  __m512 u[kC];
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    u[r] = _mm512_sub_ps(_mm512_loadu_ps(h.v + (t0 + r) * h.ld_v + c), _mm512_load_ps(x + 16 * r));
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    u[i] = _mm512_mul_ps(u[i], _mm512_set1_ps(h.beta[(t0 + i) * h.ld_beta]));
#pragma GCC unroll 16
    for (int r = i + 1; r < 16; ++r) {
      u[r] = _mm512_fnmadd_ps(_mm512_set1_ps(l[16 * r + i]), u[i], u[r]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) _mm512_store_si512(tile + 64 * j, Pairs(u[2 * j], u[2 * j + 1]));
}

/// Columns [c, c + 32) over one chunk. Their state comes from `from` and goes to `to`, either of
/// which may be the panel.
void Columns(const KdaHead& h, std::int64_t t0, std::int64_t c, const ChunkOperands& s,
             const float* from, std::int64_t ld_from, float* to, std::int64_t ld_to, Panel& p) {
  DecayState(from, ld_from, h.K, s, p);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t i = 0; i < h.K / 32; ++i) {
    _tile_loadd(4, s.kd[i], 64);
    _tile_loadd(6, p.state[0][i], 64);
    _tile_loadd(7, p.state[1][i], 64);
    _tile_loadd(5, s.qd[i], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, p.x[0], 64);
  _tile_stored(1, p.x[1], 64);
  Substitute(h, t0, c, p.x[0], s.l, p.u[0]);
  Substitute(h, t0, c + 16, p.x[1], s.l, p.u[1]);
  _tile_loadd(4, s.scores, 64);
  _tile_loadd(6, p.u[0], 64);
  _tile_loadd(7, p.u[1], 64);
  _tile_dpbf16ps(2, 4, 6);
  _tile_dpbf16ps(3, 4, 7);
  float* o = h.o + t0 * h.ld_o + c;
  _tile_stored(2, o, 4 * h.ld_o);
  _tile_stored(3, o + 16, 4 * h.ld_o);
  for (std::int64_t d = 0; d < h.K; d += 32) {
    const float *s0 = p.s + kBlock * d, *s1 = s0 + 16 * kBlock;
    float *to0 = to + d * ld_to, *to1 = to0 + 16 * ld_to;
    _tile_loadd(4, s.kr + d / 16 * kHalfTile, 32);
    _tile_loadd(5, s.kr + (d / 16 + 1) * kHalfTile, 32);
    _tile_loadd(0, s0, 4 * kBlock);
    _tile_loadd(1, s0 + 16, 4 * kBlock);
    _tile_loadd(2, s1, 4 * kBlock);
    _tile_loadd(3, s1 + 16, 4 * kBlock);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_stored(0, to0, 4 * ld_to);
    _tile_stored(1, to0 + 16, 4 * ld_to);
    _tile_stored(2, to1, 4 * ld_to);
    _tile_stored(3, to1 + 16, 4 * ld_to);
  }
}

}  // namespace

void AmxKdaChunks(const KdaHead& h) {
  ChunkOperands s[kChunks];
  Panel p;
  for (auto& tile : p.u) __builtin_memset(tile, 0, sizeof tile);
  // What a tile reads beyond the last row meets zeros, but must be a number.
  for (auto& chunk : s) __builtin_memset(chunk.kr + h.K / 16 * kHalfTile, 0, 64);
  const TileConfig config;
  _tile_loadconfig(&config);
  for (std::int64_t t0 = 0; t0 < h.T; t0 += kChunks * kC) {
    const std::int64_t left = (h.T - t0) / kC, n = left < kChunks ? left : kChunks;
    for (std::int64_t i = 0; i < n; ++i) Prepare(h, t0 + i * kC, s[i]);
    for (std::int64_t c = 0; c < h.V; c += kBlock) {
      for (std::int64_t i = 0; i < n; ++i) {
        const bool first = i == 0, last = i == n - 1;
        Columns(h, t0 + i * kC, c, s[i], first ? h.S + c : p.s, first ? h.V : kBlock,
                last ? h.S + c : p.s, last ? h.V : kBlock, p);
      }
    }
  }
  _tile_release();
}

#endif

}  // namespace k3::cpu::K3_ISA
