// Snapshots in a folder.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "k3/io/mapped_file.h"
#include "k3/runtime/prefix_cache.h"
#include "k3/runtime/sequence_state.h"

namespace k3 {
namespace fs = std::filesystem;

// A file, little-endian.
//   0  char[8]  "K3SNAP\0\0"
//   8  u32      version, 1
//  12  u32      1: whole_only
//  16  u64      bytes of the state file that follows (sequence_state.h)
//  24  u64      number of scores
//  32  bytes    the state file, then an f32 for each score
//      u64      XXH3-64 of everything before it; the file ends here
namespace {

constexpr std::string_view kSuffix = ".k3p";
constexpr std::string_view kFileMagic("K3SNAP\0\0", 8);
constexpr std::uint32_t kFileVersion = 1;

struct FileHeader {
  char magic[8];
  std::uint32_t version, whole_only;
  std::uint64_t state_bytes, n_scores;
};
static_assert(sizeof(FileHeader) == 32);

Error Damaged(const std::string& path, std::string_view what) {
  return Error{Code::kCorrupt, fmt::format("{}: snapshot is damaged: {}", path, what)};
}

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
  SequenceState state;
  state.tokens = tree_.Tokens(node);
  const std::uint64_t name = XXH3_64bits(state.tokens.data(), 4 * state.tokens.size());
  state.model = std::move(e.snapshot.state);
  const std::string image = SerializeState(state, model_.fingerprint());
  e.snapshot.state = std::move(state.model);
  const std::vector<float>& scores = e.snapshot.logits;
  FileHeader header{{}, kFileVersion, e.snapshot.whole_only ? 1u : 0u, image.size(), scores.size()};
  std::copy(kFileMagic.begin(), kFileMagic.end(), header.magic);
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes += image;
  bytes.append(reinterpret_cast<const char*>(scores.data()), 4 * scores.size());
  const std::uint64_t checksum = XXH3_64bits(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char*>(&checksum), sizeof checksum);
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
  if (const Status s = WriteFileAtomically(path, bytes); !s.ok()) {
    spdlog::warn("prefix cache: {}", s.message());
    return false;
  }
  e.file = path;
  e.file_bytes = size;
  file_bytes_ += size;
  ++stats_.spilled;
  return true;
}

/// A whole, undamaged snapshot of this model and arithmetic, or what is wrong with the file.
Result<Snapshot> PrefixCache::ReadFile(const std::string& path,
                                       std::vector<TokenId>& tokens) const {
  // Read, not mapped: somebody else may cut the file meanwhile.
  K3_ASSIGN(const std::string bytes,
            ReadTextFile(path, static_cast<std::size_t>(options_.spill_bytes)));
  FileHeader h;
  std::uint64_t checksum = 0;
  if (bytes.size() < sizeof h + sizeof checksum) return Damaged(path, "it is cut");
  std::memcpy(&h, bytes.data(), sizeof h);
  const std::size_t body = bytes.size() - sizeof h - sizeof checksum;
  if (std::string_view(h.magic, 8) != kFileMagic || h.version != kFileVersion || h.whole_only > 1) {
    return Damaged(path, "not the header that is expected");
  }
  // Each part is compared with what is left, so no sum can overflow.
  const bool has_scores = h.n_scores != 0;
  if (h.state_bytes > body || h.n_scores != (body - h.state_bytes) / 4 ||
      (body - h.state_bytes) % 4 != 0 ||
      (has_scores && h.n_scores != static_cast<std::uint64_t>(model_.vocab()))) {
    return Damaged(path, "its size is not what its header says");
  }
  std::memcpy(&checksum, bytes.data() + sizeof h + body, sizeof checksum);
  if (checksum != XXH3_64bits(bytes.data(), sizeof h + body)) return Damaged(path, "checksum");
  const std::string_view image = std::string_view(bytes).substr(sizeof h, h.state_bytes);
  K3_ASSIGN(SequenceState state,
            ParseState(image, path, {model_.fingerprint(), model_.vocab()}, model_.NewState()));
  const std::int64_t position = state.model.position();
  const bool general = model_.math() != MathMode::kFast || position % kFastGrid == 0;
  if (position == 0 || position != static_cast<std::int64_t>(state.tokens.size()) ||
      (!general && h.whole_only == 0)) {
    return Damaged(path, "it is at a position that it cannot be at");
  }
  Snapshot snapshot{std::move(state.model), std::vector<float>(h.n_scores), h.whole_only == 1};
  if (h.n_scores > 0) {
    std::memcpy(snapshot.logits.data(), image.data() + image.size(), 4 * h.n_scores);
  }
  tokens = std::move(state.tokens);
  return snapshot;
}

bool PrefixCache::Load(Node* node, Snapshot& snapshot) {
  std::vector<TokenId> tokens;
  auto read = ReadFile(node->value->file, tokens);
  if (read.ok() && tokens == tree_.Tokens(node)) {
    snapshot = std::move(*read);
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
  std::vector<TokenId> tokens;
  auto read = ReadFile(path, tokens);
  std::error_code error;
  const auto size = static_cast<std::int64_t>(fs::file_size(path, error));
  if (!read.ok()) {
    ++stats_.damaged;
    spdlog::warn("prefix cache: {}", read.message());
  }
  const std::int64_t nodes = 4 * static_cast<std::int64_t>(tokens.size()) + 2 * Tree::kNodeBytes;
  if (!read.ok() || error || file_bytes_ + size > options_.spill_bytes ||
      tree_.bytes() + nodes > budget()) {
    std::remove(path.c_str());
    return;
  }
  Node* node = tree_.Make(tokens);
  if (node->value) return;  // the same text under two names
  node->value = std::make_unique<Entry>();
  node->value->file = path;
  node->value->file_bytes = size;
  node->value->total_bytes = read->state.bytes();
  node->value->has_scores = !read->logits.empty();
  node->value->snapshot.whole_only = read->whole_only;
  file_bytes_ += size;
  holders_.push_back(node);
}

}  // namespace k3
