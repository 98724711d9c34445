// An erased tensor: what a file holds, before anyone knows its type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "k3/tensor/dtype.h"

namespace k3 {

/// dtype, shape and bytes of a dense row-major tensor. Does not own the bytes; whoever made it (a
/// mapped file, a vector) says how long they live. Data may be unaligned.
struct TensorRef {
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  const std::byte* data = nullptr;

  std::int64_t elements() const {
    std::int64_t n = 1;
    for (const auto d : shape) n *= d;
    return n;
  }
  std::int64_t bytes() const { return elements() * SizeOf(dtype); }
};

/// "[3, 4]"
std::string ShapeString(const std::vector<std::int64_t>& shape);

/// Decodes F32, BF16 or F16 elements to floats; false for other dtypes.
bool ToFloats(const TensorRef& t, std::vector<float>& out);

}  // namespace k3
