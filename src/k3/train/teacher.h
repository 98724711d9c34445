// A model whose answers are learned: the other half of a distillation loss.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/kernels/exec.h"
#include "k3/model/model.h"
#include "k3/train/gradient_pass.h"

namespace k3 {

/// A token's loss is (1 - weight) CE + weight T^2 KL(softmax(teacher / T) || softmax(own / T)).
struct DistillOptions {
  std::string teacher;  // model folder; empty: no distillation
  double weight = 0.5;
  double temperature = 1.0;
};

/// Runs on the rows of a pass, each from an empty state, without a tape.
class Teacher {
 public:
  /// `data` is the folder of the token files. Refuses a model of another vocabulary size than
  /// `vocab`, and one whose tokenizer differs from that of `data` in any token; when `data` has no
  /// tokenizer only the size is compared.
  static Result<std::unique_ptr<Teacher>> Load(const DistillOptions& options,
                                               const std::string& data, std::int64_t vocab,
                                               int threads, MathMode math);

  /// What the output layer reads, [tokens of all rows, its hidden size]; dies with the next call.
  Result<CMat> Hidden(std::span<const TrainRow> rows);
  /// Its output layer [vocab, its hidden size], decoded.
  CMat head() const { return head_; }
  const DistillOptions& options() const { return options_; }
  /// Of weights and of a pass over `rows` rows of `sequence` tokens.
  std::int64_t bytes(std::int64_t rows, std::int64_t sequence, int threads) const;

 private:
  Teacher(DistillOptions options, std::unique_ptr<Model> model, int threads, MathMode math);

  DistillOptions options_;
  std::unique_ptr<Model> model_;
  Exec exec_;
  std::vector<float> head_floats_;
  CMat head_;
  std::vector<ModelState> states_;
};

}  // namespace k3
