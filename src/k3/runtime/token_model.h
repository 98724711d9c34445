// What the runtime needs of a model: one forward pass, and the few facts around it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "k3/base/status.h"
#include "k3/kernels/exec.h"
#include "k3/model/model.h"

namespace k3 {

/// A model together with what it runs on. One concurrent caller.
class TokenModel {
 public:
  virtual ~TokenModel() = default;

  virtual std::int64_t vocab() const = 0;
  virtual std::int64_t max_positions() const = 0;
  virtual std::uint64_t fingerprint() const = 0;
  virtual MathMode math() const = 0;
  virtual ModelState NewState() const = 0;
  /// As Model::Forward.
  virtual Status Forward(std::span<const SequenceInput> batch, std::vector<float>& logits) = 0;
  /// Threads that have nothing to do between two calls of Forward; nullptr: there are none.
  virtual ThreadPool* pool() { return nullptr; }
};

/// A loaded Model on an Exec; both outlive it.
class ModelRunner final : public TokenModel {
 public:
  ModelRunner(const Model& model, Exec& exec) : model_(model), exec_(exec) {}

  std::int64_t vocab() const override { return model_.config().vocab; }
  std::int64_t max_positions() const override { return model_.config().max_positions; }
  std::uint64_t fingerprint() const override { return model_.fingerprint(); }
  MathMode math() const override { return exec_.math; }
  ModelState NewState() const override { return model_.NewState(); }
  Status Forward(std::span<const SequenceInput> batch, std::vector<float>& logits) override {
    return model_.Forward(batch, exec_, logits);
  }
  ThreadPool* pool() override { return &exec_.pool; }

 private:
  const Model& model_;
  Exec& exec_;
};

/// Where a run of tokens that starts at `position` may be cut next: a multiple of `chunk`, which in
/// fast mode is first rounded up to the grid. Anchored at position 0, so that however a prompt
/// arrives the pieces are the same.
std::int64_t NextCut(std::int64_t position, std::int64_t chunk, MathMode math);

}  // namespace k3
