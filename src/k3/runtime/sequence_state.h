// Everything that is remembered of one sequence, as one thing.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/model/model_state.h"
#include "k3/runtime/sampler.h"
#include "k3/runtime/token_model.h"

namespace k3 {

/// Copy to snapshot or fork, assign to restore. The copies share no mutable data.
/// `tokens` is the whole sequence; the model has consumed the first model.position() of them and
/// the rest is pending. A generated token stays pending until the next one is wanted.
struct SequenceState {
  ModelState model;
  Sampler sampler;
  std::vector<TokenId> tokens;

  std::span<const TokenId> pending() const {
    return std::span(tokens).subspan(static_cast<std::size_t>(model.position()));
  }
};

SequenceState NewSequence(const TokenModel& model, std::uint64_t seed);

/// Adds tokens that were given, not generated.
void AppendPrompt(SequenceState& state, std::span<const TokenId> tokens);

// The state file, little-endian.
//   0  char[8]  "K3STATE\0"
//   8  u32      version, 1
//  12  u32      0
//  16  u64      fingerprint of the model
//  24  u64      random state of the sampler
//  32  u64      number of tokens
//  40  u64      number of counted tokens
//  48  u64      bytes of the model's state
//  56  i32      each token
//      {i32 id, u32 prompt, u32 generated}  each counted token, ids ascending
//      bytes    ModelState::Serialize
//      u64      XXH3-64 of everything before it; the file ends here

std::string SerializeState(const SequenceState& state, std::uint64_t fingerprint);

/// What a state must fit to be accepted.
struct StateExpectation {
  std::uint64_t fingerprint = 0;
  std::int64_t vocab = 0;
};

/// The inverse, for untrusted bytes; `where` starts every message. `empty` is a fresh state of the
/// model and gives the shapes. Refuses a damaged or cut image (kCorrupt), another version
/// (kUnsupported) and another model's state (kInvalidArgument).
Result<SequenceState> ParseState(std::string_view bytes, std::string_view where,
                                 const StateExpectation& expected, ModelState empty);

/// Written to a temporary name, then renamed: never half a file under `path`.
Status SaveState(const std::string& path, const SequenceState& state, const TokenModel& model);
Result<SequenceState> LoadState(const std::string& path, const TokenModel& model);

}  // namespace k3
