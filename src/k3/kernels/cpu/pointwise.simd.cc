// Elementwise loops and the short convolution, in exact-mode arithmetic.
#include "k3/kernels/cpu/simd_functions.h"
#include "k3/kernels/cpu/vec_math.h"

namespace k3::cpu::K3_ISA {
namespace {

/// y[i..] = f(i, lanes) in steps of sixteen; the last step has fewer lanes.
template <class F>
inline void Steps(std::int64_t n, float* y, F f) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(y + i, f([i](const float* p) { return Load(p + i); }));
  if (i < n) {
    const std::int64_t rest = n - i;
    StoreN(y + i, f([i, rest](const float* p) { return LoadN(p + i, rest); }), rest);
  }
}

inline Vec TimesSigmoid(Vec x, Vec gate) {
  const Ratio s = SigmoidRatio(gate);
  return Div(Mul(x, s.over), s.under);
}

}  // namespace

void ExpAll(const float* x, std::int64_t n, float* y) {
  Steps(n, y, [&](auto at) { return Exp(at(x)); });
}
void SigmoidAll(const float* x, std::int64_t n, float* y) {
  Steps(n, y, [&](auto at) { return Sigmoid(at(x)); });
}
void SiluAll(const float* x, std::int64_t n, float* y) {
  Steps(n, y, [&](auto at) { return TimesSigmoid(at(x), at(x)); });
}
void TanhAll(const float* x, std::int64_t n, float* y) {
  Steps(n, y, [&](auto at) { return Tanh(at(x)); });
}
void MulSigmoid(const float* x, const float* gate, std::int64_t n, float* y) {
  Steps(n, y, [&](auto at) { return TimesSigmoid(at(x), at(gate)); });
}
void Scale(const float* x, float r, std::int64_t n, float* y) {
  const Vec vr = Set(r);
  Steps(n, y, [&](auto at) { return Mul(at(x), vr); });
}
void ScaleMul(const float* x, float r, const float* w, std::int64_t n, float* y) {
  const Vec vr = Set(r);
  Steps(n, y, [&](auto at) { return Mul(Mul(at(x), vr), at(w)); });
}
void ScaleMulSigmoid(const float* x, float r, const float* w, const float* gate, std::int64_t n,
                     float* y) {
  const Vec vr = Set(r);
  Steps(n, y, [&](auto at) { return TimesSigmoid(Mul(Mul(at(x), vr), at(w)), at(gate)); });
}
void AddScaled(const float* x, float alpha, const float* y, std::int64_t n, float* out) {
  const Vec va = Set(alpha);
  Steps(n, out, [&](auto at) { return Add(at(x), Mul(va, at(y))); });
}

void GatedActAll(const float* gate, const float* up, std::int64_t n, const ActParams& act,
                 float* y) {
  if (!act.situ) {
    return Steps(n, y, [&](auto at) {
      const Vec g = at(gate);
      return Mul(TimesSigmoid(g, g), at(up));
    });
  }
  const Vec b1 = Set(act.b1), r1 = Set(1.f / act.b1);
  if (act.b2 == 0.f) {
    return Steps(n, y, [&](auto at) {
      const Vec g = at(gate);
      const Ratio t = TanhRatio(Mul(g, r1)), s = SigmoidRatio(g);
      return Mul(Div(Mul(b1, Mul(t.over, s.over)), Mul(t.under, s.under)), at(up));
    });
  }
  const Vec b2 = Set(act.b2), r2 = Set(1.f / act.b2);
  Steps(n, y, [&](auto at) {  // one division for the three quotients
    const Vec g = at(gate);
    const Ratio t = TanhRatio(Mul(g, r1)), s = SigmoidRatio(g), u = TanhRatio(Mul(at(up), r2));
    const Vec over = Mul(Mul(b1, Mul(t.over, s.over)), Mul(b2, u.over));
    return Div(over, Mul(Mul(t.under, s.under), u.under));
  });
}

void KdaGateAll(const float* f, const float* bias, float rate, bool bounded, float bound,
                std::int64_t n, float* g) {
  const Vec r = Set(rate), b = Set(bound), minus = Set(-rate);
  if (bounded) {
    Steps(n, g, [&](auto at) {
      const Ratio s = SigmoidRatio(Mul(r, Add(at(f), at(bias))));
      return Div(Mul(b, s.over), s.under);
    });
  } else {
    Steps(n, g, [&](auto at) { return Mul(minus, Softplus(Add(at(f), at(bias)))); });
  }
}

float ExpSum(const float* s, float top, std::int64_t n, float* p) {
  const Vec t = Set(top);
  Vec sum = Zero();
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec e = Exp(Sub(Load(s + i), t));
    Store(p + i, e);
    sum = Add(sum, e);
  }
  if (i < n) {
    StoreN(p + i, Exp(Sub(LoadN(s + i, n - i), t)), n - i);
    sum = Add(sum, LoadN(p + i, n - i));  // again, with zeros behind the end
  }
  return Sum(sum);
}

