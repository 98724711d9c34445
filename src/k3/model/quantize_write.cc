// The conversion itself: shard by shard, some rows at a time.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "k3/io/atomic_folder.h"
#include "k3/io/json.h"
#include "k3/io/mapped_file.h"
#include "k3/model/matrix_form.h"
#include "k3/model/quantize_internal.h"
#include "k3/quant/decode_row.h"

namespace k3 {
namespace quantize_internal {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr std::int64_t kGroupRows = kFp8Block;                // rows a thread converts at a time
constexpr std::int64_t kStripValues = std::int64_t{1} << 22;  // and all threads together

/// A run of rows in its new form.
struct Group {
  std::vector<float> values, decoded;
  std::vector<std::uint8_t> codes, scales;
  RoundingError error;
  std::string bad;  // what is wrong with a value; empty: nothing
};

std::string BadValue(const char* when, std::int64_t row, std::int64_t col, float value) {
  return fmt::format("value [{}, {}] is {}{}, expected a finite number", row, col, value, when);
}

/// Rows [first, first + count) of w as `to`.
void Convert(const WeightRef& w, WeightFormat to, std::int64_t first, std::int64_t count,
             bool measure, Group& g) {
  const std::int64_t n = count * w.cols;
  const auto size = [](std::int64_t bytes) { return static_cast<std::size_t>(bytes); };
  g.values.resize(size(n)), g.codes.resize(size(CodeBytes(to, count, w.cols)));
  g.scales.resize(size(ScaleBytes(to, count, w.cols)));
  g.error = {};
  for (std::int64_t r = 0; r < count; ++r) {
    float* row = g.values.data() + r * w.cols;
    DecodeRow(w, first + r, row);
    const float* bad = std::find_if(row, row + w.cols, [](float x) { return !std::isfinite(x); });
    if (bad != row + w.cols) {
      g.bad = BadValue("", first + r, bad - row, *bad);
      return;
    }
  }
  EncodeRows(to, g.values.data(), count, w.cols, g.codes.data(), g.scales.data());
  if (!measure) return;
  g.decoded.resize(size(w.cols));
  const WeightRef rounded{to, count, w.cols, g.codes.data(), g.scales.data()};
  for (std::int64_t r = 0; r < count; ++r) {
    DecodeRow(rounded, r, g.decoded.data());
    const auto bad =
        std::find_if(g.decoded.begin(), g.decoded.end(), [](float x) { return !std::isfinite(x); });
    if (bad != g.decoded.end()) {
      g.bad = BadValue(" after rounding", first + r, bad - g.decoded.begin(), *bad);
      return;
    }
    g.error.Add(g.values.data() + r * w.cols, g.decoded.data(), w.cols);
  }
}

class Writer {
 public:
  Writer(const Source& source, const QuantizeRun& run, QuantizeResult& result)
      : source_(source), run_(run), result_(result) {}

  Status Run(const std::string& folder);

 private:
  struct Piece {
    const TensorRef* copied = nullptr;  // bytes as they are
    QuantizedMatrix* matrix = nullptr;  // or a part of this one
    bool scales = false;
  };
  struct Shard {
    std::vector<NamedTensor> tensors;
    std::map<std::string, Piece> pieces;
  };

  void PlanShards();
  Status WriteShard(const std::string& path, const Shard& shard,
                    const std::map<std::string, std::string>& metadata);
  Status WritePart(SafetensorsWriter& writer, QuantizedMatrix& m, bool scales);
  Status WriteBytes(SafetensorsWriter& writer, const void* data, std::int64_t bytes);
  Status WriteIndex(const std::string& path) const;
  std::string Full(const QuantizedMatrix& m) const { return source_.check.prefix + m.name; }

