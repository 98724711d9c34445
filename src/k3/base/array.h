// A heap array indexed by signed integers, the type shapes are computed in.
#pragma once

#include <cstdint>
#include <vector>

namespace k3 {

/// Zero-initialised unless given contents. Copyable; no growth by pushing.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(std::int64_t n) : v_(static_cast<std::size_t>(n)) {}
  Array(std::int64_t n, T fill) : v_(static_cast<std::size_t>(n), fill) {}
  Array(const T* begin, const T* end) : v_(begin, end) {}

  T& operator[](std::int64_t i) { return v_[static_cast<std::size_t>(i)]; }
  const T& operator[](std::int64_t i) const { return v_[static_cast<std::size_t>(i)]; }
  std::int64_t size() const { return static_cast<std::int64_t>(v_.size()); }
  T* data() { return v_.data(); }
  const T* data() const { return v_.data(); }
  T* begin() { return data(); }
  T* end() { return data() + size(); }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size(); }

 private:
  std::vector<T> v_;
};

}  // namespace k3
