// Compares the NEON table with the scalar one, bit for bit, under emulation. Built by run.sh with a
// cross compiler from the *.simd.cc files alone; exit status 1 when anything differs.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "k3/kernels/cpu/simd_table.h"

using k3::cpu::ActParams;
using k3::cpu::ConvRun;
using k3::cpu::KdaHead;
using k3::cpu::SimdTable;
using Floats = std::vector<float>;

namespace {

const SimdTable& kScalar = *k3::cpu::scalar::Table();
const SimdTable& kNeon = *k3::cpu::neon::Table();
int differences = 0;

Floats Random(std::size_t n, float size = 1.f) {
  static unsigned long long state = 1;
  Floats v(n);
  for (float& x : v) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    x = size * (static_cast<float>(state >> 40) * 0x1p-23f - 1.f);
  }
  return v;
}

/// Runs op(table, out) for both tables on n outputs.
template <class Op>
void Same(const char* what, std::size_t n, Op op) {
  Floats a(n), b(n);
  op(kScalar, a);
  op(kNeon, b);
  const bool same = std::memcmp(a.data(), b.data(), 4 * n) == 0;
  if (!same) std::printf("%s: other bits than scalar\n", what);
  differences += !same;
}

void Elementwise() {
  const std::int64_t n = 1003;
  const Floats x = Random(n, 60), g = Random(n, 20), u = Random(n, 40), w = Random(n);
  Same("exp", n, [&](const SimdTable& t, Floats& y) { t.exp(x.data(), n, y.data()); });
  Same("sigmoid", n, [&](const SimdTable& t, Floats& y) { t.sigmoid(x.data(), n, y.data()); });
  Same("silu", n, [&](const SimdTable& t, Floats& y) { t.silu(g.data(), n, y.data()); });
  Same("tanh", n, [&](const SimdTable& t, Floats& y) { t.tanh(w.data(), n, y.data()); });
  const ActParams act{true, 4.f, 25.f};
  Same("situ", n,
       [&](const SimdTable& t, Floats& y) { t.gated_act(g.data(), u.data(), n, act, y.data()); });
  for (const bool bounded : {true, false}) {
    Same("kda gate", n, [&](const SimdTable& t, Floats& y) {
      t.kda_gate(g.data(), u.data(), 1.3f, bounded, -5.f, n, y.data());
    });
  }
  Same("exp sum", n + 1, [&](const SimdTable& t, Floats& y) {
    y[n] = t.exp_sum(x.data(), t.max(x.data(), n), n, y.data());
  });
  const std::int64_t P = 70, T = 9;
  const Floats taps = Random(4 * P), history = Random(3 * P), rows = Random(T * P);
  Same("conv", T * P, [&](const SimdTable& t, Floats& y) {
    t.short_conv({taps.data(), 4, P, 0, P, T, history.data(), rows.data(), y.data(), P, P});
  });
}

void Products() {
  for (const std::int64_t n : {1, 15, 16, 33, 160}) {
    const std::int64_t m = 5, r = 7;
    const auto size = static_cast<std::size_t>(m * r);
    const Floats x = Random(static_cast<std::size_t>(m * n)),
                 w = Random(static_cast<std::size_t>(r * n));
    Same("dot", size, [&](const SimdTable& t, Floats& y) {
      t.dot_block(x.data(), n, m, w.data(), n, r, n, y.data(), r);
    });
    // Any bits but those of infinities and NaNs are bf16 weights: take the upper half of floats.
    std::vector<unsigned short> half(w.size());
    for (std::size_t i = 0; i < w.size(); ++i)
      std::memcpy(&half[i], reinterpret_cast<const char*>(&w[i]) + 2, 2);
    Same("dot bf16", size, [&](const SimdTable& t, Floats& y) {
      t.dot_block_bf16(x.data(), n, m, half.data(), r, n, y.data(), r);
    });
    std::vector<unsigned char> bytes(w.size());
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<unsigned char>(37 * i);
      if ((bytes[i] & 127) == 127) bytes[i] = 0;  // NaN: its payload is no one's promise
    }
    const Floats blocks = Random(2);
    std::vector<unsigned char> f32_scales(8);
    std::memcpy(f32_scales.data(), blocks.data(), 8);
    Same("dot fp8", size, [&](const SimdTable& t, Floats& y) {
      t.dot_block_fp8(x.data(), n, m, bytes.data(), f32_scales.data(), 0, r, n, y.data(), r);
    });
    if (n % 32 != 0) continue;
    std::vector<unsigned char> int8_scales(w.size() / 16, 0x3F);
    Same("dot int8", size, [&](const SimdTable& t, Floats& y) {
      t.dot_block_int8(x.data(), n, m, bytes.data(), int8_scales.data(), r, n, y.data(), r);
    });
    std::vector<unsigned char> codes(w.size() / 2), scales(w.size() / 32);
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<unsigned char>(37 * i);
    for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<unsigned char>(9 * i);
    Same("dot mxfp4", size, [&](const SimdTable& t, Floats& y) {
      t.dot_block_mxfp4(x.data(), n, m, codes.data(), scales.data(), r, n, y.data(), r);
    });
  }
}

void Kda() {
  const std::int64_t T = 16, K = 48, V = 100;
  const Floats q = Random(T * K, 0.1f), k = Random(T * K, 0.1f), v = Random(T * V),
               s0 = Random(K * V);
  Floats g = Random(T * K, 2.f), beta = Random(T), alpha(T * K);
  for (float& x : g) x = -std::fabs(x);
  for (float& x : beta) x = std::fabs(x);
  kScalar.exp(g.data(), T * K, alpha.data());
  for (const bool chunk : {false, true}) {
    Same("kda", static_cast<std::size_t>(T * V + K * V), [&](const SimdTable& t, Floats& y) {
      Floats state = s0;
      KdaHead h{};
      h.T = T, h.K = K, h.V = V, h.q = q.data(), h.k = k.data(), h.v = v.data(), h.g = g.data();
      h.alpha = alpha.data(), h.beta = beta.data(), h.S = state.data(), h.o = y.data();
      h.ld_q = h.ld_k = h.ld_g = h.ld_alpha = K, h.ld_v = h.ld_o = V, h.ld_beta = 1;
      if (chunk) {
        t.kda_chunk(h, false);
      } else {
        t.kda_recurrent(h);
      }
      std::memcpy(y.data() + T * V, state.data(), 4 * state.size());
    });
  }
}

}  // namespace

int main() {
  Elementwise();
  Products();
  Kda();
  std::printf("neon: %d differences from scalar\n", differences);
  return differences == 0 ? 0 : 1;
}