float MaxOf(const float* x, std::int64_t n) {
  Vec top = Set(x[0]);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) top = Max(Load(x + i), top);
  float lane[16];
  Store(lane, top);
  float best = lane[0];
  for (int l = 1; l < 16; ++l) best = lane[l] > best ? lane[l] : best;
  for (; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

namespace {

#if defined(__AVX512F__)
constexpr std::size_t kWide = 4;  // vectors of channels side by side: fewer pages per token

/// The four taps of 16 channels, [16, 4] in memory: a decoding step has nothing else to hide
/// behind.
void LoadTaps(const float* w, Vec (&tap)[4]) {
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
  for (int j = 0; j < 4; ++j) {
    const __m512i at = _mm512_add_epi32(first, _mm512_set1_epi32(j));
    const __m512 low = _mm512_permutex2var_ps(Load(w).v, at, Load(w + 16).v);
    const __m512 high = _mm512_permutex2var_ps(Load(w + 32).v, at, Load(w + 48).v);
    tap[j] = {_mm512_shuffle_f32x4(low, high, 0x44)};
  }
}
#else
constexpr std::size_t kWide = 1;

void LoadTaps(const float* w, Vec (&tap)[4]) {
  float t[4][kLanes];
  for (std::int64_t l = 0; l < kLanes; ++l) {
    for (std::int64_t j = 0; j < 4; ++j) t[j][l] = w[l * 4 + j];
  }
  for (int j = 0; j < 4; ++j) tap[j] = Load(t[j]);
}
#endif

/// The first `lanes` of them.
void LoadTapsN(const float* w, std::int64_t lanes, Vec (&tap)[4]) {
  float t[4][kLanes] = {};
  for (std::int64_t l = 0; l < lanes; ++l) {
    for (std::int64_t j = 0; j < 4; ++j) t[j][l] = w[l * 4 + j];
  }
  for (int j = 0; j < 4; ++j) tap[j] = Load(t[j]);
}

/// W vectors of channels (the last with `lanes`) over all tokens; the four taps stay in registers.
template <std::size_t W>
void ConvChannels(const ConvRun& r, std::int64_t c, std::int64_t lanes) {
  auto at = [&](std::size_t w) { return c + static_cast<std::int64_t>(w) * kLanes; };
  constexpr std::size_t K = 4;
  Vec tap[W][K], window[K][W];  // window[j] is the row that tap j meets
  for (std::size_t w = 0; w < W; ++w) {
    const float* weights = r.w + at(w) * static_cast<std::int64_t>(K);
    if (lanes == kLanes) {
      LoadTaps(weights, tap[w]);
    } else {
      LoadTapsN(weights, lanes, tap[w]);
    }
    window[0][w] = Zero();
    for (std::size_t j = 1; j < K; ++j) {
      window[j][w] = LoadTail(r.history + static_cast<std::int64_t>(j - 1) * r.P + at(w), lanes);
    }
  }
  for (std::int64_t t = 0; t < r.count; ++t) {
    for (std::size_t w = 0; w < W; ++w) {
      for (std::size_t j = 0; j + 1 < K; ++j) window[j][w] = window[j + 1][w];
      window[K - 1][w] = LoadTail(r.x + t * r.ld_x + at(w), lanes);
      Vec sum = Zero();
      for (std::size_t j = 0; j < K; ++j) sum = Fma(tap[w][j], window[j][w], sum);
      StoreTail(r.y + t * r.ld_y + at(w), TimesSigmoid(sum, sum), lanes);
    }
  }
}

/// Any number of taps.
void ConvChannelsWide(const ConvRun& r, std::int64_t c, std::int64_t lanes) {
  for (std::int64_t t = 0; t < r.count; ++t) {
    Vec sum = Zero();
    for (std::int64_t j = 0; j < r.k; ++j) {
      float w[16] = {};
      for (std::int64_t l = 0; l < lanes; ++l) w[l] = r.w[(c + l) * r.k + j];
      const std::int64_t at = t - r.k + 1 + j;
      const float* x = at < 0 ? r.history + (r.k - 1 + at) * r.P : r.x + at * r.ld_x;
      sum = Fma(Load(w), LoadTail(x + c, lanes), sum);
    }
    StoreTail(r.y + t * r.ld_y + c, TimesSigmoid(sum, sum), lanes);
  }
}

}  // namespace

void ShortConvRun(const ConvRun& r) {
  constexpr std::int64_t kStep = static_cast<std::int64_t>(kWide) * kLanes;
  std::int64_t c = r.begin;
  for (; r.k == 4 && c + kStep <= r.end; c += kStep) ConvChannels<kWide>(r, c, kLanes);
  for (; c < r.end; c += kLanes) {
    const std::int64_t lanes = r.end - c < kLanes ? r.end - c : kLanes;
    if (r.k == 4) {
      ConvChannels<1>(r, c, lanes);
    } else {
      ConvChannelsWide(r, c, lanes);
    }
  }
}

}  // namespace k3::cpu::K3_ISA
