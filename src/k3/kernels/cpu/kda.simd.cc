// Kimi Delta Attention of one head: the token recurrence and the chunkwise form, in f32.
#include <cstddef>

#include "k3/kernels/cpu/simd_functions.h"
#include "k3/kernels/cpu/vec_math.h"

namespace k3::cpu::K3_ISA {
namespace {

constexpr std::int64_t kChunk = 16;
/// Columns handled together; 32 KB of state at K = 128.
constexpr std::int64_t kPanelLanes = 4 * kLanes;
#if defined(__AVX512F__)
constexpr std::int64_t kWideLanes = 8 * kLanes;  // columns of a run that is too short to copy
#else
constexpr std::int64_t kWideLanes = 4 * kLanes;
#endif
constexpr std::int64_t kPanelKeys = 128;  // rows of a panel that stays in level-one cache

inline std::int64_t At(std::size_t i, std::int64_t stride) {
  return static_cast<std::int64_t>(i) * stride;
}

/// Lanes of vector w when `width` columns are left.
inline std::int64_t LanesOf(std::size_t w, std::int64_t width) {
  const std::int64_t left = width - At(w, kLanes);
  return left < kLanes ? left : kLanes;
}

/// Rows that are fetched ahead where the state is used in place.
constexpr std::int64_t kAheadKeys = 8;

/// W vectors of columns, from column c on, of the state at `s` with row stride `ld`, over all
/// tokens: columns never meet. One sweep a token: the update of token t and the read of token t + 1
/// share it. `width` columns are there, and count where they do not fill the vectors.
template <std::size_t W, bool kFull, bool kInPlace>
__attribute__((always_inline)) inline void KdaColumns(const KdaHead& h, std::int64_t c,
                                                      std::int64_t width, float* s,
                                                      std::int64_t ld) {
  Vec u[W], o[W];
  auto lanes_of = [&](std::size_t w) { return kFull ? kLanes : LanesOf(w, width); };
  auto load_v = [&](std::int64_t t, Vec* to) {
    for (std::size_t w = 0; w < W; ++w) {
      to[w] = LoadTail(h.v + t * h.ld_v + c + At(w, kLanes), lanes_of(w));
    }
  };
  auto fetch = [&](std::int64_t d, std::size_t w) {
    if (kInPlace) __builtin_prefetch(s + (d + kAheadKeys) * ld + At(w, kLanes));
  };
  auto times_beta = [&](std::int64_t t) {
    const Vec beta = Set(h.beta[t * h.ld_beta]);
    for (std::size_t w = 0; w < W; ++w) u[w] = Mul(u[w], beta);
  };
  load_v(0, u);
  for (std::int64_t d = 0; d < h.K; ++d) {
    const Vec decay = Set(h.alpha[d]), key = Set(h.k[d]);
    for (std::size_t w = 0; w < W; ++w) {
      fetch(d, w);
      const Vec x = LoadTail(s + d * ld + At(w, kLanes), lanes_of(w));
      u[w] = Fnma(Mul(x, decay), key, u[w]);
    }
  }
  times_beta(0);
  for (std::int64_t t = 0; t < h.T; ++t) {
    const float *q = h.q + t * h.ld_q, *k = h.k + t * h.ld_k;
    for (std::size_t w = 0; w < W; ++w) o[w] = Zero();
    auto sweep = [&](auto decayed, auto leave) {
      for (std::int64_t d = 0; d < h.K; ++d) {
        float* row = s + d * ld;
        const Vec key = Set(k[d]), query = Set(q[d]);
        for (std::size_t w = 0; w < W; ++w) {
          const std::int64_t lanes = lanes_of(w);
          fetch(d, w);
          const Vec x = Fma(key, u[w], decayed(d, LoadTail(row + At(w, kLanes), lanes)));
          o[w] = Fma(x, query, o[w]);
          StoreTail(row + At(w, kLanes), leave(d, w, x), lanes);
        }
      }
    };
    auto decay_now = [&](std::int64_t d, Vec x) { return Mul(x, Set(h.alpha[d])); };
    auto as_is = [](std::int64_t, Vec x) { return x; };
    auto keep = [](std::int64_t, std::size_t, Vec x) { return x; };
    if (t + 1 == h.T) {
      if (t == 0) {
        sweep(decay_now, keep);
      } else {
        sweep(as_is, keep);
      }
    } else {
      Vec next[W];
      load_v(t + 1, next);
      const float *alpha2 = h.alpha + (t + 1) * h.ld_alpha, *k2 = h.k + (t + 1) * h.ld_k;
      auto decay_next = [&](std::int64_t d, std::size_t w, Vec x) {
        const Vec y = Mul(x, Set(alpha2[d]));
        next[w] = Fnma(y, Set(k2[d]), next[w]);
        return y;
      };
      if (t == 0) {
        sweep(decay_now, decay_next);
      } else {
        sweep(as_is, decay_next);
      }
      for (std::size_t w = 0; w < W; ++w) u[w] = next[w];
      times_beta(t + 1);
    }
    for (std::size_t w = 0; w < W; ++w) {
      StoreTail(h.o + t * h.ld_o + c + At(w, kLanes), o[w], lanes_of(w));
    }
  }
}

/// Copies a panel of 64 columns between the state and dense scratch.
inline void CopyPanel(const float* from, std::int64_t ld_from, std::int64_t K, float* to,
                      std::int64_t ld_to) {
  for (std::int64_t d = 0; d < K; ++d) {
    for (std::int64_t c = 0; c < kPanelLanes; c += kLanes) {
      Store(to + d * ld_to + c, Load(from + d * ld_from + c));
    }
  }
}

}  // namespace

void KdaRecurrent(const KdaHead& h) {
  std::int64_t c = 0;
  // Rows of the state are a power of two apart and would meet in few cache sets; long runs work on
  // a dense copy. A few tokens pass over whole rows in place, which reads memory in order.
  if (h.T >= 4 && h.K <= kPanelKeys) {
    alignas(64) float panel[kPanelKeys * kPanelLanes];
    for (; c + kPanelLanes <= h.V; c += kPanelLanes) {
      CopyPanel(h.S + c, h.V, h.K, panel, kPanelLanes);
      KdaColumns<4, true, false>(h, c, kPanelLanes, panel, kPanelLanes);
      CopyPanel(panel, kPanelLanes, h.K, h.S + c, h.V);
    }
  }
  for (; c + kWideLanes <= h.V; c += kWideLanes) {
    KdaColumns<kWideLanes / kLanes, true, true>(h, c, kWideLanes, h.S + c, h.V);
  }
  for (; c + kPanelLanes <= h.V; c += kPanelLanes) {
    KdaColumns<4, true, true>(h, c, kPanelLanes, h.S + c, h.V);
  }
  for (; c < h.V; c += kLanes) {
    KdaColumns<1, false, true>(h, c, h.V - c < kLanes ? h.V - c : kLanes, h.S + c, h.V);
  }
}

namespace {

/// Operands of one segment of C tokens, with decays relative to its middle token m:
///   kd = k exp(G - G_m), qd = q exp(G - G_m), ki = k exp(G_m - G), f0 = exp(G_m),
///   f1 = exp(G_C - G_m), where G sums g from the segment's first token on. Rows are padded with
///   zeros to a multiple of 16 keys, tokens to a multiple of 4.
struct Segment {
  std::int64_t C, rows, K, V;                    // K padded
  alignas(64) float a[2 * kChunk * kMaxKdaKey];  // kd, then qd
  alignas(64) float ki[kChunk * kMaxKdaKey];
  alignas(64) float f0[kMaxKdaKey], f1[kMaxKdaKey];
  alignas(64) float scores[2 * kChunk * kChunk];  // kd ki^T, then qd ki^T
  alignas(64) float state[kMaxKdaKey * kPanelLanes], x[2 * kChunk * kPanelLanes],
      u[kChunk * kPanelLanes];

