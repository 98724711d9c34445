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

inline double Sigmoid(double x) {
  const double e = std::exp(-std::abs(x));
  return (x >= 0 ? 1.0 : e) / (1.0 + e);
}

inline ActParams ActOf(const GatedActivation& act) {
  return {act.situ, act.b1, act.b2.value_or(0.f)};
}

inline FastWeight FastOf(const WeightRef& w) {
  const FastForm form = w.format == WeightFormat::kMxfp4  ? FastForm::kMxfp4
                        : w.format == WeightFormat::kFp8  ? FastForm::kFp8
                        : w.format == WeightFormat::kInt8 ? FastForm::kInt8
                                                          : FastForm::kBf16;
  return {static_cast<const std::uint8_t*>(w.data), w.scales, form, w.scale_row};
}

}  // namespace k3::cpu
