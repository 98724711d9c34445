// Typed views: a pointer, a shape of static rank and strides in elements. Copied by value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "k3/base/check.h"

namespace k3 {

/// Non-owning view of an R-dimensional array. View<const T, R> for inputs.
/// The innermost dimension of every View used by an op is contiguous (stride 1).
template <class T, std::size_t R>
struct View {
  T* data = nullptr;
  std::array<std::int64_t, R> shape{};
  std::array<std::int64_t, R> strides{};

  View() = default;
  /// Dense row-major view.
  View(T* p, const std::array<std::int64_t, R>& s) : data(p), shape(s) {
    std::int64_t step = 1;
    for (std::size_t i = R; i-- > 0;) {
      strides[i] = step;
      step *= s[i];
    }
  }
  View(T* p, const std::array<std::int64_t, R>& s, const std::array<std::int64_t, R>& st)
      : data(p), shape(s), strides(st) {}
  /// Adds const.
  template <class U = T, class = std::enable_if_t<std::is_const_v<U>>>
  View(const View<std::remove_const_t<U>, R>& o)  // NOLINT: implicit on purpose
      : data(o.data), shape(o.shape), strides(o.strides) {}

  std::int64_t dim(std::size_t i) const { return shape[i]; }
  std::int64_t size() const {
    std::int64_t n = 1;
    for (const auto d : shape) n *= d;
    return n;
  }
  /// Pointer to the start of row i (all following indices 0).
  T* row(std::int64_t i) const { return data + i * strides[0]; }

  template <class... I>
  T& operator()(I... i) const {
    static_assert(sizeof...(I) == R);
    const std::array<std::int64_t, R> idx{static_cast<std::int64_t>(i)...};
    std::int64_t at = 0;
    for (std::size_t d = 0; d < R; ++d) at += idx[d] * strides[d];
    return data[at];
  }
};

using Vec = View<float, 1>;
using CVec = View<const float, 1>;
using Mat = View<float, 2>;
using CMat = View<const float, 2>;

}  // namespace k3
