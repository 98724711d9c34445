// A weight matrix in whatever form the checkpoint stores it.
#pragma once

#include <cstdint>

namespace k3 {

/// How the elements of a WeightRef are stored.
enum class WeightFormat : std::uint8_t { kF32, kBF16, kF16, kMxfp4 };

/// Non-owning view of a matrix [rows, cols] used as y = x W^T (PyTorch Linear layout [out, in]).
///
/// Dense formats: `data` holds rows*cols elements, row-major, possibly unaligned.
/// kMxfp4: `data` holds rows*cols/2 bytes, low nibble first along cols, and `scales` rows*cols/32
/// E8M0 exponents (scale 2^(e-127)); cols is a multiple of 32. See spec section 10.
struct WeightRef {
  WeightFormat format = WeightFormat::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const void* data = nullptr;
  const std::uint8_t* scales = nullptr;

  bool empty() const { return data == nullptr; }
  /// Bytes the matrix occupies, scales included.
  std::int64_t bytes() const {
    const std::int64_t n = rows * cols;
    switch (format) {
      case WeightFormat::kF32:
        return 4 * n;
      case WeightFormat::kBF16:
      case WeightFormat::kF16:
        return 2 * n;
      case WeightFormat::kMxfp4:
        return n / 2 + n / 32;
    }
    return 0;
  }
  /// The rows [first, first + count) as a matrix of their own.
  WeightRef RowSlice(std::int64_t first, std::int64_t count) const {
    WeightRef s = *this;
    s.rows = count;
    const auto* p = static_cast<const std::uint8_t*>(data);
    switch (format) {
      case WeightFormat::kF32:
        s.data = p + 4 * first * cols;
        break;
      case WeightFormat::kBF16:
      case WeightFormat::kF16:
        s.data = p + 2 * first * cols;
        break;
      case WeightFormat::kMxfp4:
        s.data = p + first * cols / 2;
        s.scales = scales + first * cols / 32;
        break;
    }
    return s;
  }
};

}  // namespace k3
