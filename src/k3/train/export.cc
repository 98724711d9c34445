// Parameters as a model folder.
#include <fcntl.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "k3/io/atomic_file.h"
#include "k3/io/safetensors.h"
#include "k3/quant/mxfp4.h"
#include "k3/train/params.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

Error IoError(const std::string& path, const char* doing, const std::error_code& e) {
  return {Code::kIo, fmt::format("{}: cannot {}: {}", path, doing, e.message())};
}

/// Tensors as stored, and the bytes they point to.
struct Image {
  std::vector<NamedTensor> tensors;
  std::deque<std::vector<std::byte>> bytes;
  std::int64_t total = 0;

  void Add(std::string name, DType dtype, std::vector<std::int64_t> shape,
           std::vector<std::byte> data) {
    total += static_cast<std::int64_t>(data.size());
    bytes.push_back(std::move(data));
    tensors.push_back({std::move(name), {dtype, std::move(shape), bytes.back().data()}});
  }
};

void AddPlain(Image& image, const std::string& prefix, const Parameter& p) {
  const auto n = static_cast<std::size_t>(p.size());
  std::vector<std::byte> data(n * (p.spec.f32 ? 4 : 2));
  for (std::size_t i = 0; i < n; ++i) {
    if (p.spec.f32) {
      std::memcpy(data.data() + 4 * i, p.value + i, 4);
    } else {
      const BF16 b = ToBF16(p.value[i]);
      std::memcpy(data.data() + 2 * i, &b, 2);
    }
  }
  image.Add(prefix + p.spec.name, p.spec.f32 ? DType::kF32 : DType::kBF16, p.spec.shape,
            std::move(data));
}

void AddPacked(Image& image, const std::string& prefix, const Parameter& p) {
  const auto n = static_cast<std::size_t>(p.size());
  std::vector<std::byte> codes(n / 2), scales(n / 32);
  PackMxfp4({p.value, n}, MxScaleRule::kNoSaturation, reinterpret_cast<std::uint8_t*>(codes.data()),
            reinterpret_cast<std::uint8_t*>(scales.data()));
  image.Add(prefix + p.spec.name + "_packed", DType::kU8, {p.rows(), p.cols() / 2},
            std::move(codes));
  image.Add(prefix + p.spec.name + "_scale", DType::kU8, {p.rows(), p.cols() / 32},
            std::move(scales));
}

Status WriteFolder(const std::string& dir, Image image, const ExportOptions& options) {
  nlohmann::json index;
  index["metadata"]["total_size"] = image.total;
  constexpr const char* kShard = "model-00001-of-00001.safetensors";
  for (const NamedTensor& t : image.tensors) index["weight_map"][t.name] = kShard;
  K3_TRY(WriteSafetensors(dir + "/" + kShard, std::move(image.tensors), {{"format", "pt"}}));
  K3_TRY(WriteFileAtomically(dir + "/model.safetensors.index.json", index.dump(2) + "\n"));
  K3_TRY(WriteFileAtomically(dir + "/config.json", options.config_json));
  if (options.tokenizer_dir.empty()) return {};
  for (const char* name : {"tiktoken.model", "tokenizer_config.json", "generation_config.json"}) {
    std::error_code e;
    const std::string from = options.tokenizer_dir + "/" + name;
    if (!fs::exists(from, e)) continue;
    fs::copy_file(from, dir + "/" + name, fs::copy_options::overwrite_existing, e);
    if (e) return IoError(from, "copy", e);
  }
  return {};
}

}  // namespace

Status Parameters::Export(const std::string& dir, const ExportOptions& options) const {
  Image image;
  const std::string prefix = config_.nested ? "language_model." : "";
  for (const Parameter& p : list_) {
    const bool pack = options.pack_experts && PacksAsMxfp4(p.spec);
    pack ? AddPacked(image, prefix, p) : AddPlain(image, prefix, p);
  }
  const std::string partial = dir + ".partial", old = dir + ".old";
  std::error_code e;
  fs::remove_all(partial, e);
  fs::create_directories(partial, e);
  if (e) return IoError(partial, "create", e);
  if (Status s = WriteFolder(partial, std::move(image), options); !s.ok()) {
    fs::remove_all(partial, e);
    return s;
  }
  // In one step where the file system can; else there is no model for a moment.
  if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, dir.c_str(), RENAME_EXCHANGE) == 0) {
    fs::remove_all(partial, e), fs::remove_all(old, e);
    return {};
  }
  if (fs::exists(dir, e)) {
    fs::remove_all(old, e);
    fs::rename(dir, old, e);
    if (e) return IoError(dir, "replace", e);
  }
  fs::rename(partial, dir, e);
  if (e) return IoError(dir, "rename into place", e);
  fs::remove_all(old, e);
  return {};
}

}  // namespace k3
