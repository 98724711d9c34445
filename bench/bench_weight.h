// Random values and weights for the benchmarks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "k3/base/rng.h"
#include "k3/base/workspace.h"
#include "k3/kernels/exec.h"
#include "k3/quant/encode.h"
#include "k3/quant/mxfp4.h"
#include "k3/tensor/dtype.h"

namespace k3 {

inline std::vector<float> Values(std::int64_t n, double low = -1, double high = 1) {
  Rng rng(static_cast<std::uint64_t>(n));
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = static_cast<float>(low + (high - low) * rng.Uniform());
  return v;
}

/// A weight in the wanted format, filled with random values, in memory like that of copied weights.
struct Weight {
  WeightRef ref;

  Weight(Workspace& memory, WeightFormat format, std::int64_t rows, std::int64_t cols) {
    ref = {format, rows, cols, nullptr, nullptr};
    const bool scaled = HasScales(format);
    const auto bytes =
        static_cast<std::size_t>(scaled ? CodeBytes(format, rows, cols) : ref.bytes());
    const auto scale_bytes = static_cast<std::size_t>(scaled ? ScaleBytes(format, rows, cols) : 0);
    const std::span data(memory.Alloc<std::uint8_t>(static_cast<std::int64_t>(bytes)), bytes);
    const std::span scales(memory.Alloc<std::uint8_t>(static_cast<std::int64_t>(scale_bytes)),
                           scale_bytes);
    Rng rng(1);
    if (format == WeightFormat::kMxfp4) {
      for (auto& b : data) b = static_cast<std::uint8_t>(rng.Next());
      std::fill(scales.begin(), scales.end(), std::uint8_t{120});
      ref.scales = scales.data();
    } else if (format == WeightFormat::kBF16) {
      for (std::size_t i = 0; i < data.size(); i += 2) {
        const BF16 v = ToBF16(static_cast<float>(rng.Uniform() - 0.5));
        std::memcpy(&data[i], &v, 2);
      }
    } else if (scaled) {
      EncodeRows(format, Values(rows * cols).data(), rows, cols, data.data(), scales.data());
      ref.scales = scales.data();
    } else {
      const auto v = Values(rows * cols);
      std::memcpy(data.data(), v.data(), data.size());
    }
    ref.data = data.data();
  }
};

}  // namespace k3