  const float* kd(std::int64_t r) const { return a + r * K; }
  float* qd(std::int64_t r) { return a + (rows + r) * K; }
};

void Prepare(const KdaHead& h, std::int64_t t0, Segment& s) {
  const std::int64_t middle = (s.C - 1) / 2;
  for (std::int64_t d = 0; d < s.K; d += kLanes) {
    const std::int64_t lanes = h.K - d < kLanes ? h.K - d : kLanes;
    Vec sum[kChunk];
    for (std::int64_t r = 0; r < s.C; ++r) {
      const Vec g = LoadTail(h.g + (t0 + r) * h.ld_g + d, lanes);
      sum[r] = r == 0 ? g : Add(sum[r - 1], g);
    }
    Store(s.f0 + d, Exp(sum[middle]));
    Store(s.f1 + d, Exp(Sub(sum[s.C - 1], sum[middle])));
    for (std::int64_t r = 0; r < s.rows; ++r) {
      Vec kd = Zero(), qd = Zero(), ki = Zero();
      if (r < s.C) {
        const Vec e = Exp(Sub(sum[r], sum[middle]));
        const Vec k = LoadTail(h.k + (t0 + r) * h.ld_k + d, lanes);
        kd = Mul(k, e);
        ki = Div(k, e);
        qd = Mul(LoadTail(h.q + (t0 + r) * h.ld_q + d, lanes), e);
      }
      Store(s.a + r * s.K + d, kd);
      Store(s.a + (s.rows + r) * s.K + d, qd);
      Store(s.ki + r * s.K + d, ki);
    }
  }
  for (std::int64_t r = 0; r < 2 * s.rows; r += 4) {  // blocks above the diagonal are not needed
    const std::int64_t columns = (r < s.rows ? r : r - s.rows) + 4;
    DotBlock(s.a + r * s.K, s.K, 4, s.ki, s.K, columns, s.K, s.scores + r * kChunk, kChunk);
  }
}

/// rows [r, r + 4) of (kd; qd) times the panel of the state, to x.
void TimesState(Segment& s, std::int64_t r) {
  Vec acc[4][4];
  for (auto& row : acc) {
    for (auto& v : row) v = Zero();
  }
  for (std::int64_t d = 0; d < s.K; ++d) {
    Vec b[4];
    for (std::size_t w = 0; w < 4; ++w) b[w] = Load(s.state + d * kPanelLanes + At(w, kLanes));
    for (std::size_t i = 0; i < 4; ++i) {
      const Vec p = Set(s.a[(r + At(i, 1)) * s.K + d]);
      for (std::size_t w = 0; w < 4; ++w) acc[i][w] = Fma(p, b[w], acc[i][w]);
    }
  }
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t w = 0; w < 4; ++w) {
      Store(s.x + (r + At(i, 1)) * kPanelLanes + At(w, kLanes), acc[i][w]);
    }
  }
}

