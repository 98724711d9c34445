// A weight matrix in whatever form the checkpoint stores it.
#pragma once

#include <cstdint>

namespace k3 {

/// How the elements of a WeightRef are stored.
enum class WeightFormat : std::uint8_t { kF32, kBF16, kF16, kMxfp4, kFp8, kInt8 };

constexpr std::int64_t kFp8Block = 128;  // rows and columns that share a scale
constexpr std::int64_t kInt8Block = 32;  // columns that share a scale

/// Non-owning view of a matrix [rows, cols] used as y = x W^T (PyTorch Linear layout [out, in]).
///
/// Dense formats: `data` holds rows*cols elements, row-major, possibly unaligned.
/// kMxfp4: `data` holds rows*cols/2 bytes, low nibble first along cols, and `scales` rows*cols/32
/// E8M0 exponents (scale 2^(e-127)); cols is a multiple of 32. See spec section 10.
/// kFp8: `data` holds rows*cols e4m3 codes, `scales` one f32 for each block of 128 x 128, the last
/// ones cut: value = code * scale, in f32. Blocks are counted from the first row of the stored
/// matrix; `scale_row` says how many rows of the first block lie before this view.
/// kInt8: `data` holds rows*cols signed bytes, `scales` rows*cols/32 bf16: value = code * scale,
/// exact in f32; cols is a multiple of 32.
/// `scales` may be unaligned.
struct WeightRef {
  WeightFormat format = WeightFormat::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const void* data = nullptr;
  const std::uint8_t* scales = nullptr;
  std::int64_t scale_row = 0;

  bool empty() const { return data == nullptr; }
  /// kFp8: scales of a row of blocks.
  std::int64_t scale_cols() const { return (cols + kFp8Block - 1) / kFp8Block; }
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
      case WeightFormat::kFp8:
        return n + 4 * scale_cols() * ((scale_row + rows + kFp8Block - 1) / kFp8Block);
      case WeightFormat::kInt8:
        return n + 2 * (n / kInt8Block);
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
      case WeightFormat::kFp8:
        s.data = p + first * cols;
        s.scales = scales + 4 * scale_cols() * ((scale_row + first) / kFp8Block);
        s.scale_row = (scale_row + first) % kFp8Block;
        break;
      case WeightFormat::kInt8:
        s.data = p + first * cols;
        s.scales = scales + 2 * (first * cols / kInt8Block);
        break;
    }
    return s;
  }
};

}  // namespace k3
