// A loaded model: weights, the stack of layers, and one forward pass over a batch of sequences.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/io/safetensors.h"
#include "k3/kernels/exec.h"
#include "k3/model/config.h"
#include "k3/model/model_state.h"
#include "k3/model/weights.h"
#include "k3/tensor/tensor_ref.h"

namespace k3 {

/// Receives copies of intermediate values by name (names: docs/trace.md). Views die with the call.
class TraceSink {
 public:
  virtual ~TraceSink() = default;
  virtual void Record(std::string_view name, const TensorRef& value) = 0;
};

enum class LogitRows : std::uint8_t { kNone, kLast, kAll };

/// One sequence's share of a batch: `tokens` continue `state`, which is advanced by the pass.
struct SequenceInput {
  std::span<const TokenId> tokens;
  ModelState* state = nullptr;
  LogitRows logits = LogitRows::kLast;
};

/// Immutable after Load; Forward may run on several threads at once with distinct states and Execs.
class Model {
 public:
  /// A model on f32 tensors in memory (BindTensors in model/weights.h), which must outlive it. For
  /// training: weights may change between passes, followed by RefreshWeights.
  static Result<std::unique_ptr<Model>> FromTensors(const ModelConfig& config,
                                                    const TensorMap& tensors);
  void RefreshWeights();
  const ModelWeights& weights() const;

  /// Opens, checks and maps the checkpoint in `dir`. Nothing is loaded by halves: any missing,
  /// misshapen or contradictory tensor is an error that names it.
  static Result<std::unique_ptr<Model>> Load(const std::string& dir,
                                             Residence residence = Residence::kMapped);
  ~Model();

  const ModelConfig& config() const;
  /// Identifies the weights: same value for the same files, another one when shapes or sampled
  /// contents differ. States carry it so that they are never applied to another model.
  std::uint64_t fingerprint() const;
  /// Things worth telling the user about the files.
  const std::vector<std::string>& warnings() const;
  /// Bytes of all text weights as stored.
  std::int64_t weight_bytes() const;
  /// Whether they are in memory of their own (Residence); false for FromTensors.
  bool weights_copied() const;

  ModelState NewState() const;

  /// Runs every sequence of the batch through the stack. `logits` receives [rows, vocab] in order
  /// of the sequences: all positions, the last one, or none of each. Errors: a token id outside the
  /// vocabulary (nothing was computed, states unchanged); a score that is not finite (kNumeric;
  /// states of the batch must be discarded); kCancelled through Exec::cancel (the same).
  Status Forward(std::span<const SequenceInput> batch, Exec& exec, std::vector<float>& logits,
                 TraceSink* trace = nullptr) const;

  /// The same without the scores: `hidden` [tokens, hidden] is what the output layer reads. It lies
  /// in the workspace of `exec` and dies with the next pass. `logits` of the inputs only say how
  /// much of it to reserve.
  Status ForwardHidden(std::span<const SequenceInput> batch, Exec& exec, CMat& hidden,
                       TraceSink* trace = nullptr) const;

 private:
  struct Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
