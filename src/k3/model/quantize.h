// Checkpoints to checkpoints with other weight formats: what would change, and the change itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/base/threads.h"
#include "k3/model/tensor_table.h"
#include "k3/quant/encode.h"
#include "k3/tensor/weight.h"

namespace k3 {

/// Which matrices become what. Absent: as they are. Norms, convolutions, A_log, dt_bias, routers
/// with their biases and everything of the residual stream never change.
struct QuantizeOptions {
  std::optional<WeightFormat> trunk;       // attention, dense, latent and shared-expert matrices
  std::optional<WeightFormat> experts;     // routed experts
  std::optional<WeightFormat> embeddings;  // with tied embeddings the output layer too
  std::optional<WeightFormat> head;
  std::vector<std::string> only;  // patterns (base/glob.h) of names; when given, others stay
  std::vector<std::string> keep;  // patterns of names that stay
  bool force = false;             // round again what was rounded before
};

/// One matrix of the result. Names are those of the tensor table, NAME.weight without prefix.
struct QuantizedMatrix {
  std::string name;
  TensorRole role = TensorRole::kAttention;
  std::int64_t rows = 0, cols = 0;
  WeightFormat from = WeightFormat::kF32, to = WeightFormat::kF32;
  std::string kept_because;  // why it is not what its part was to become; empty otherwise
  std::int64_t bytes_before = 0, bytes_after = 0;
  RoundingError error;  // of `to` against `from`, both decoded; zeros until written

  bool changes() const { return from != to; }
};

/// A whole conversion, as planned or as done.
struct QuantizeResult {
  std::vector<QuantizedMatrix> matrices;            // all that a format could hold, in table order
  std::int64_t other_tensors = 0, other_bytes = 0;  // copied as they are
  std::int64_t bytes_before = 0, bytes_after = 0;   // of all tensors
  std::int64_t file_bytes = 0;                      // about what the new folder takes on disk
  std::vector<std::string> warnings;

  std::int64_t changed() const;
};

/// Plans without reading weights. Errors: whatever a loader refuses; a pattern that fits no matrix;
/// a matrix with scales that would be rounded to another format with scales, without `force`.
/// Widths that a format cannot hold stay as they are, with the reason.
Result<QuantizeResult> PlanQuantization(const std::string& dir, const QuantizeOptions& options);

struct QuantizeRun {
  ThreadPool* pool = nullptr;
  const std::atomic<bool>* cancel = nullptr;
  std::function<void(std::int64_t done, std::int64_t total)> progress;  // bytes written
};

/// Writes the folder `out`: shards of the same names, an index, config.json with the new
/// quantization_config, and copies of the other files of `dir` up to 64 MiB each (sub-folders and
/// larger files are left out with a warning). Memory holds some rows of one matrix a thread. The
/// folder appears only when it is complete. Errors besides those of the plan: `out` exists; not
/// enough disk space; a value that is not finite, or is not after rounding (named); cancelled.
Result<QuantizeResult> Quantize(const std::string& dir, const std::string& out,
                                const QuantizeOptions& options, const QuantizeRun& run);

/// config.json of a checkpoint in which exactly these matrices have these formats, changed in its
/// quantization_config only. The text stays as it is when its matrices in formats with scales are
/// the same as before. `where` is for messages, `prefix` starts the names in the files.
Result<std::string> QuantizedConfigText(const std::string& text, const std::string& where,
                                        const std::string& prefix,
                                        const std::vector<QuantizedMatrix>& matrices);

}  // namespace k3
