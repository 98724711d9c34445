#include "k3/model/inventory.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "k3/base/check.h"
#include "k3/io/checkpoint.h"
#include "k3/io/json.h"
#include "k3/io/safetensors.h"
#include "k3/model/matrix_form.h"

namespace k3 {
namespace {

constexpr std::string_view kPrefix = "language_model.";
constexpr std::string_view kProbe = "model.layers.0.input_layernorm.weight";
constexpr std::size_t kMaxProblems = 50;

enum class PathKind { kAbsent, kFile, kFolder };

Result<PathKind> KindOf(const std::string& path) {
  struct stat st{};
  if (::stat(path.c_str(), &st) == 0) {
    return S_ISDIR(st.st_mode) ? PathKind::kFolder : PathKind::kFile;
  }
  if (errno == ENOENT || errno == ENOTDIR) return PathKind::kAbsent;
  return Error{Code::kIo, fmt::format("{}: {}", path, std::strerror(errno))};
}

/// Every number that is a whole part of a dotted name becomes "*".
std::string PatternOf(std::string_view name) {
  std::string out;
  while (!name.empty()) {
    const std::size_t dot = std::min(name.find('.'), name.size());
    const std::string_view part = name.substr(0, dot);
    const bool number =
        !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    out += number ? "*" : part;
    if (dot < name.size()) out += '.';
    name.remove_prefix(std::min(dot + 1, name.size()));
  }
  return out;
}

bool IsVision(std::string_view name) {
  return name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
}

bool IsFloat(std::string_view dtype) { return dtype == "BF16" || dtype == "F16" || dtype == "F32"; }

/// One tensor as it stands in a file, or as the config implies it.
struct Item {
  std::string_view dtype;
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0;
  std::int32_t shard = -1;
  std::int64_t begin = -1;  // address in the mapping of its shard; -1: not known
};

class Taker {
 public:
  explicit Taker(Inventory& out) : out_(out) {}

  Status Open(const std::string& dir);
  Status Walk();
  void Finish();

 private:
  using Key = std::tuple<std::string, std::string, std::string, std::vector<std::int64_t>>;

  Status ReadShards(const std::string& dir);
  void FindPrefix();
  bool Has(const std::string& full) const {
    return found_.contains(full) || index_.file_of.contains(full);
  }
  Item ItemOf(const std::string& full, std::string_view dtype, std::vector<std::int64_t> shape);
  void Problem(std::string text) {
    if (out_.problems.size() < kMaxProblems) out_.problems.push_back(std::move(text));
    ++n_problems_;
  }
  void Count(std::string_view role, const std::string& full, const std::string& pattern,
             const Item& item, std::int64_t parameters);
  Status Visit(const TensorSpec& spec);
  std::optional<WeightFormat> QuantizedForm(const TensorSpec& spec, const std::string& full) const;
  void Parts(const TensorSpec& spec, const std::string& full, WeightFormat format);
  void Plain(const TensorSpec& spec, const std::string& full);
  void CheckShape(const TensorSpec& spec, const std::string& full, const Item& item);
  void PlaceExpert(const TensorSpec& spec, const Item& item);
  void CloseExpert();
  void CountOthers();

  Inventory& out_;
  SafetensorsIndex index_;
  std::vector<SafetensorsFile> files_;  // parallel to out_.shards; empty when not read
  std::map<std::string, std::pair<TensorRef, std::int32_t>, std::less<>> found_;
  std::unordered_set<std::string> used_;
  std::map<Key, TensorGroup> groups_;
  std::map<std::string, RoleTotal, std::less<>> roles_;
  std::string name_, pattern_;
  std::size_t n_problems_ = 0;

