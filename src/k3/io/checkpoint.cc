#include "k3/io/checkpoint.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "k3/base/memory.h"
#include "k3/io/json.h"

namespace k3 {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";

std::string Join(const std::string& dir, std::string_view name) {
  return dir.empty() || dir.back() == '/' ? fmt::format("{}{}", dir, name)
                                          : fmt::format("{}/{}", dir, name);
}

bool IsPlainName(const std::string& name) {
  return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
         name.find('/') == name.npos && name.find('\0') == name.npos;
}

/// Whether `path` exists; an error when that cannot be told.
Result<bool> Exists(const std::string& path) {
  struct stat st{};
  if (::stat(path.c_str(), &st) == 0) return true;
  if (errno == ENOENT) return false;
  return Error{Code::kIo, fmt::format("{}: {}", path, std::strerror(errno))};
}

Status CheckFolder(const std::string& dir) {
  struct stat st{};
  if (::stat(dir.c_str(), &st) != 0) {
    return Error{errno == ENOENT ? Code::kNotFound : Code::kIo,
                 fmt::format("{}: {}", dir, std::strerror(errno))};
  }
  if (!S_ISDIR(st.st_mode)) {
    return Error{Code::kInvalidArgument, dir + ": is a file, expected the folder of a model"};
  }
  return {};
}

/// Only information: anything but a plain count is taken as absent.
std::optional<std::int64_t> TotalSize(const nlohmann::json& root) {
  const auto metadata = root.find("metadata");
  if (metadata == root.end() || !metadata->is_object()) return std::nullopt;
  const auto size = metadata->find("total_size");
  if (size == metadata->end() || !size->is_number_unsigned()) return std::nullopt;
  const auto value = size->get<std::uint64_t>();
  return value < (std::uint64_t{1} << 62) ? std::optional(static_cast<std::int64_t>(value))
                                          : std::nullopt;
}

}  // namespace

Result<SafetensorsIndex> ParseIndex(std::string_view text, std::string_view where) {
  K3_ASSIGN(const nlohmann::json root, ParseJson(text, where));
  if (!root.is_object()) {
    return Error{Code::kCorrupt, fmt::format("{}: not a JSON object", where)};
  }
  const JsonReader reader(root, where);
  K3_ASSIGN(const auto map, reader.Object("weight_map"));
  if (!map) return reader.Missing("weight_map");
  if (map->object().empty()) {
    return Error{Code::kCorrupt, fmt::format("{}: weight_map names no tensor", where)};
  }
  std::map<std::string, std::uint32_t, std::less<>> files;
  for (const auto& [name, value] : map->object().items()) {
    const std::string* file = value.get_ptr<const std::string*>();
    if (!file || !IsPlainName(*file)) {
      return Error{
          Code::kCorrupt,
          fmt::format(
              "{}: weight_map puts {} into {}, which is not the name of a file in this folder",
              where, Printable(name), PrintableValue(value))};
    }
    files.try_emplace(*file, 0u);
  }
  SafetensorsIndex index;
  index.total_size = TotalSize(root);
  for (auto& [file, number] : files) {
    number = static_cast<std::uint32_t>(index.files.size());
    index.files.push_back(file);
  }
  for (const auto& [name, value] : map->object().items()) {
    index.file_of.emplace_hint(index.file_of.end(), name,
                               files.find(value.get_ref<const std::string&>())->second);
  }
  return index;
}

/// Merges shards into one map and settles what they and the index disagree about.
class CheckpointBuilder {
 public:
  CheckpointBuilder(const std::string& dir, Residence residence) : residence_(residence) {
    checkpoint_.dir_ = dir;
  }

  Status AddIndexed(const SafetensorsIndex& index);
  Status AddSingle(const std::string& path);
  Checkpoint Finish();

 private:
  using Tensors = std::map<std::string, TensorRef, std::less<>>;
  struct Stray {
    Tensors::node_type node;
    std::size_t shard;
  };

  Status OpenShard(const std::string& path, Tensors* tensors);
  Status PlaceStrays(const SafetensorsIndex& index);
  Status CheckIndexCovered(const SafetensorsIndex& index) const;
  void Warn(std::string message);

  Checkpoint checkpoint_;
  Residence residence_;
  std::vector<Stray> strays_;  // tensors in a shard where the index does not expect them
  std::size_t unlisted_warnings_ = 0;
};

Status CheckpointBuilder::OpenShard(const std::string& path, Tensors* tensors) {
  K3_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(path, residence_));
  *tensors = file.TakeTensors();
  checkpoint_.shards_.push_back(std::make_shared<const SafetensorsFile>(std::move(file)));
  return {};
}

void CheckpointBuilder::Warn(std::string message) {
  if (checkpoint_.warnings_.size() < Checkpoint::kMaxWarnings) {
    checkpoint_.warnings_.push_back(std::move(message));
  } else {
    ++unlisted_warnings_;
  }
}

Status CheckpointBuilder::AddSingle(const std::string& path) {
  return OpenShard(path, &checkpoint_.tensors_);
}

