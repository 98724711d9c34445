#include "k3/runtime/snapshot_file.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "k3/base/check.h"
#include "k3/runtime/sequence_state.h"

namespace k3 {

// A snapshot, little-endian.
//   0  char[8]  "K3SNAP\0\0"
//   8  u32      version, 2
//  12  u32      1: whole_only, + 2: of fast mode
//  16  u64      bytes of the state file that follows (sequence_state.h)
//  24  u64      number of scores
//  32  bytes    the state file, then an f32 for each score
//      u64      XXH3-64 of everything before it
// Several:
//   0  char[8]  "K3SAVED\0"
//   8  u32      version, 1
//  12  u32      number of snapshots
//  16  u64      bytes of them, one after the other; the file ends after them
namespace {

constexpr std::string_view kSnapshotMagic("K3SNAP\0\0", 8);
constexpr std::uint32_t kSnapshotVersion = 2;
constexpr std::uint32_t kWholeOnly = 1, kOfFastMode = 2;
constexpr std::string_view kSavedMagic("K3SAVED\0", 8);
constexpr std::uint32_t kSavedVersion = 1;

struct SnapshotHeader {
  char magic[8];
  std::uint32_t version, flags;
  std::uint64_t state_bytes, n_scores;
};
static_assert(sizeof(SnapshotHeader) == 32);

struct SavedHeader {
  char magic[8];
  std::uint32_t version, count;
  std::uint64_t bytes;
};
static_assert(sizeof(SavedHeader) == kSavedHeaderBytes);

constexpr std::size_t kFrame = sizeof(SnapshotHeader) + 8;  // all but state and scores

Error DamagedSnapshot(std::string_view where, std::string_view what) {
  return Error{Code::kCorrupt, fmt::format("{}: snapshot is damaged: {}", where, what)};
}

/// The header at the start of `bytes`, which may go on after the snapshot.
Result<SnapshotHeader> ReadSnapshotHeader(std::string_view bytes, std::string_view where) {
  SnapshotHeader h;
  if (bytes.size() < kFrame) return DamagedSnapshot(where, "it is cut");
  std::memcpy(&h, bytes.data(), sizeof h);
  if (std::string_view(h.magic, 8) != kSnapshotMagic || h.version != kSnapshotVersion ||
      h.flags > (kWholeOnly | kOfFastMode)) {
    return DamagedSnapshot(where, "not the header that is expected");
  }
  // Each part is compared with what is left, so no sum can overflow.
  const std::size_t body = bytes.size() - kFrame;
  if (h.state_bytes > body || h.n_scores > (body - h.state_bytes) / 4) {
    return DamagedSnapshot(where, "its size is not what its header says");
  }
  return h;
}

std::size_t SizeOf(const SnapshotHeader& h) { return kFrame + h.state_bytes + 4 * h.n_scores; }

}  // namespace

std::string SerializeSnapshot(std::span<const TokenId> tokens, const Snapshot& snapshot,
                              const TokenModel& model) {
  SequenceState state;
  state.tokens.assign(tokens.begin(), tokens.end());
  state.model = snapshot.state;
  const std::string image = SerializeState(state, model.fingerprint());
  const std::uint32_t flags = (snapshot.whole_only ? kWholeOnly : 0u) |
                              (model.math() == MathMode::kFast ? kOfFastMode : 0u);
  SnapshotHeader header{{}, kSnapshotVersion, flags, image.size(), snapshot.logits.size()};
  std::copy(kSnapshotMagic.begin(), kSnapshotMagic.end(), header.magic);
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes.reserve(SizeOf(header));
  bytes += image;
  bytes.append(reinterpret_cast<const char*>(snapshot.logits.data()), 4 * snapshot.logits.size());
  const std::uint64_t checksum = XXH3_64bits(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char*>(&checksum), sizeof checksum);
  return bytes;
}

Result<SavedSnapshot> ParseSnapshot(std::string_view bytes, std::string_view where,
                                    const TokenModel& model) {
  K3_ASSIGN(const SnapshotHeader h, ReadSnapshotHeader(bytes, where));
  if (SizeOf(h) != bytes.size()) {
    return DamagedSnapshot(where, "its size is not what its header says");
  }
  std::uint64_t checksum = 0;
  const std::size_t body = bytes.size() - sizeof checksum;
  std::memcpy(&checksum, bytes.data() + body, sizeof checksum);
  if (checksum != XXH3_64bits(bytes.data(), body)) return DamagedSnapshot(where, "checksum");
  const bool fast = (h.flags & kOfFastMode) != 0;
  if (fast != (model.math() == MathMode::kFast)) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: snapshot belongs to another arithmetic: {}, expected {}", where,
                             fast ? "fast" : "exact", fast ? "exact" : "fast")};
  }
  const std::string_view image = bytes.substr(sizeof h, h.state_bytes);
  K3_ASSIGN(SequenceState state,
            ParseState(image, where, {model.fingerprint(), model.vocab()}, model.NewState()));
  if (h.n_scores != 0 && h.n_scores != static_cast<std::uint64_t>(model.vocab())) {
    return DamagedSnapshot(
        where, fmt::format("{} scores, expected {} or none", h.n_scores, model.vocab()));
  }
  const std::int64_t position = state.model.position();
  const bool whole_only = (h.flags & kWholeOnly) != 0;
  const bool general = !fast || position % kFastGrid == 0;
  if (position == 0 || position != static_cast<std::int64_t>(state.tokens.size()) ||
      (!general && !whole_only)) {
    return DamagedSnapshot(where, "it is at a position that it cannot be at");
  }
  SavedSnapshot saved{std::move(state.tokens),
                      {std::move(state.model), std::vector<float>(h.n_scores), whole_only}};
  if (h.n_scores > 0) {
    std::memcpy(saved.snapshot.logits.data(), image.data() + image.size(), 4 * h.n_scores);
  }
  return saved;
}

