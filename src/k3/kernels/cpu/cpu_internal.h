// Shared by the files of the CPU backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "k3/kernels/cpu/cpu_backend.h"

namespace k3::cpu {

/// Elementary operations below which a loop is not worth another thread.
constexpr std::int64_t kParallelWork = 1 << 15;

template <class F>
void CpuBackend::ForRows(std::int64_t n, std::int64_t work, F&& fn) {
  const std::int64_t grain =
      std::max<std::int64_t>(1, kParallelWork / std::max<std::int64_t>(1, work));
  pool_.ParallelFor(n, grain, [&](std::int64_t b, std::int64_t e) {
    for (std::int64_t t = b; t < e; ++t) fn(t);
  });
}

// Exact mode takes elementary functions in float64 and rounds once: the result then does not depend
// on which f32 approximation a math library picks for the processor.
inline float Exp(float x) { return static_cast<float>(std::exp(static_cast<double>(x))); }

inline double Sigmoid(double x) {
  const double e = std::exp(-std::abs(x));
  return (x >= 0 ? 1.0 : e) / (1.0 + e);
}

/// Scores [0, n) to weights that sum to one; sums in order, in float64.
inline void SoftmaxInPlace(float* s, std::int64_t n) {
  const float top = *std::max_element(s, s + n);
  double sum = 0;
  for (std::int64_t j = 0; j < n; ++j) sum += s[j] = Exp(s[j] - top);
  const auto r = static_cast<float>(1.0 / sum);
  for (std::int64_t j = 0; j < n; ++j) s[j] *= r;
}

inline float GatedAct(const GatedActivation& act, float g, float u) {
  const double gate = g, up = u;
  if (!act.situ) return static_cast<float>(gate * Sigmoid(gate) * up);
  const double capped = act.b2 ? *act.b2 * std::tanh(up / *act.b2) : up;
  return static_cast<float>(act.b1 * std::tanh(gate / act.b1) * Sigmoid(gate) * capped);
}

}  // namespace k3::cpu
