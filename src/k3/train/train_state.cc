#include "k3/train/train_state.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "k3/io/safetensors.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

TensorRef Floats(const float* p, std::int64_t n) {
  return {DType::kF32, {n}, reinterpret_cast<const std::byte*>(p)};
}

std::vector<double> Flatten(const Balancer& balancer) {
  std::vector<double> all;
  for (const auto& [layer, tau] : balancer.thresholds())
    all.insert(all.end(), tau.begin(), tau.end());
  return all;
}

/// Of names, sizes and contents, and of everything in `metadata` but the hash itself.
std::string Hash(const std::map<std::string, TensorRef, std::less<>>& tensors,
                 const std::map<std::string, std::string>& metadata) {
  std::string head;
  for (const auto& [key, value] : metadata) {
    if (key != "hash") head += fmt::format("{}={}\n", key, value);
  }
  for (const auto& [name, t] : tensors) head += fmt::format("{} {}\n", name, t.bytes());
  std::uint64_t h = XXH3_64bits(head.data(), head.size());
  for (const auto& [name, t] : tensors) {
    h = XXH3_64bits_withSeed(t.data, static_cast<std::size_t>(t.bytes()), h);
  }
  return fmt::format("{:016x}", h);
}

Result<std::int64_t> Number(const SafetensorsFile& f, const char* key) {
  const auto it = f.metadata().find(key);
  std::int64_t value = 0;
  if (it != f.metadata().end()) {
    const char* end = it->second.data() + it->second.size();
    const auto r = std::from_chars(it->second.data(), end, value);
    if (r.ec == std::errc() && r.ptr == end && value >= 0) return value;
  }
  return Error{Code::kCorrupt, fmt::format("{}: no number under {}", f.path(), key)};
}

Result<TrainState> ReadCounters(const SafetensorsFile& f) {
  TrainState s;
  if (const auto it = f.metadata().find("config"); it != f.metadata().end()) {
    s.config = std::strtoull(it->second.c_str(), nullptr, 16);
  }
  K3_ASSIGN(s.step, Number(f, "step"));
  K3_ASSIGN(s.tokens, Number(f, "tokens"));
  K3_ASSIGN(s.skipped, Number(f, "skipped"));
  K3_ASSIGN(s.rows_per_step, Number(f, "rows_per_step"));
  K3_ASSIGN(s.cursor.epoch, Number(f, "epoch"));
  K3_ASSIGN(s.cursor.row, Number(f, "row"));
  return s;
}

}  // namespace

Status SaveState(const std::string& path, const TrainState& s, const Parameters& params,
                 Optimizer& optimizer, const Balancer& balancer) {
  const std::int64_t n = params.total();
  const std::vector<double> tau = Flatten(balancer);
  std::map<std::string, TensorRef, std::less<>> tensors;
  tensors["values"] = Floats(const_cast<Parameters&>(params).values(), n);
  tensors["first"] = Floats(optimizer.first().data(), n);
  tensors["second"] = Floats(optimizer.second().data(), n);
  tensors["thresholds"] = {DType::kU8,
                           {static_cast<std::int64_t>(tau.size() * sizeof(double))},
                           reinterpret_cast<const std::byte*>(tau.data())};
  std::vector<NamedTensor> list;
  for (const auto& [name, t] : tensors) list.push_back({name, t});
  std::map<std::string, std::string> metadata{
      {"run", fmt::format("{:016x}", s.run)},
      {"config", fmt::format("{:016x}", s.config)},
      {"step", std::to_string(s.step)},
      {"tokens", std::to_string(s.tokens)},
      {"skipped", std::to_string(s.skipped)},
      {"rows_per_step", std::to_string(s.rows_per_step)},
      {"epoch", std::to_string(s.cursor.epoch)},
      {"row", std::to_string(s.cursor.row)},
      {"optimizer_steps", std::to_string(optimizer.steps())}};
  metadata["hash"] = Hash(tensors, metadata);
  return WriteSafetensors(path, std::move(list), metadata);
}