/// u = (1 + diag(beta) tril(kd ki^T, -1))^-1 diag(beta) (v - kd S), o = qd S + tril(qd ki^T) u.
void Substitute(const KdaHead& h, std::int64_t t0, std::int64_t c, std::int64_t width, Segment& s) {
  auto sum = [&](std::int64_t r, const float* scores, std::int64_t n, Vec* acc, bool subtract) {
    for (std::int64_t j = 0; j < n; ++j) {
      const Vec p = Set(subtract ? -scores[r * kChunk + j] : scores[r * kChunk + j]);
      for (std::size_t w = 0; w < 4; ++w) {
        acc[w] = Fma(p, Load(s.u + j * kPanelLanes + At(w, kLanes)), acc[w]);
      }
    }
  };
  for (std::int64_t r = 0; r < s.C; ++r) {
    Vec acc[4];
    for (std::size_t w = 0; w < 4; ++w) {
      const std::int64_t lanes = LanesOf(w, width);
      const Vec v =
          lanes > 0 ? LoadTail(h.v + (t0 + r) * h.ld_v + c + At(w, kLanes), lanes) : Zero();
      acc[w] = Sub(v, Load(s.x + r * kPanelLanes + At(w, kLanes)));
    }
    sum(r, s.scores, r, acc, true);
    const Vec beta = Set(h.beta[(t0 + r) * h.ld_beta]);
    for (std::size_t w = 0; w < 4; ++w) {
      Store(s.u + r * kPanelLanes + At(w, kLanes), Mul(acc[w], beta));
    }
    for (std::size_t w = 0; w < 4; ++w) {
      acc[w] = Load(s.x + (s.rows + r) * kPanelLanes + At(w, kLanes));
    }
    sum(r, s.scores + s.rows * kChunk, r + 1, acc, false);
    for (std::size_t w = 0; w < 4; ++w) {
      const std::int64_t lanes = LanesOf(w, width);
      if (lanes > 0) StoreTail(h.o + (t0 + r) * h.ld_o + c + At(w, kLanes), acc[w], lanes);
    }
  }
}

