// Snapshots as bytes: one that the prefix cache evicts, or all of a text that a user saves.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/model/model_state.h"
#include "k3/runtime/token_model.h"

namespace k3 {

/// What is kept of one position of one text: the whole state, never a part of it.
struct Snapshot {
  ModelState state;
  std::vector<float> logits;  // the scores after the last token, or empty
  /// May only continue a text that is exactly this long when it is read: in fast mode, what was
  /// read or generated behind the last point of the grid.
  bool whole_only = false;
};

/// A snapshot after all of `tokens`.
struct SavedSnapshot {
  std::vector<TokenId> tokens;
  Snapshot snapshot;
};

/// With a checksum, and with the model's fingerprint and arithmetic.
std::string SerializeSnapshot(std::span<const TokenId> tokens, const Snapshot& snapshot,
                              const TokenModel& model);
/// The same snapshot, whole and undamaged, or what is wrong (`where` names the file):
/// kInvalidArgument when it belongs to another model or arithmetic, else kCorrupt.
Result<SavedSnapshot> ParseSnapshot(std::string_view bytes, std::string_view where,
                                    const TokenModel& model);

constexpr std::size_t kMostSavedSnapshots = 64;  // in one file
constexpr std::size_t kSavedHeaderBytes = 24;
/// Whether a file that begins with `bytes` was made by SerializeSaved.
bool LooksSaved(std::string_view bytes);
/// Several snapshots in one file, at most kMostSavedSnapshots.
std::string SerializeSaved(std::span<const SavedSnapshot> list, const TokenModel& model);
/// All of them or an error, as ParseSnapshot.
Result<std::vector<SavedSnapshot>> ParseSaved(std::string_view bytes, std::string_view where,
                                              const TokenModel& model);

}  // namespace k3