  // The expert whose tensors are being visited.
  std::int64_t expert_ = -1, layer_ = -1;
  std::int64_t begin_ = 0, end_ = 0, sum_ = 0;
  std::int32_t expert_shard_ = -1;
  bool placed_ = false;
  bool chosen_ = true;  // a token uses the tensor being visited; of the experts the first top_k do
};

Status Taker::Open(const std::string& dir) {
  const std::string index_path = dir + "/model.safetensors.index.json";
  const std::string single = dir + "/model.safetensors";
  K3_ASSIGN(const PathKind has_index, KindOf(index_path));
  K3_ASSIGN(const PathKind has_single, KindOf(single));
  if (has_index != PathKind::kAbsent) {
    K3_ASSIGN(const std::string text, ReadTextFile(index_path));
    K3_ASSIGN(index_, ParseIndex(text, index_path));
    out_.index_total_size = index_.total_size;
    for (const std::string& file : index_.files) out_.shards.push_back({file, 0, 0, false});
    for (const auto& [name, shard] : index_.file_of) ++out_.shards[shard].tensors;
  } else if (has_single != PathKind::kAbsent) {
    out_.shards.push_back({"model.safetensors", 0, 0, false});
  }
  return ReadShards(dir);
}

Status Taker::ReadShards(const std::string& dir) {
  std::size_t read = 0;
  for (std::size_t i = 0; i < out_.shards.size(); ++i) {
    ShardInfo& shard = out_.shards[i];
    const std::string path = dir + "/" + shard.file;
    files_.emplace_back();
    K3_ASSIGN(const PathKind kind, KindOf(path));
    if (kind == PathKind::kAbsent) continue;
    auto file = SafetensorsFile::Open(path);
    if (!file.ok()) {
      Problem(file.message());
      continue;
    }
    shard.read = true;
    shard.bytes = static_cast<std::int64_t>(file->file().size());
    shard.tensors = static_cast<std::int64_t>(file->tensors().size());
    auto tensors = file->TakeTensors();
    for (auto& [name, ref] : tensors) {
      const auto listed = index_.file_of.find(name);
      const bool chosen = listed == index_.file_of.end() || listed->second == i;
      if (chosen &&
          !found_.emplace(name, std::pair(std::move(ref), static_cast<std::int32_t>(i))).second) {
        Problem(fmt::format("{}: duplicate tensor {}", path, Printable(name)));
      }
    }
    files_[i] = std::move(*file);
    ++read;
  }
  out_.source = out_.shards.empty()          ? ShapeSource::kConfig
                : read == out_.shards.size() ? ShapeSource::kHeaders
                : read > 0                   ? ShapeSource::kSomeHeaders
                                             : ShapeSource::kIndex;
  FindPrefix();
  return {};
}

void Taker::FindPrefix() {
  const bool with = Has(std::string(kPrefix).append(kProbe)), without = Has(std::string(kProbe));
  const bool use = with == without ? out_.config.nested : with;
  out_.prefix = use ? kPrefix : "";
  if (use != out_.config.nested) {
    out_.warnings.push_back(fmt::format("config.json is {}, but the tensor names are {} {}",
                                        out_.config.nested ? "nested" : "flat",
                                        use ? "with" : "without", kPrefix));
  }
}

/// From the header when it was read, else the given dtype and shape.
Item Taker::ItemOf(const std::string& full, std::string_view dtype,
                   std::vector<std::int64_t> shape) {
  Item item;
  if (const auto it = found_.find(full); it != found_.end()) {
    const TensorRef& t = it->second.first;
    item = {Name(t.dtype), t.shape, t.bytes(), it->second.second, 0};
    const auto& file = files_[static_cast<std::size_t>(item.shard)].file();
    item.begin = t.data - file.data();
    return item;
  }
  std::int64_t n = 1;
  for (const std::int64_t d : shape) n *= d;
  const auto listed = index_.file_of.find(full);
  item.dtype = dtype;
  item.shape = std::move(shape);
  item.bytes = n * SizeOf(*ParseDType(dtype));
  if (listed != index_.file_of.end()) item.shard = static_cast<std::int32_t>(listed->second);
  return item;
}

void Taker::Count(std::string_view role, const std::string& full, const std::string& pattern,
                  const Item& item, std::int64_t parameters) {
  TensorGroup& g = groups_[Key{std::string(role), pattern, std::string(item.dtype), item.shape}];
  if (g.count == 0) {
    g.pattern = pattern;
    g.role = role;
    g.dtype = item.dtype;
    g.shape = item.shape;
    g.example = full;
    if (item.shard >= 0) g.file = out_.shards[static_cast<std::size_t>(item.shard)].file;
  }
  g.count += 1;
  g.parameters += parameters;
  g.bytes += item.bytes;
  RoleTotal& r = roles_[std::string(role)];
  r.tensors += 1;
  r.parameters += parameters;
  r.bytes += item.bytes;
  if (chosen_) out_.active_parameters += parameters;
  out_.tensors += 1;
  out_.bytes += item.bytes;
  if (!index_.file_of.empty() || !found_.empty()) used_.insert(full);
}

void Taker::CheckShape(const TensorSpec& spec, const std::string& full, const Item& item) {
  if (!IsFloat(item.dtype)) {
    Problem(fmt::format("{}: wrong dtype: found {}, expected BF16, F16 or F32", Printable(full),
                        item.dtype));
    return;
  }
  const bool a_log = spec.name.ends_with(".A_log");
  std::int64_t n = 1;
  for (const std::int64_t d : item.shape) n *= d;
  const bool flat_conv = spec.shape.size() == 3 && item.shape.size() == 2 &&
                         item.shape[0] == spec.shape[0] && item.shape[1] == spec.shape[2];
  if (a_log ? n >= spec.shape[0] : item.shape == spec.shape || flat_conv) return;
  Problem(fmt::format("{}: wrong shape: found {}, expected {}", Printable(full),
                      ShapeString(item.shape), ShapeString(spec.shape)));
}

void Taker::Plain(const TensorSpec& spec, const std::string& full) {
  const Item item = ItemOf(full, spec.f32 ? "F32" : "BF16", spec.shape);
  CheckShape(spec, full, item);
  std::int64_t stored = 1;  // A_log may be padded
  for (const std::int64_t d : item.shape) stored *= d;
  Count(Name(spec.role), full, pattern_, item, stored);
  if (spec.role == TensorRole::kRoutedExpert) PlaceExpert(spec, item);
}

/// The format with scales that names and dtypes show, or the config when there are no names.
std::optional<WeightFormat> Taker::QuantizedForm(const TensorSpec& spec,
                                                 const std::string& full) const {
  if (!MayBeQuantized(spec)) return std::nullopt;
  if (out_.source == ShapeSource::kConfig) {
    const bool packed = out_.config.packed_experts && spec.role == TensorRole::kRoutedExpert &&
                        spec.shape[1] % 32 == 0;
    return packed ? std::optional(WeightFormat::kMxfp4) : std::nullopt;
  }
  if (Has(full + "_packed")) return WeightFormat::kMxfp4;
  const auto it = found_.find(full);
  if (it == found_.end()) {  // not read: names alone
    if (!Has(full))
      return Has(full + "_scale") ? std::optional(WeightFormat::kMxfp4) : std::nullopt;
    if (Has(full + "_scale_inv")) return WeightFormat::kFp8;
    return Has(full + "_scale") ? std::optional(WeightFormat::kInt8) : std::nullopt;
  }
  const DType dtype = it->second.first.dtype;
  const bool codes = dtype == DType::kF8E4M3 || dtype == DType::kI8;
  return codes ? FormatOfDType(dtype) : std::nullopt;
}

void Taker::Parts(const TensorSpec& spec, const std::string& full, WeightFormat format) {
  const std::int64_t rows = spec.shape[0], cols = spec.shape[1];
  const auto parts = PartsOf(format, rows, cols);
  const bool mxfp4 = format == WeightFormat::kMxfp4;
  if (format != WeightFormat::kFp8 && cols % 32 != 0) {
    Problem(fmt::format("{}{}: rows of {} values cannot be {} in groups of 32", Printable(full),
                        parts[0].suffix, cols, mxfp4 ? "packed" : "scaled"));
  }
  for (const MatrixPart& part : parts) {
    const std::string suffix(part.suffix), name = full + suffix;
    if (out_.source != ShapeSource::kConfig && !Has(name)) {
      Problem(fmt::format("{}: missing tensor", Printable(name)));
      continue;
    }
    const Item item = ItemOf(name, Name(part.dtype), part.shape);
    const bool scale = part.suffix == parts.back().suffix;
    const bool fits = item.dtype == Name(part.dtype) || (mxfp4 && scale && item.dtype == "F8_E8M0");
    if (!fits || item.shape != part.shape) {
      Problem(fmt::format("{}: wrong shape or dtype: found {} {}, expected {} {}", Printable(name),
                          item.dtype, ShapeString(item.shape), Name(part.dtype),
                          ShapeString(part.shape)));
    }
    Count(Name(spec.role), name, pattern_ + suffix, item, scale ? 0 : spec.elements());
    if (spec.role == TensorRole::kRoutedExpert) PlaceExpert(spec, item);
  }
}

void Taker::PlaceExpert(const TensorSpec& spec, const Item& item) {
  if (spec.expert != expert_ || spec.layer != layer_) {
    CloseExpert();
    expert_ = spec.expert;
    layer_ = spec.layer;
    begin_ = item.begin;
    end_ = sum_ = 0;
    expert_shard_ = item.shard;
    placed_ = true;
  }
  placed_ = placed_ && item.begin >= 0 && item.shard == expert_shard_;
  begin_ = std::min(begin_, item.begin);
  end_ = std::max(end_, item.begin + item.bytes);
  sum_ += item.bytes;
}

void Taker::CloseExpert() {
  if (expert_ < 0) return;
  out_.experts += 1;
  out_.bytes_per_expert = sum_;
  if (placed_ && end_ - begin_ == sum_) out_.contiguous_experts += 1;
  expert_ = -1;
}

Status Taker::Visit(const TensorSpec& spec) {
  name_.assign(out_.prefix).append(spec.name);
  pattern_ = PatternOf(spec.name);
  chosen_ = spec.role != TensorRole::kRoutedExpert || spec.expert < out_.config.moe.top_k;
  if (const auto format = QuantizedForm(spec, name_)) {
    if (format == WeightFormat::kMxfp4 && Has(name_)) {
      Problem(fmt::format("{}: ambiguous tensor: it is also there as _packed", Printable(name_)));
    }
    Parts(spec, name_, *format);
    return {};
  }
  if (out_.source != ShapeSource::kConfig && !Has(name_)) {
    Problem(fmt::format("{}: missing tensor", Printable(name_)));
    return {};
  }
  Plain(spec, name_);
  return {};
}

Status Taker::Walk() {
  K3_TRY(ForEachTensor(out_.config, [this](const TensorSpec& spec) { return Visit(spec); }));
  CloseExpert();
  out_.has_head = !out_.config.tied_embeddings;
  const std::string head = out_.prefix + "lm_head.weight";
  if (out_.config.tied_embeddings && (Has(head) || Has(head + "_packed"))) {
    TensorSpec spec;
    spec.name = "lm_head.weight";
    spec.shape = {out_.config.vocab, out_.config.hidden};
    spec.role = TensorRole::kHead;
    K3_TRY(Visit(spec));
    out_.has_head = true;
    out_.warnings.push_back("tie_word_embeddings is true, but lm_head.weight is there; it is used");
  }
  CountOthers();
  return {};
}

/// Tensors the config does not name.
void Taker::CountOthers() {
  const auto other = [this](const std::string& name) {
    if (used_.contains(name)) return;
    const bool vision = IsVision(name);
    const bool read = found_.contains(name);
    const Item item = ItemOf(name, "U8", {0});  // unknown shape: no bytes
    std::string_view bare = name;
    if (bare.starts_with(out_.prefix)) bare.remove_prefix(out_.prefix.size());
    Item shown = item;
    if (!read) shown.dtype = "?", shown.shape.clear();
    // Anybody can have written this name, and it will be shown.
    Count(vision ? kVisionRole : kUnexpectedRole, name, PatternOf(Printable(bare)), shown, 0);
    (vision ? out_.vision_tensors : out_.unexpected_tensors) += 1;
    (vision ? out_.vision_bytes : out_.unexpected_bytes) += item.bytes;
    const bool text = bare.starts_with("model.") || bare.starts_with("lm_head");
    if (!vision && text && out_.config.has_variant) {
      Problem(fmt::format("{}: unexpected tensor", Printable(name)));
    }
  };
  for (const auto& [name, unused] : found_) other(name);
  for (const auto& [name, unused] : index_.file_of) other(name);
  for (const auto& [name, shard] : index_.file_of) {
    if (out_.shards[shard].read && !found_.contains(name)) {
      Problem(fmt::format("{}: the index names {}, which does not hold it", Printable(name),
                          out_.shards[shard].file));
    }
  }
}

void Taker::Finish() {
  for (auto& [key, group] : groups_) out_.groups.push_back(std::move(group));
  constexpr TensorRole kRoles[] = {TensorRole::kEmbedding,    TensorRole::kHead,
                                   TensorRole::kNorm,         TensorRole::kResidual,
                                   TensorRole::kAttention,    TensorRole::kDense,
                                   TensorRole::kRouter,       TensorRole::kLatent,
                                   TensorRole::kSharedExpert, TensorRole::kRoutedExpert};
  for (const TensorRole role : kRoles) {
    const auto it = roles_.find(Name(role));
    if (it == roles_.end()) continue;
    it->second.role = it->first;
    out_.parameters += it->second.parameters;
    out_.roles.push_back(it->second);
  }
  const auto rank = [&](const std::string& role) {
    for (std::size_t i = 0; i < out_.roles.size(); ++i) {
      if (out_.roles[i].role == role) return i;
    }
    return out_.roles.size();
  };
  std::stable_sort(
      out_.groups.begin(), out_.groups.end(),
      [&](const TensorGroup& a, const TensorGroup& b) { return rank(a.role) < rank(b.role); });
  // A table that is not the output matrix too is only looked up in.
  const auto table = roles_.find(Name(TensorRole::kEmbedding));
  if (out_.has_head && table != roles_.end()) out_.active_parameters -= table->second.parameters;
  if (n_problems_ > out_.problems.size()) {
    out_.problems.push_back(fmt::format("{} more problems", n_problems_ - out_.problems.size()));
  }
}

}  // namespace

std::string_view Name(ShapeSource source) {
  switch (source) {
    case ShapeSource::kHeaders:
      return "headers of all shards";
    case ShapeSource::kSomeHeaders:
      return "headers of some shards, the rest as the config implies";
    case ShapeSource::kIndex:
      return "shapes as the config implies; no shard was read";
    case ShapeSource::kConfig:
      return "everything as the config implies; no index, no shards";
  }
  return "";
}

const TensorGroup* Inventory::Find(std::string_view suffix) const {
  for (const TensorGroup& g : groups) {
    const bool ours = g.role != kVisionRole && g.role != kUnexpectedRole;
    if (ours && g.pattern.ends_with(suffix)) return &g;
  }
  return nullptr;
}

std::int64_t Inventory::role_bytes(TensorRole role) const {
  for (const RoleTotal& r : roles) {
    if (r.role == Name(role)) return r.bytes;
  }
  return 0;
}

Result<Inventory> TakeInventory(const std::string& path) {
  K3_ASSIGN(const PathKind kind, KindOf(path));
  if (kind == PathKind::kAbsent) {
    return Error{Code::kNotFound, fmt::format("{}: no such file or folder", path)};
  }
  const std::string config_path = kind == PathKind::kFolder ? path + "/config.json" : path;
  Inventory out;
  out.path = path;
  K3_ASSIGN(out.config_text, ReadTextFile(config_path, std::size_t{1} << 24));
  K3_ASSIGN(out.config, ParseModelConfig(out.config_text, config_path));
  out.warnings = out.config.warnings;
  Taker taker(out);
  if (kind == PathKind::kFolder) {
    K3_TRY(taker.Open(path));
  } else {
    out.prefix = out.config.nested ? kPrefix : "";
  }
  K3_TRY(taker.Walk());
  taker.Finish();
  return out;
}

}  // namespace k3
