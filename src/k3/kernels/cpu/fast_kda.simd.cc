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

constexpr std::int64_t kC = 16;  // tokens of a chunk
constexpr std::int64_t kMaxSteps = kMaxKdaKey / 32, kMaxGroups = kMaxKdaKey / 16;

/// Tiles are 16 rows of 64 bytes. kd and qd: 16 tokens by 32 keys. ki: pairs of keys by tokens. kr:
/// 16 keys by 16 tokens, the rest of a row zero. Decays are relative to the middle token m:
///   kd = k exp(G - G_m), qd = q exp(G - G_m), ki = k exp(G_m - G), kr = k exp(G_C - G),
///   f0 = exp(G_m), all = exp(G_C).
struct Operands {
  alignas(64) std::uint8_t kd[kMaxSteps][kTileBytes], qd[kMaxSteps][kTileBytes],
      ki[kMaxSteps][kTileBytes], kr[kMaxGroups][kTileBytes];
  alignas(64) std::uint8_t state[2][kMaxSteps][kTileBytes];  // of two blocks of columns
  alignas(64) std::uint8_t u[2][kTileBytes], scores[kTileBytes];
  alignas(64) float f0[kMaxKdaKey], all[kMaxKdaKey], l[kC * kC], a[kC * kC], x[2][kC * 16];
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

/// Keys [d, d + 16) of all tokens.
void PrepareKeys(const KdaHead& h, std::int64_t t0, std::int64_t d, Operands& s) {
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
    const Vec e = Exp(Sub(sum[r], middle)), k = Load(h.k + (t0 + r) * h.ld_k + d);
    const Vec ki = Div(k, e);
    auto put = [&](std::uint8_t* tile, Vec v) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(tile + 64 * r + at), Round16(v.v));
    };
    put(s.kd[step], Mul(k, e));
    put(s.qd[step], Mul(Load(h.q + (t0 + r) * h.ld_q + d), e));
    put(s.ki[step], ki);
    kr[r] = Mul(ki, f1);
  }
  __m512i rows[16];
  for (std::int64_t j = 0; j < 8; ++j) {
    rows[j] = Pairs(kr[2 * j].v, kr[2 * j + 1].v);
    rows[j + 8] = _mm512_setzero_si512();
  }
  Transpose16(rows);
  for (int j = 0; j < 16; ++j) _mm512_store_si512(s.kr[d / 16] + 64 * j, rows[j]);
}

/// l = kd ki^T, scores = tril(qd ki^T) as a left tile.
void Scores(std::int64_t steps, Operands& s) {
  for (std::int64_t i = 0; i < steps; ++i) {
    __m512i rows[16];
    for (int j = 0; j < 16; ++j) rows[j] = _mm512_load_si512(s.ki[i] + 64 * j);
    Transpose16(rows);
    for (int j = 0; j < 16; ++j) _mm512_store_si512(s.ki[i] + 64 * j, rows[j]);
  }
  _tile_zero(0);
  _tile_zero(1);
  for (std::int64_t i = 0; i < steps; ++i) {
    _tile_loadd(4, s.kd[i], 64);
    _tile_loadd(5, s.qd[i], 64);
    _tile_loadd(6, s.ki[i], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
  }
  _tile_stored(0, s.l, 64);
  _tile_stored(1, s.a, 64);
  for (int r = 0; r < 16; ++r) {
    const auto lower = static_cast<__mmask16>((2u << r) - 1u);
    const __m256i row = Round16(_mm512_maskz_load_ps(lower, s.a + 16 * r));
    _mm512_store_si512(s.scores + 64 * r, _mm512_zextsi256_si512(row));
  }
}

/// Columns [c, c + 16) of the state: f0 S to `tiles`, S = exp(G_C) S.
void DecayState(const KdaHead& h, std::int64_t c, std::uint8_t (*tiles)[kTileBytes],
                const Operands& s) {
  for (std::int64_t d = 0; d < h.K; d += 2) {
    float *s0 = h.S + d * h.V + c, *s1 = s0 + h.V;
    const Vec x0 = Load(s0), x1 = Load(s1);
    _mm512_store_si512(tiles[d / 32] + 32 * (d % 32),
                       Pairs(Mul(x0, Set(s.f0[d])).v, Mul(x1, Set(s.f0[d + 1])).v));
    Store(s0, Mul(x0, Set(s.all[d])));
    Store(s1, Mul(x1, Set(s.all[d + 1])));
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

/// Columns [c, c + 32).
void Columns(const KdaHead& h, std::int64_t t0, std::int64_t c, Operands& s) {
  const std::int64_t steps = h.K / 32, ld_s = 4 * h.V;
  DecayState(h, c, s.state[0], s);
  DecayState(h, c + 16, s.state[1], s);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t i = 0; i < steps; ++i) {
    _tile_loadd(4, s.kd[i], 64);
    _tile_loadd(6, s.state[0][i], 64);
    _tile_loadd(7, s.state[1][i], 64);
    _tile_loadd(5, s.qd[i], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, s.x[0], 64);
  _tile_stored(1, s.x[1], 64);
  Substitute(h, t0, c, s.x[0], s.l, s.u[0]);
  Substitute(h, t0, c + 16, s.x[1], s.l, s.u[1]);
  _tile_loadd(4, s.scores, 64);
  _tile_loadd(6, s.u[0], 64);
  _tile_loadd(7, s.u[1], 64);
  _tile_dpbf16ps(2, 4, 6);
  _tile_dpbf16ps(3, 4, 7);
  float* o = h.o + t0 * h.ld_o + c;
  _tile_stored(2, o, 4 * h.ld_o);
  _tile_stored(3, o + 16, 4 * h.ld_o);
  for (std::int64_t d = 0; d < h.K; d += 32) {
    float *s0 = h.S + d * h.V + c, *s1 = s0 + 16 * h.V;
    _tile_loadd(4, s.kr[d / 16], 64);
    _tile_loadd(5, s.kr[d / 16 + 1], 64);
    _tile_loadd(0, s0, ld_s);
    _tile_loadd(1, s0 + 16, ld_s);
    _tile_loadd(2, s1, ld_s);
    _tile_loadd(3, s1 + 16, ld_s);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_stored(0, s0, ld_s);
    _tile_stored(1, s0 + 16, ld_s);
    _tile_stored(2, s1, ld_s);
    _tile_stored(3, s1 + 16, ld_s);
  }
}

}  // namespace

void AmxKdaChunks(const KdaHead& h) {
  Operands s;
  for (auto& tile : s.u) __builtin_memset(tile, 0, sizeof tile);
  const TileConfig config;
  _tile_loadconfig(&config);
  for (std::int64_t t0 = 0; t0 < h.T; t0 += kC) {
    for (std::int64_t d = 0; d < h.K; d += 16) PrepareKeys(h, t0, d, s);
    Scores(h.K / 32, s);
    for (std::int64_t c = 0; c < h.V; c += 32) Columns(h, t0, c, s);
  }
  _tile_release();
}

#endif

}  // namespace k3::cpu::K3_ISA
