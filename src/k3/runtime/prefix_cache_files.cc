// Snapshots in a folder.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "k3/io/mapped_file.h"
#include "k3/runtime/prefix_cache.h"

namespace k3 {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kSuffix = ".k3p";

}  // namespace

/// Model and arithmetic: files of others may lie in the same folder.
std::string PrefixCache::FilePrefix() const {
  return fmt::format("prefix-{}-{:016x}-", model_.math() == MathMode::kFast ? "fast" : "exact",
                     model_.fingerprint());
}

/// Writes the node's snapshot, which stays in memory. False when it cannot be on disk.
bool PrefixCache::Spill(Node* node) {
  Entry& e = *node->value;
  if (options_.spill_dir.empty()) return false;
  if (!e.file.empty()) return true;
  const std::vector<TokenId> tokens = tree_.Tokens(node);
  const std::uint64_t name = XXH3_64bits(tokens.data(), sizeof(TokenId) * tokens.size());
  const std::string bytes = SerializeSnapshot(tokens, e.snapshot, model_);
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (size > options_.spill_bytes) return false;
  spilling_ = node;
  while (file_bytes_ + size > options_.spill_bytes) {
    Node* least = LeastWorth(false);
    if (least == nullptr) break;
    if (least->value->in_memory) {
      DeleteFile(*least->value);
    } else {
      Forget(least);
    }
  }
  spilling_ = nullptr;
  const std::string path =
      fmt::format("{}/{}{:016x}{}", options_.spill_dir, FilePrefix(), name, kSuffix);
  if (const Status s = WriteFileAtomically(path, bytes, 0600); !s.ok()) {
    spdlog::warn("prefix cache: {}", s.message());
    return false;
  }
  e.file = path;
  e.file_bytes = size;
  file_bytes_ += size;
  ++stats_.spilled;
  return true;
}

Result<SavedSnapshot> PrefixCache::ReadFile(const std::string& path) const {
  // Read, not mapped: somebody else may cut the file meanwhile.
  K3_ASSIGN(const std::string bytes,
            ReadTextFile(path, static_cast<std::size_t>(options_.spill_bytes)));
  return ParseSnapshot(bytes, path, model_);
}

bool PrefixCache::Load(Node* node, Snapshot& snapshot) {
  auto read = ReadFile(node->value->file);
  if (read.ok() && read->tokens == tree_.Tokens(node)) {
    snapshot = std::move(read->snapshot);
    return true;
  }
  ++stats_.damaged;
  spdlog::warn("prefix cache: {}",
               read.ok() ? node->value->file + ": another text than expected" : read.message());
  return false;
}

void PrefixCache::DeleteFile(Entry& entry) {
  if (entry.file.empty()) return;
  std::remove(entry.file.c_str());
  file_bytes_ -= entry.file_bytes;
  entry.file.clear();
  entry.file_bytes = 0;
}

Status PrefixCache::ScanFolder() {
  if (options_.spill_dir.empty()) return {};
  std::error_code error;
  std::vector<std::string> paths;
  fs::directory_iterator at(options_.spill_dir, error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (name.starts_with(FilePrefix()) && name.ends_with(kSuffix)) paths.push_back(at->path());
  }
  if (error) {
    return Error{Code::kIo, fmt::format("{}: cannot read the folder for snapshots: {}",
                                        options_.spill_dir, error.message())};
  }
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) AddFile(path);
  Update();
  return {};
}

/// Makes a file of an earlier run known; deletes it when it is of no use.
void PrefixCache::AddFile(const std::string& path) {
  auto read = ReadFile(path);
  std::error_code error;
  const auto size = static_cast<std::int64_t>(fs::file_size(path, error));
  if (!read.ok()) {
    ++stats_.damaged;
    spdlog::warn("prefix cache: {}", read.message());
  }
  const auto length = read.ok() ? static_cast<std::int64_t>(read->tokens.size()) : 0;
  const std::int64_t nodes = 4 * length + 2 * Tree::kNodeBytes;
  if (!read.ok() || error || file_bytes_ + size > options_.spill_bytes ||
      tree_.bytes() + nodes > budget()) {
    std::remove(path.c_str());
    return;
  }
  Node* node = tree_.Make(read->tokens);
  if (node->value) return;  // the same text under two names
  node->value = std::make_unique<Entry>();
  node->value->file = path;
  node->value->file_bytes = size;
  node->value->total_bytes = read->snapshot.state.bytes();
  node->value->has_scores = !read->snapshot.logits.empty();
  node->value->snapshot.whole_only = read->snapshot.whole_only;
  file_bytes_ += size;
  holders_.push_back(node);
}

}  // namespace k3
