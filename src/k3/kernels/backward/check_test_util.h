// Gradient checks: every input of an op against central differences in float64, then the f32
// gradients against the float64 ones.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "k3/base/rng.h"
#include "k3/kernels/backward/backward.h"
#include "k3/kernels/cpu/isa.h"

namespace k3::grad::testing {

inline double Sig(double x) { return 1 / (1 + std::exp(-x)); }
inline std::size_t U(std::int64_t i) { return static_cast<std::size_t>(i); }

inline ThreadPool& Pool() {
  static ThreadPool pool(2);
  return pool;
}

/// Inputs of an op by name, their gradients, and the gradient of its output.
template <class S>
struct Bag {
  std::map<std::string, std::vector<S>> in, d;
  std::vector<S> dy;

  View<const S, 2> M(const std::string& name, std::int64_t rows, std::int64_t cols) {
    return View<const S, 2>(in.at(name).data(), {rows, cols});
  }
  View<S, 2> D(const std::string& name, std::int64_t rows, std::int64_t cols) {
    return View<S, 2>(d.at(name).data(), {rows, cols});
  }
  View<const S, 1> V(const std::string& name) {
    return View<const S, 1>(in.at(name).data(), {static_cast<std::int64_t>(in.at(name).size())});
  }
  View<S, 1> DV(const std::string& name) {
    return View<S, 1>(d.at(name).data(), {static_cast<std::int64_t>(d.at(name).size())});
  }
  View<const S, 2> Dy(std::int64_t cols) {
    return View<const S, 2>(dy.data(), {static_cast<std::int64_t>(dy.size()) / cols, cols});
  }
  void ClearGradients() {
    for (auto& [name, v] : in) d[name].assign(v.size(), S{0});
  }
};

inline std::vector<double> Random(Rng& rng, std::int64_t n, double scale = 1.0) {
  std::vector<double> v(static_cast<std::size_t>(n));
  for (double& x : v) x = scale * (4 * rng.Uniform() - 2);
  return v;
}

inline double Distance(const std::vector<double>& a, const std::vector<double>& b) {
  double diff = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    diff += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(diff) / std::max(1e-8, std::sqrt(norm));
}

inline double Inner(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// forward(Bag<double>&) gives the output; backward(Context, Bag<S>&) adds to d for either type.
template <class Forward, class Backward>
void CheckGradients(const std::string& name, Bag<double> bag, Forward forward, Backward backward) {
  SCOPED_TRACE(name);
  Rng rng(99);
  bag.dy = Random(rng, static_cast<std::int64_t>(forward(bag).size()));
  bag.ClearGradients();
  for (const cpu::SimdTable* table : cpu::SupportedTables()) {
    const Context ctx(Pool(), *table);
    bag.ClearGradients();
    backward(ctx, bag);
    Bag<float> single;
    for (const auto& [key, v] : bag.in) single.in[key].assign(v.begin(), v.end());
    single.dy.assign(bag.dy.begin(), bag.dy.end());
    single.ClearGradients();
    backward(ctx, single);
    for (const auto& [key, v] : single.d) {
      // 2e-5: f32 rounding through a few hundred operations.
      EXPECT_LT(Distance({v.begin(), v.end()}, bag.d[key]), 2e-5) << key << " f32 " << table->name;
    }
    auto once = single.d;
    backward(ctx, single);  // gradients are added to
    for (const auto& [key, v] : single.d) {
      for (std::size_t i = 0; i < v.size(); ++i) {
        ASSERT_NEAR(v[i], 2 * once[key][i], 1e-5 + 1e-5 * std::abs(v[i])) << key << " twice";
      }
    }
  }
  for (auto& [key, v] : bag.in) {
    std::vector<double> numeric, analytic;
    const std::size_t step = std::max<std::size_t>(1, v.size() / 60);  // a sample of large inputs
    for (std::size_t i = 0; i < v.size(); i += step) {
      const double x = v[i], h = 1e-5;
      v[i] = x + h;
      const double up = Inner(forward(bag), bag.dy);
      v[i] = x - h;
      const double down = Inner(forward(bag), bag.dy);
      v[i] = x;
      numeric.push_back((up - down) / (2 * h));
      analytic.push_back(bag.d[key][i]);
    }
    EXPECT_LT(Distance(analytic, numeric), 1e-6) << key << " against differences";
  }
}

}  // namespace k3::grad::testing
