// Shared by the files of `Quantize`.
#pragma once

#include <string>
#include <vector>

#include "k3/io/checkpoint.h"
#include "k3/model/config.h"
#include "k3/model/quantize.h"

namespace k3::quantize_internal {

/// An opened and checked model folder.
struct Source {
  ModelConfig config;
  Checkpoint checkpoint;
  TensorCheck check;
};

Result<Source> OpenSource(const std::string& dir);
Result<QuantizeResult> Plan(const Source& source, const QuantizeOptions& options);

/// Files of a model folder that are copied, and what is left out.
struct OtherFiles {
  std::vector<std::string> copied, left_out;  // plain names
  std::int64_t bytes = 0;                     // of those copied
};
Result<OtherFiles> FindOtherFiles(const std::string& dir);

constexpr std::size_t kMaxCopiedFile = std::size_t{64} << 20;

}  // namespace k3::quantize_internal
