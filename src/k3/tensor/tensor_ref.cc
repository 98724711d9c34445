#include "k3/tensor/tensor_ref.h"

#include <cstring>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace k3 {

std::string ShapeString(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

bool ToFloats(const TensorRef& t, std::vector<float>& out) {
  const auto n = static_cast<std::size_t>(t.elements());
  out.resize(n);
  if (t.dtype == DType::kF32) {
    if (n > 0) std::memcpy(out.data(), t.data, n * sizeof(float));
    return true;
  }
  if (t.dtype != DType::kBF16 && t.dtype != DType::kF16) return false;
  for (std::size_t i = 0; i < n; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, t.data + 2 * i, 2);
    out[i] = t.dtype == DType::kBF16 ? ToFloat(BF16{bits}) : ToFloat(F16{bits});
  }
  return true;
}

}  // namespace k3
