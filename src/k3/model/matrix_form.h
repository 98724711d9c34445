// The ways a checkpoint may store a weight matrix, and the tensors that make up each.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/model/tensor_table.h"
#include "k3/tensor/tensor_ref.h"
#include "k3/tensor/weight.h"

namespace k3 {

/// One stored tensor of a matrix called NAME.weight: its name is NAME.weight and this suffix.
struct MatrixPart {
  std::string_view suffix;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
};

/// The tensors of a matrix [rows, cols], codes first:
///   f32, bf16, f16   NAME.weight [rows, cols]
///   mxfp4            NAME.weight_packed U8 [rows, cols/2], NAME.weight_scale U8 [rows, cols/32]
///   fp8-e4m3         NAME.weight F8_E4M3 [rows, cols],
///                    NAME.weight_scale_inv F32 [ceil(rows/128), ceil(cols/128)]
///   int8             NAME.weight I8 [rows, cols], NAME.weight_scale BF16 [rows, cols/32]
std::vector<MatrixPart> PartsOf(WeightFormat format, std::int64_t rows, std::int64_t cols);

using TensorsByName = std::map<std::string, TensorRef, std::less<>>;

/// Whether a loader takes this tensor in the formats with scales: matrices of the trunk, the
/// experts, the embedding and the head. Routers and the residual stream stay dense.
bool MayBeQuantized(const TensorSpec& spec);

/// Format of the stored matrix `name` ("...NAME.weight", with prefix); nullopt when it is not there
/// or of no dtype a matrix has.
std::optional<WeightFormat> FormatOf(const TensorsByName& tensors, const std::string& name);

/// The same of a dense element type; nullopt for others.
std::optional<WeightFormat> FormatOfDType(DType dtype);

/// A matrix that CheckTensors accepted. The bytes stay where they are.
WeightRef MatrixOf(const TensorsByName& tensors, const std::string& name);

}  // namespace k3