  const Source& source_;
  const QuantizeRun& run_;
  QuantizeResult& result_;
  std::vector<std::string> names_;  // plain file names of the shards
  std::vector<Shard> shards_;
  std::vector<Group> groups_;
  std::int64_t done_ = 0;
};

/// Every tensor stays in its shard; the parts of a converted matrix go where its codes were.
void Writer::PlanShards() {
  const Checkpoint& files = source_.checkpoint;
  std::map<std::string, std::size_t> shard_of;
  for (std::size_t i = 0; i < files.shard_count(); ++i) {
    const std::string path = files.shard(i).path();
    names_.push_back(path.substr(path.rfind('/') + 1));
    shard_of.emplace(path, i);
  }
  shards_.resize(names_.size());
  const auto place = [&](const std::string& name) -> Shard& {
    return shards_[shard_of.at(files.FileOf(name))];
  };
  std::vector<const TensorRef*> replaced;
  for (QuantizedMatrix& m : result_.matrices) {
    if (!m.changes()) continue;
    const std::string full = Full(m);
    const auto before = PartsOf(m.from, m.rows, m.cols);
    for (const MatrixPart& part : before) {
      replaced.push_back(files.Find(full + std::string(part.suffix)));
    }
    Shard& shard = place(full + std::string(before[0].suffix));
    const auto after = PartsOf(m.to, m.rows, m.cols);
    for (std::size_t i = 0; i < after.size(); ++i) {
      const std::string name = full + std::string(after[i].suffix);
      shard.tensors.push_back({name, {after[i].dtype, after[i].shape, nullptr}});
      shard.pieces[name] = {nullptr, &m, i > 0};
    }
  }
  std::sort(replaced.begin(), replaced.end());
  for (const auto& [name, t] : files.tensors()) {
    if (std::binary_search(replaced.begin(), replaced.end(), &t)) continue;
    Shard& shard = place(name);
    shard.tensors.push_back({name, t});
    shard.pieces[name] = {&t, nullptr, false};
  }
}

Status Writer::WriteBytes(SafetensorsWriter& writer, const void* data, std::int64_t bytes) {
  constexpr std::int64_t kStep = std::int64_t{16} << 20;  // between looks at the cancel flag
  const auto* p = static_cast<const std::byte*>(data);
  do {
    if (run_.cancel != nullptr && run_.cancel->load(std::memory_order_relaxed)) {
      return Error{Code::kCancelled, "interrupted"};
    }
    const std::int64_t n = std::min(bytes, kStep);
    K3_TRY(writer.Write(p, n));
    p += n, bytes -= n, done_ += n;
    if (run_.progress) run_.progress(done_, result_.bytes_after);
  } while (bytes > 0);
  return {};
}

/// Codes and scales are tensors of their own, apart in the file: rows are converted once for each.
Status Writer::WritePart(SafetensorsWriter& writer, QuantizedMatrix& m, bool scales) {
  const WeightRef w = MatrixOf(source_.checkpoint.tensors(), Full(m));
  const std::int64_t strip =
      std::max<std::int64_t>(1, kStripValues / std::max<std::int64_t>(1, w.cols) / kGroupRows) *
      kGroupRows;
  for (std::int64_t r0 = 0; r0 < w.rows; r0 += strip) {
    const std::int64_t rows = std::min(strip, w.rows - r0);
    const std::int64_t n = (rows + kGroupRows - 1) / kGroupRows;
    groups_.resize(std::max(groups_.size(), static_cast<std::size_t>(n)));
    run_.pool->ParallelFor(n, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t first = i * kGroupRows;
        Convert(w, m.to, r0 + first, std::min(kGroupRows, rows - first), !scales,
                groups_[static_cast<std::size_t>(i)]);
      }
    });
    for (std::int64_t i = 0; i < n; ++i) {
      const Group& g = groups_[static_cast<std::size_t>(i)];
      if (!g.bad.empty()) {
        const std::string full = Full(m);
        const bool packed = m.from == WeightFormat::kMxfp4;
        return Error{Code::kNumeric,
                     fmt::format("{}: tensor {} to {}: {}",
                                 source_.checkpoint.FileOf(packed ? full + "_packed" : full),
                                 Printable(full), Name(m.to), g.bad)};
      }
      if (!scales) m.error.Merge(g.error);
      const auto& bytes = scales ? g.scales : g.codes;
      K3_TRY(WriteBytes(writer, bytes.data(), static_cast<std::int64_t>(bytes.size())));
    }
  }
  return {};
}

