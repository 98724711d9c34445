// What a model folder holds: every tensor by role, shape and place, counted from headers alone.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"
#include "k3/model/config.h"
#include "k3/model/tensor_table.h"

namespace k3 {

/// Where shapes and dtypes come from.
enum class ShapeSource : std::uint8_t {
  kHeaders,      // every shard's header was read
  kSomeHeaders,  // some shards are absent or damaged; theirs are as the config implies
  kIndex,        // no shard was read: names from the index, shapes as the config implies
  kConfig,       // only a config: everything as it implies
};
std::string_view Name(ShapeSource source);  // "headers of all shards", ...

inline constexpr std::string_view kVisionRole = "vision", kUnexpectedRole = "unexpected";

/// Tensors that differ only in their layer and expert numbers.
struct TensorGroup {
  std::string pattern;  // "model.layers.*.self_attn.q_proj.weight", without the prefix
  std::string role;     // of TensorRole, or one of the two above
  std::string dtype;    // as stored
  std::vector<std::int64_t> shape;
  std::string example;  // full name of the first one
  std::string file;     // that holds it; empty when no shard is known
  std::int64_t count = 0;
  std::int64_t parameters = 0;  // a packed matrix counts its values, scales count nothing
  std::int64_t bytes = 0;       // as stored
};

struct RoleTotal {
  std::string role;
  std::int64_t tensors = 0, parameters = 0, bytes = 0;
};

struct ShardInfo {
  std::string file;
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;  // of the whole file; 0 when it was not read
  bool read = false;
};

struct Inventory {
  std::string path;  // as given
  ModelConfig config;
  std::string config_text;  // of config.json
  ShapeSource source = ShapeSource::kConfig;
  std::string prefix;               // "language_model." or ""
  std::vector<ShardInfo> shards;    // in the order of their names
  std::vector<TensorGroup> groups;  // by role, then pattern
  std::vector<RoleTotal> roles;     // of the text model, in TensorRole order, empty ones left out

  std::int64_t tensors = 0;     // of the folder, whatever they are
  std::int64_t bytes = 0;       // of their data
  std::int64_t parameters = 0;  // of the text model
  /// Used for one token: everything but the embedding table and the experts not chosen.
  std::int64_t active_parameters = 0;
  bool has_head = true;  // an output matrix of its own
  std::int64_t vision_tensors = 0, vision_bytes = 0;
  std::int64_t unexpected_tensors = 0, unexpected_bytes = 0;
  std::optional<std::int64_t> index_total_size;

  std::int64_t experts = 0;             // routed experts, all layers
  std::int64_t contiguous_experts = 0;  // of them, those whose tensors lie back to back in one file
  std::int64_t bytes_per_expert = 0;

  std::vector<std::string> problems;  // why the engine would refuse it; at most 50, then a count
  std::vector<std::string> warnings;

  /// The first group of the text model whose pattern ends with `suffix`, or nullptr. Tensors that
  /// the config does not name prove nothing about the model, whatever they are called.
  const TensorGroup* Find(std::string_view suffix) const;
  std::int64_t role_bytes(TensorRole role) const;
};

/// Reads config.json, the index and the headers of the shards that are there; no weights. `path` is
/// a model folder, or a file with a config alone. Missing shards, tensors or wrong shapes do not
/// stop it: they are listed as problems. K3's half million tensors take seconds.
Result<Inventory> TakeInventory(const std::string& path);

}  // namespace k3