Result<TrainState> LoadState(const std::string& path, std::uint64_t run, Parameters& params,
                             Optimizer& optimizer, Balancer& balancer) {
  K3_ASSIGN(const SafetensorsFile f, SafetensorsFile::Open(path));
  auto corrupt = [&](const std::string& what) {
    return Error{Code::kCorrupt, fmt::format("{}: {}", path, what)};
  };
  const auto hash = f.metadata().find("hash"), owner = f.metadata().find("run");
  if (hash == f.metadata().end() || hash->second != Hash(f.tensors(), f.metadata())) {
    return corrupt("its contents do not match their hash");
  }
  if (owner == f.metadata().end() || owner->second != fmt::format("{:016x}", run)) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: a checkpoint of another model, data set, seed or sequence "
                             "length; use another `out` folder",
                             path)};
  }
  auto thresholds = balancer.thresholds();
  std::size_t n_tau = 0;
  for (const auto& [layer, tau] : thresholds) n_tau += tau.size();
  const std::int64_t n = params.total();
  for (const auto& [name, bytes] : std::initializer_list<std::pair<const char*, std::int64_t>>{
           {"values", 4 * n},
           {"first", 4 * n},
           {"second", 4 * n},
           {"thresholds", static_cast<std::int64_t>(8 * n_tau)}}) {
    const auto it = f.tensors().find(name);
    if (it == f.tensors().end() || it->second.bytes() != bytes) {
      return Error{Code::kInvalidArgument,
                   fmt::format("{}: {} has not the size of this model and balance.window; use "
                               "another `out` folder",
                               path, name)};
    }
  }
  K3_ASSIGN(TrainState s, ReadCounters(f));
  s.run = run;
  K3_ASSIGN(const std::int64_t optimizer_steps, Number(f, "optimizer_steps"));
  auto copy = [&](const char* name, void* to) {
    const TensorRef& t = f.tensors().find(name)->second;
    std::memcpy(to, t.data, static_cast<std::size_t>(t.bytes()));
  };
  copy("values", params.values());
  copy("first", optimizer.first().data());
  copy("second", optimizer.second().data());
  const auto* tau = f.tensors().find("thresholds")->second.data;
  for (auto& [layer, values] : thresholds) {
    std::memcpy(values.data(), tau, values.size() * sizeof(double));
    tau += values.size() * sizeof(double);
  }
  K3_TRY(balancer.SetThresholds(thresholds));
  optimizer.set_steps(optimizer_steps);
  params.Refresh();
  return s;
}

std::string StatePath(const std::string& dir, std::int64_t step) {
  return fmt::format("{}/step-{:010}.safetensors", dir, step);
}

std::vector<std::string> ListStates(const std::string& dir) {
  std::vector<std::string> paths;
  std::error_code e;
  for (const auto& entry : fs::directory_iterator(dir, e)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("step-") && name.ends_with(".safetensors") && name.size() == 27) {
      paths.push_back(entry.path().string());
    }
  }
  std::sort(paths.rbegin(), paths.rend());
  return paths;
}

void PruneStates(const std::string& dir, std::int64_t step, std::int64_t keep) {
  const std::string newest = StatePath(dir, step);
  std::error_code ignored;
  for (const std::string& path : ListStates(dir)) {
    const bool newer = fs::path(path).filename() > fs::path(newest).filename();
    if (newer || keep-- <= 0) fs::remove(path, ignored);
  }
}

void RemoveUnfinished(const std::string& dir) {
  std::error_code e;
  std::vector<fs::path> unfinished;
  for (const auto& entry : fs::directory_iterator(dir, e)) {
    if (entry.path().filename().string().find(".tmp-") != std::string::npos) {
      unfinished.push_back(entry.path());
    }
  }
  for (const fs::path& path : unfinished) fs::remove(path, e);
}

}  // namespace k3
