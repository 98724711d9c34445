#include "k3/quant/decode_row.h"

#include <cstring>

#include "k3/quant/mxfp4.h"
#include "k3/tensor/dtype.h"

namespace k3 {
namespace {

template <class T>
T Load(const std::uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

void DecodeMxfp4Row(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t cols,
                    float* out) {
  for (std::size_t i = 0; i < cols; i += 2) {
    const float scale = E8M0ToFloat(scales[i / kMxBlock]);
    out[i] = kE2M1[codes[i / 2] & 15] * scale;
    out[i + 1] = kE2M1[codes[i / 2] >> 4] * scale;
  }
}

}  // namespace

void DecodeRow(const WeightRef& w, std::int64_t row, float* out) {
  const auto cols = static_cast<std::size_t>(w.cols);
  const WeightRef r = w.RowSlice(row, 1);
  const auto* bytes = static_cast<const std::uint8_t*>(r.data);
  switch (w.format) {
    case WeightFormat::kF32:
      std::memcpy(out, bytes, 4 * cols);
      return;
    case WeightFormat::kBF16:
      for (std::size_t i = 0; i < cols; ++i) out[i] = ToFloat(Load<BF16>(bytes + 2 * i));
      return;
    case WeightFormat::kF16:
      for (std::size_t i = 0; i < cols; ++i) out[i] = ToFloat(Load<F16>(bytes + 2 * i));
      return;
    case WeightFormat::kMxfp4:
      return DecodeMxfp4Row(bytes, r.scales, cols, out);
    case WeightFormat::kFp8:
      for (std::size_t i = 0; i < cols; ++i) {
        out[i] = ToFloat(F8E4M3{bytes[i]}) * Load<float>(r.scales + 4 * (i / kFp8Block));
      }
      return;
    case WeightFormat::kInt8:
      for (std::size_t i = 0; i < cols; ++i) {
        const auto code = static_cast<float>(static_cast<std::int8_t>(bytes[i]));
        out[i] = code * ToFloat(Load<BF16>(r.scales + 2 * (i / kInt8Block)));
      }
      return;
  }
}

}  // namespace k3
