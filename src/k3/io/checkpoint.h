// The files of a model folder: safetensors shards behind an index, seen as one map of tensors.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"
#include "k3/io/safetensors.h"
#include "k3/tensor/tensor_ref.h"

namespace k3 {

/// An opened, validated checkpoint folder. Tensor bytes are views into mapped files and live as
/// long as this object. Immutable after Open, safe to read from many threads. Movable.
///
/// Accepted layouts: model.safetensors.index.json with its shards (a stray model.safetensors beside
/// them is ignored), or a single model.safetensors without an index.
class Checkpoint {
 public:
  static Result<Checkpoint> Open(const std::string& dir);

  const std::string& dir() const { return dir_; }
  /// nullptr when absent.
  const TensorRef* Find(std::string_view name) const;
  /// All tensors by name.
  const std::map<std::string, TensorRef, std::less<>>& tensors() const { return tensors_; }
  /// The shard a tensor lies in, for messages.
  std::string FileOf(std::string_view name) const;
  /// Odd but survivable things (a tensor in a shard but not in the index, ...).
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  std::string dir_;
  std::vector<std::shared_ptr<const SafetensorsFile>> shards_;
  std::map<std::string, TensorRef, std::less<>> tensors_;
  std::map<std::string, std::size_t, std::less<>> shard_of_;
  std::vector<std::string> warnings_;
};

}  // namespace k3
