// Elementary functions of the reference ops, in float64.
#pragma once

#include <algorithm>
#include <cmath>

#include "k3/base/array.h"
#include "k3/kernels/elementwise.h"

namespace k3::ref {

inline double Square(double x) { return x * x; }

inline double Sigmoid(double x) {
  const double e = std::exp(-std::abs(x));
  return (x >= 0 ? 1.0 : e) / (1.0 + e);
}

inline double Softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

inline double GatedAct(const GatedActivation& act, double g, double u) {
  if (!act.situ) return g * Sigmoid(g) * u;
  const double up = act.b2 ? *act.b2 * std::tanh(u / *act.b2) : u;
  return act.b1 * std::tanh(g / act.b1) * Sigmoid(g) * up;
}

inline void Softmax(Array<double>& s) {
  const double top = *std::max_element(s.begin(), s.end());
  double sum = 0;
  for (double& x : s) {
    x = std::exp(x - top);
    sum += x;
  }
  for (double& x : s) x /= sum;
}

}  // namespace k3::ref