bool LooksSaved(std::string_view bytes) { return bytes.starts_with(kSavedMagic); }

std::string SerializeSaved(std::span<const SavedSnapshot> list, const TokenModel& model) {
  K3_CHECK(list.size() <= kMostSavedSnapshots, "too many snapshots for one file");
  std::string out(kSavedHeaderBytes, '\0');
  for (const SavedSnapshot& s : list) out += SerializeSnapshot(s.tokens, s.snapshot, model);
  SavedHeader h{
      {}, kSavedVersion, static_cast<std::uint32_t>(list.size()), out.size() - kSavedHeaderBytes};
  std::copy(kSavedMagic.begin(), kSavedMagic.end(), h.magic);
  std::memcpy(out.data(), &h, sizeof h);
  return out;
}

Result<std::vector<SavedSnapshot>> ParseSaved(std::string_view bytes, std::string_view where,
                                              const TokenModel& model) {
  SavedHeader h;
  if (!LooksSaved(bytes)) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: not a saved state (it does not start with K3SAVED)", where)};
  }
  if (bytes.size() < sizeof h) return DamagedSnapshot(where, "it is cut");
  std::memcpy(&h, bytes.data(), sizeof h);
  if (h.version != kSavedVersion) {
    return Error{Code::kUnsupported, fmt::format("{}: saved state has version {}, expected {}",
                                                 where, h.version, kSavedVersion)};
  }
  bytes.remove_prefix(sizeof h);
  if (h.bytes != bytes.size() || h.count == 0 || h.count > kMostSavedSnapshots) {
    return DamagedSnapshot(
        where, fmt::format("{} bytes after its header, which says {} snapshots in {}", bytes.size(),
                           h.count, h.bytes));
  }
  std::vector<SavedSnapshot> list;
  for (std::uint32_t i = 0; i < h.count; ++i) {
    K3_ASSIGN(const SnapshotHeader one, ReadSnapshotHeader(bytes, where));
    K3_ASSIGN(SavedSnapshot saved, ParseSnapshot(bytes.substr(0, SizeOf(one)), where, model));
    bytes.remove_prefix(SizeOf(one));
    list.push_back(std::move(saved));
  }
  if (!bytes.empty()) return DamagedSnapshot(where, "more follows its last snapshot");
  return list;
}

}  // namespace k3
