// The files of a model folder: safetensors shards behind an index, seen as one map of tensors.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"
#include "k3/io/safetensors.h"
#include "k3/tensor/tensor_ref.h"

namespace k3 {

/// The text of a model.safetensors.index.json: which file holds which tensor.
struct SafetensorsIndex {
  std::vector<std::string> files;  // plain file names, sorted, without repeats
  std::map<std::string, std::uint32_t, std::less<>> file_of;  // tensor name -> index into `files`
  std::optional<std::int64_t> total_size;  // metadata.total_size, when it is a plausible number
};

/// Refuses file names that are not plain names inside the folder, an empty or missing weight_map
/// and whatever ParseJson refuses. `where` starts every message.
Result<SafetensorsIndex> ParseIndex(std::string_view text, std::string_view where);

/// An opened, validated checkpoint folder. Tensor bytes are views into mapped files and live as
/// long as this object. Immutable after Open, safe to read from many threads. Movable.
///
/// Accepted layouts: model.safetensors.index.json with its shards (a stray model.safetensors beside
/// them is ignored, as are shards the index does not name), or a single model.safetensors without
/// an index.
class Checkpoint {
 public:
  static constexpr std::size_t kMaxWarnings = 50;

  static Result<Checkpoint> Open(const std::string& dir, Residence residence = Residence::kMapped);

  const std::string& dir() const { return dir_; }
  /// nullptr when absent.
  const TensorRef* Find(std::string_view name) const;
  /// All tensors by name.
  const std::map<std::string, TensorRef, std::less<>>& tensors() const { return tensors_; }
  /// Path of the shard a tensor lies in, for messages; the folder when the name is unknown.
  std::string FileOf(std::string_view name) const;
  std::size_t shard_count() const { return shards_.size(); }
  const SafetensorsFile& shard(std::size_t i) const { return *shards_[i]; }
  /// All shards are in memory of their own.
  bool copied() const;
  /// Odd but survivable things (a tensor in a shard but not in the index, ...), at most
  /// kMaxWarnings of them and then a line with the number left out.
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  std::string dir_;
  std::vector<std::shared_ptr<const SafetensorsFile>> shards_;
  std::map<std::string, TensorRef, std::less<>> tensors_;
  std::vector<std::string> warnings_;

  friend class CheckpointBuilder;
};

}  // namespace k3