Status Writer::WriteShard(const std::string& path, const Shard& shard,
                          const std::map<std::string, std::string>& metadata) {
  K3_ASSIGN(SafetensorsWriter writer, SafetensorsWriter::Create(path, shard.tensors, metadata));
  for (const NamedTensor& t : writer.order()) {
    const Piece& piece = shard.pieces.at(t.name);
    if (piece.copied != nullptr) {
      K3_TRY(WriteBytes(writer, piece.copied->data, piece.copied->bytes()));
    } else {
      K3_TRY(WritePart(writer, *piece.matrix, piece.scales));
    }
  }
  return writer.Commit();
}

Status Writer::WriteIndex(const std::string& path) const {
  nlohmann::json map = nlohmann::json::object();
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    for (const NamedTensor& t : shards_[i].tensors) map[t.name] = names_[i];
  }
  const nlohmann::json index{{"metadata", {{"total_size", result_.bytes_after}}},
                             {"weight_map", std::move(map)}};
  return WriteFileAtomically(
      path, index.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

Status Writer::Run(const std::string& folder) {
  PlanShards();
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    K3_TRY(
        WriteShard(folder + "/" + names_[i], shards_[i], source_.checkpoint.shard(i).metadata()));
    shards_[i].pieces.clear();
  }
  // A single model.safetensors without an index stays one.
  if (names_.size() == 1 && names_[0] == "model.safetensors") return {};
  return WriteIndex(folder + "/" + kIndexName);
}

Status CopyOthers(const std::string& dir, const std::string& folder) {
  K3_ASSIGN(const OtherFiles files, FindOtherFiles(dir));
  for (const std::string& name : files.copied) {
    K3_ASSIGN(const std::string text, ReadTextFile(dir + "/" + name, kMaxCopiedFile));
    K3_TRY(WriteFileAtomically(folder + "/" + name, text));
  }
  return {};
}

}  // namespace

Result<OtherFiles> FindOtherFiles(const std::string& dir) {
  namespace fs = std::filesystem;
  OtherFiles files;
  std::error_code error;
  fs::directory_iterator it(dir, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with('.') || name.ends_with(".safetensors") || name == "config.json" ||
        name == kIndexName) {
      continue;
    }
    std::error_code unknown;
    const bool regular = fs::is_regular_file(it->path(), unknown);
    const std::uintmax_t size = regular ? fs::file_size(it->path(), unknown) : 0;
    if (regular && !unknown && size <= kMaxCopiedFile) {
      files.copied.push_back(name);
      files.bytes += static_cast<std::int64_t>(size);
    } else {
      files.left_out.push_back(name);
    }
  }
  if (error) return Error{Code::kIo, fmt::format("{}: {}", dir, error.message())};
  std::sort(files.copied.begin(), files.copied.end());
  std::sort(files.left_out.begin(), files.left_out.end());
  return files;
}

}  // namespace quantize_internal

Result<QuantizeResult> Quantize(const std::string& dir, const std::string& out,
                                const QuantizeOptions& options, const QuantizeRun& run) {
  using namespace quantize_internal;
  K3_TRY(AtomicFolder::Check(out));
  K3_ASSIGN(const Source source, OpenSource(dir));
  K3_ASSIGN(QuantizeResult result, Plan(source, options));
  K3_ASSIGN(const std::int64_t there, FreeDiskBytes(out));
  if (there < result.file_bytes) {
    return Error{Code::kIo, fmt::format("{}: needs about {} bytes of disk space, {} are free", out,
                                        result.file_bytes, there)};
  }
  const std::string config_path = dir + "/config.json";
  K3_ASSIGN(const std::string config, ReadTextFile(config_path, std::size_t{1} << 24));
  K3_ASSIGN(const std::string new_config,
            QuantizedConfigText(config, config_path, source.check.prefix, result.matrices));
  K3_ASSIGN(AtomicFolder folder, AtomicFolder::Create(out));
  K3_TRY(Writer(source, run, result).Run(folder.temporary()));
  K3_TRY(WriteFileAtomically(folder.temporary() + "/config.json", new_config));
  K3_TRY(CopyOthers(dir, folder.temporary()));
  K3_TRY(folder.Commit());
  return result;
}

}  // namespace k3