Status CheckpointBuilder::AddIndexed(const SafetensorsIndex& index) {
  for (std::size_t s = 0; s < index.files.size(); ++s) {
    Tensors tensors;
    K3_TRY(OpenShard(Join(checkpoint_.dir_, index.files[s]), &tensors));
    while (!tensors.empty()) {
      auto node = tensors.extract(tensors.begin());
      const auto it = index.file_of.find(node.key());
      if (it != index.file_of.end() && it->second == s) {
        checkpoint_.tensors_.insert(std::move(node));
      } else {
        strays_.push_back({std::move(node), s});
      }
    }
  }
  K3_TRY(PlaceStrays(index));
  return CheckIndexCovered(index);
}

Status CheckpointBuilder::PlaceStrays(const SafetensorsIndex& index) {
  std::map<std::string_view, std::size_t> placed;  // strays that were taken, with their shard
  for (auto& [node, shard] : strays_) {
    const std::string& name = node.key();
    const std::string& file = index.files[shard];
    if (const auto before = placed.find(name); before != placed.end()) {
      return Error{
          Code::kCorrupt,
          fmt::format("{}: duplicate tensor {} in {} and {}, and the index does not choose",
                      checkpoint_.dir_, Printable(name), index.files[before->second], file)};
    }
    const auto listed = index.file_of.find(name);
    if (checkpoint_.tensors_.contains(name)) {
      Warn(fmt::format("{}: another copy of {} in {} is ignored; the index names {}",
                       checkpoint_.dir_, Printable(name), file, index.files[listed->second]));
      continue;
    }
    Warn(listed == index.file_of.end()
             ? fmt::format("{}: tensor {} is in {} but not in the index; it is used",
                           checkpoint_.dir_, Printable(name), file)
             : fmt::format("{}: tensor {} is in {}, not in {} as the index says", checkpoint_.dir_,
                           Printable(name), file, index.files[listed->second]));
    const auto inserted = checkpoint_.tensors_.insert(std::move(node));
    placed.emplace(inserted.position->first, shard);
  }
  return {};
}

Status CheckpointBuilder::CheckIndexCovered(const SafetensorsIndex& index) const {
  for (const auto& [name, file] : index.file_of) {
    if (!checkpoint_.tensors_.contains(name)) {
      return Error{
          Code::kNotFound,
          fmt::format("{}: tensor {} is missing: the index names {}, but no shard holds it",
                      checkpoint_.dir_, Printable(name), index.files[file])};
    }
  }
  return {};
}

Checkpoint CheckpointBuilder::Finish() {
  if (unlisted_warnings_ > 0) {
    checkpoint_.warnings_.push_back(
        fmt::format("{}: {} more of these", checkpoint_.dir_, unlisted_warnings_));
  }
  return std::move(checkpoint_);
}

namespace {

/// kAuto stays when the files of `dir` can be copied without pushing others out of memory.
Residence Settle(Residence residence, const std::string& dir,
                 const std::vector<std::string>& files) {
  if (residence != Residence::kAuto) return residence;
  std::int64_t free = UsableMemory().bytes / 2;
  for (const std::string& file : files) {
    struct stat info = {};
    if (::stat(Join(dir, file).c_str(), &info) == 0) free -= info.st_size;
  }
  return free > 0 ? Residence::kAuto : Residence::kMapped;
}

}  // namespace

Result<Checkpoint> Checkpoint::Open(const std::string& dir, Residence residence) {
  K3_TRY(CheckFolder(dir));
  const std::string index_path = Join(dir, kIndexName);
  K3_ASSIGN(const bool has_index, Exists(index_path));
  if (has_index) {
    K3_ASSIGN(const std::string text, ReadTextFile(index_path));
    K3_ASSIGN(const SafetensorsIndex index, ParseIndex(text, index_path));
    CheckpointBuilder builder(dir, Settle(residence, dir, index.files));
    K3_TRY(builder.AddIndexed(index));
    return builder.Finish();
  }
  const std::string single = Join(dir, kSingleName);
  K3_ASSIGN(const bool has_single, Exists(single));
  if (!has_single) {
    return Error{Code::kNotFound,
                 fmt::format("{}: no weights: neither {} nor {}", dir, kIndexName, kSingleName)};
  }
  CheckpointBuilder builder(dir, Settle(residence, dir, {kSingleName}));
  K3_TRY(builder.AddSingle(single));
  return builder.Finish();
}

bool Checkpoint::copied() const {
  return !shards_.empty() && std::all_of(shards_.begin(), shards_.end(),
                                         [](const auto& s) { return s->file().copied(); });
}

const TensorRef* Checkpoint::Find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

std::string Checkpoint::FileOf(std::string_view name) const {
  const TensorRef* t = Find(name);
  for (const auto& shard : shards_) {
    const MappedFile& file = shard->file();
    if (t && t->data >= file.data() && t->data <= file.data() + file.size()) return file.path();
  }
  return dir_;
}

}  // namespace k3
