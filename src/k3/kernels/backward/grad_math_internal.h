// Elementary functions and instantiation of the backward ops.
#pragma once

#include <cmath>
#include <cstdint>

#include "k3/kernels/elementwise.h"

namespace k3::grad {

template <class S>
S Sigmoid(S x) {
  const S e = std::exp(-std::abs(x));
  return (x >= 0 ? S{1} : e) / (S{1} + e);
}

/// Sums in 16 lanes, so that compilers can use vectors; the order depends on n alone.
template <class S>
S Dot(const S* a, const S* b, std::int64_t n) {
  constexpr std::int64_t kLanes = 16;
  S lanes[kLanes] = {}, sum = 0;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  }
  for (; i < n; ++i) sum += a[i] * b[i];
  for (const S lane : lanes) sum += lane;
  return sum;
}

/// Value of the activation and its derivatives.
template <class S>
struct ActGrad {
  S y, dgate, dup;
};
template <class S>
ActGrad<S> Differentiate(const GatedActivation& act, S g, S u) {
  const S s = Sigmoid(g);
  if (!act.situ) return {g * s * u, s * (S{1} + g * (S{1} - s)) * u, g * s};
  const S b1 = static_cast<S>(act.b1), t = std::tanh(g / b1);
  const S gate = b1 * t * s, dgate = (S{1} - t * t) * s + b1 * t * s * (S{1} - s);
  if (!act.b2) return {gate * u, dgate * u, gate};
  const S b2 = static_cast<S>(*act.b2), c = std::tanh(u / b2);
  return {gate * b2 * c, dgate * b2 * c, gate * (S{1} - c * c)};
}

/// In place; returns nothing a caller must check: at least one entry is finite.
template <class S>
void Softmax(S* s, std::int64_t n) {
  S top = s[0], sum = 0;
  for (std::int64_t i = 1; i < n; ++i) top = s[i] > top ? s[i] : top;
  for (std::int64_t i = 0; i < n; ++i) sum += s[i] = std::exp(s[i] - top);
  for (std::int64_t i = 0; i < n; ++i) s[i] /= sum;
}

}  // namespace k3::grad

#define K3_INSTANTIATE(name)                                           \
  template void name<float>(const Context&, const name##Args<float>&); \
  template void name<double>(const Context&, const name##Args<double>&)