/// S = diag(f1) (S' + ki^T u) for keys [d, d + 4).
void UpdateState(const KdaHead& h, std::int64_t d, std::int64_t c, std::int64_t width, Segment& s) {
  Vec acc[4][4];
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t w = 0; w < 4; ++w) {
      acc[i][w] = Load(s.state + (d + At(i, 1)) * kPanelLanes + At(w, kLanes));
    }
  }
  for (std::int64_t r = 0; r < s.C; ++r) {
    Vec u[4];
    for (std::size_t w = 0; w < 4; ++w) u[w] = Load(s.u + r * kPanelLanes + At(w, kLanes));
    for (std::size_t i = 0; i < 4; ++i) {
      const Vec k = Set(s.ki[r * s.K + d + At(i, 1)]);
      for (std::size_t w = 0; w < 4; ++w) acc[i][w] = Fma(k, u[w], acc[i][w]);
    }
  }
  for (std::size_t i = 0; i < 4 && d + At(i, 1) < h.K; ++i) {
    const Vec f = Set(s.f1[d + At(i, 1)]);
    for (std::size_t w = 0; w < 4; ++w) {
      const std::int64_t lanes = LanesOf(w, width);
      float* to = h.S + (d + At(i, 1)) * h.V + c + At(w, kLanes);
      if (lanes > 0) StoreTail(to, Mul(acc[i][w], f), lanes);
    }
  }
}

/// The state's panel scaled by f0; keys and columns beyond the end are zero.
void LoadState(const KdaHead& h, std::int64_t c, std::int64_t width, Segment& s) {
  for (std::int64_t d = 0; d < s.K; ++d) {
    for (std::size_t w = 0; w < 4; ++w) {
      const std::int64_t lanes = LanesOf(w, width);
      const Vec x = d < h.K && lanes > 0
                        ? Mul(LoadTail(h.S + d * h.V + c + At(w, kLanes), lanes), Set(s.f0[d]))
                        : Zero();
      Store(s.state + d * kPanelLanes + At(w, kLanes), x);
    }
  }
}

/// Tokens from t0 on, at most `most`, over which no channel decays by more than e^-40 after the
/// first: the largest factor then stays far from the ends of f32.
std::int64_t SegmentLength(const KdaHead& h, std::int64_t t0, std::int64_t most) {
  constexpr float kLimit = -40.f;
  std::int64_t length = most;
  for (std::int64_t d = 0; d < h.K; d += kLanes) {
    const std::int64_t lanes = h.K - d < kLanes ? h.K - d : kLanes;
    Vec sum = Zero();
    for (std::int64_t r = 1; r < length; ++r) {
      sum = Add(sum, LoadTail(h.g + (t0 + r) * h.ld_g + d, lanes));
      float lane[16];
      Store(lane, sum);
      float low = 0.f;
      for (const float x : lane) low = x < low ? x : low;
      if (low < kLimit) {
        length = r;
        break;
      }
    }
  }
  return length;
}

}  // namespace

void KdaChunk(const KdaHead& h, bool bounded) {
  Segment s;
  s.K = (h.K + kLanes - 1) / kLanes * kLanes;
  s.V = h.V;
  for (std::int64_t t0 = 0; t0 < h.T; t0 += s.C) {
    const std::int64_t left = h.T - t0;
    s.C = bounded ? left : SegmentLength(h, t0, left);
    s.rows = (s.C + 3) / 4 * 4;
    Prepare(h, t0, s);
    for (std::int64_t c = 0; c < h.V; c += kPanelLanes) {
      const std::int64_t width = h.V - c;
      LoadState(h, c, width, s);
      for (std::int64_t r = 0; r < 2 * s.rows; r += 4) TimesState(s, r);
      Substitute(h, t0, c, width, s);
      for (std::int64_t d = 0; d < h.K; d += 4) UpdateState(h, d, c, width, s);
    }
  }
}

}  // namespace k3::cpu::K3_ISA
