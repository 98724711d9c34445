// Loss and gradients of a batch of token rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/kernels/exec.h"
#include "k3/train/noise_ops.h"
#include "k3/train/params.h"
#include "k3/train/tape.h"

namespace k3 {

class Teacher;

/// One row: the model reads `inputs` from an empty state; position i should predict targets[i].
/// A negative target is not trained on.
struct TrainRow {
  std::span<const TokenId> inputs;
  std::span<const TokenId> targets;
};

/// Runs passes of one set of parameters. One at a time; owns the tape inside its Exec.
class GradientPass {
 public:
  GradientPass(Parameters& params, int threads, MathMode math = MathMode::kExact);

  /// From now on the attention of this layer ends in noise (train/noise_ops.h), a function of
  /// `seed` that is the same in every pass until this is called again.
  void PlantNoise(std::int64_t layer, std::uint64_t seed);

  struct LossSum {
    double nats = 0;           // cross-entropy, summed over the counted positions
    double divergence = 0;     // T^2 KL to the teacher, the same
    std::int64_t counted = 0;  // positions with a target
  };

  /// From now on recorded passes learn from `teacher` as well (train/teacher.h); null: none. It
  /// must outlive them.
  void Distil(Teacher* teacher) { teacher_ = teacher; }

  /// Adds scale * d(sum of losses) to the gradients of the parameters. All rows run as one batch.
  Result<LossSum> Run(std::span<const TrainRow> rows, double scale);

  /// The loss alone: nothing is recorded, no gradient and no router statistic changes.
  Result<LossSum> Evaluate(std::span<const TrainRow> rows);

  TapeBackend& tape() { return tape_; }
  /// Bytes of the last recorded pass: values, gradients of values, saved inputs, states.
  std::int64_t held_bytes() const;

 private:
  Result<CMat> Forward(std::span<const TrainRow> rows, std::vector<TokenId>& targets);

  Parameters& params_;
  NoiseSource noise_;
  Exec exec_;
  TapeBackend& tape_;
  Teacher* teacher_ = nullptr;
  std::vector<ModelState> states_;  // of the running pass; the tape points into them
};

}  // namespace k3
