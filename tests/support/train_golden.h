// Reading goldens of gradients and of training runs.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "k3/train/params.h"

namespace k3::testing {

/// A checksum that feels every element: sum of a[i] cos(i).
inline double Probe(const float* a, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    sum += static_cast<double>(a[i]) * std::cos(static_cast<double>(i));
  }
  return sum;
}
inline double L2(const float* a, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * a[i];
  return std::sqrt(sum);
}

/// Parameters in the order of their names, as the goldens list them.
inline std::map<std::string, const Parameter*> ByName(const Parameters& p) {
  std::map<std::string, const Parameter*> sorted;
  for (const Parameter& q : p.list()) sorted[q.spec.name] = &q;
  return sorted;
}

}  // namespace k3::testing
