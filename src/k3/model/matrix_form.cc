#include "k3/model/matrix_form.h"

#include "k3/base/check.h"

namespace k3 {

std::vector<MatrixPart> PartsOf(WeightFormat format, std::int64_t rows, std::int64_t cols) {
  const auto blocks = [](std::int64_t n) { return (n + kFp8Block - 1) / kFp8Block; };
  switch (format) {
    case WeightFormat::kF32:
      return {{"", DType::kF32, {rows, cols}}};
    case WeightFormat::kBF16:
      return {{"", DType::kBF16, {rows, cols}}};
    case WeightFormat::kF16:
      return {{"", DType::kF16, {rows, cols}}};
    case WeightFormat::kMxfp4:
      return {{"_packed", DType::kU8, {rows, cols / 2}}, {"_scale", DType::kU8, {rows, cols / 32}}};
    case WeightFormat::kFp8:
      return {{"", DType::kF8E4M3, {rows, cols}},
              {"_scale_inv", DType::kF32, {blocks(rows), blocks(cols)}}};
    case WeightFormat::kInt8:
      return {{"", DType::kI8, {rows, cols}}, {"_scale", DType::kBF16, {rows, cols / kInt8Block}}};
  }
  return {};
}

bool MayBeQuantized(const TensorSpec& spec) {
  if (spec.shape.size() != 2) return false;
  switch (spec.role) {
    case TensorRole::kEmbedding:
    case TensorRole::kHead:
    case TensorRole::kAttention:
    case TensorRole::kDense:
    case TensorRole::kLatent:
    case TensorRole::kSharedExpert:
    case TensorRole::kRoutedExpert:
      return true;
    case TensorRole::kNorm:
    case TensorRole::kResidual:
    case TensorRole::kRouter:
      return false;
  }
  return false;
}

std::optional<WeightFormat> FormatOfDType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return WeightFormat::kF32;
    case DType::kBF16:
      return WeightFormat::kBF16;
    case DType::kF16:
      return WeightFormat::kF16;
    case DType::kF8E4M3:
      return WeightFormat::kFp8;
    case DType::kI8:
      return WeightFormat::kInt8;
    default:
      return std::nullopt;
  }
}

namespace {

const TensorRef* Find(const TensorsByName& tensors, const std::string& name) {
  const auto it = tensors.find(name);
  return it == tensors.end() ? nullptr : &it->second;
}

}  // namespace

std::optional<WeightFormat> FormatOf(const TensorsByName& tensors, const std::string& name) {
  if (Find(tensors, name + "_packed") != nullptr) return WeightFormat::kMxfp4;
  const TensorRef* t = Find(tensors, name);
  return t != nullptr ? FormatOfDType(t->dtype) : std::nullopt;
}

WeightRef MatrixOf(const TensorsByName& tensors, const std::string& name) {
  const auto format = FormatOf(tensors, name);
  K3_CHECK(format.has_value(), "the tensor table names every matrix that is bound");
  const bool packed = format == WeightFormat::kMxfp4;
  const TensorRef* codes = Find(tensors, packed ? name + "_packed" : name);
  WeightRef w{*format, codes->shape[0], codes->shape[1] * (packed ? 2 : 1), codes->data};
  const auto parts = PartsOf(*format, w.rows, w.cols);
  if (parts.size() > 1) {
    const TensorRef* scales = Find(tensors, name + std::string(parts[1].suffix));
    K3_CHECK(scales != nullptr, "CheckTensors refuses codes without scales");
    w.scales = reinterpret_cast<const std::uint8_t*>(scales->data);
  }
  return w;
}

}  // namespace k3
