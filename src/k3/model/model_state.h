// Everything the layers remember of one sequence. Copied to fork, assigned to restore.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"
#include "k3/layers/cache.h"
#include "k3/model/config.h"

namespace k3 {

/// Bytes of one sequence's state by kind, as the engine holds it (f32).
struct StateBytes {
  std::int64_t kda = 0;        // KDA matrices, the same at every length
  std::int64_t conv = 0;       // convolution tails, the same at every length
  std::int64_t mla = 0;        // MLA rows
  std::int64_t gqa = 0;        // GQA keys and values
  std::int64_t row_token = 0;  // values (not bytes) one more token adds to the rows

  std::int64_t total() const { return kda + conv + mla + gqa; }
};

/// KDA matrices and convolution tails, MLA rows and the position of one sequence.
/// Copying is cheap for MLA rows (pages are shared, copied on write) and a plain copy for the rest.
/// Distinct objects may be used from distinct threads, also when they share pages.
class ModelState {
 public:
  ModelState() = default;
  explicit ModelState(const ModelConfig& config);

  /// Tokens consumed so far: the absolute position of the next one.
  std::int64_t position() const { return position_; }
  /// Bytes this state refers to; shared pages count in full.
  std::int64_t bytes() const;
  /// Bytes a state of `config` takes after `tokens` tokens.
  static std::int64_t BytesFor(const ModelConfig& config, std::int64_t tokens) {
    return PartsFor(config, tokens).total();
  }
  static StateBytes PartsFor(const ModelConfig& config, std::int64_t tokens);

  /// Self-contained little-endian image of the state, and back. Deserialize refuses an image of
  /// another shape or length and then leaves the object unchanged.
  std::string Serialize() const;
  Status Deserialize(std::string_view image);

  // For the model: the cache of layer i (the one of its kind is set).
  LayerCache& layer(std::int64_t i) { return layers_[static_cast<std::size_t>(i)]; }
  const LayerCache& layer(std::int64_t i) const { return layers_[static_cast<std::size_t>(i)]; }
  std::int64_t n_layers() const { return static_cast<std::int64_t>(layers_.size()); }
  void Advance(std::int64_t tokens) { position_ += tokens; }

 private:
  std::int64_t position_ = 0;
  std::vector<LayerCache> layers_;
};

}  // namespace k3
