// What a checkpoint of a training run holds, and the files it lies in.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/train/balancer.h"
#include "k3/train/optimizer.h"
#include "k3/train/token_data.h"

namespace k3 {

/// The counters; weights, optimiser and balancer are saved from where they live.
struct TrainState {
  std::int64_t step = 0, tokens = 0, skipped = 0;
  DataCursor cursor;
  std::int64_t rows_per_step = 0;
  std::uint64_t run = 0;  // identifies model, data and sequence: a checkpoint of another is refused
  std::uint64_t config = 0;  // hash of the TOML file's text, to tell when it changed
};

/// One safetensors file, complete or absent, with a hash of its tensors and counters.
Status SaveState(const std::string& path, const TrainState& state, const Parameters& params,
                 Optimizer& optimizer, const Balancer& balancer);
/// Refuses files that are damaged or of another run, and then changes nothing.
Result<TrainState> LoadState(const std::string& path, std::uint64_t run, Parameters& params,
                             Optimizer& optimizer, Balancer& balancer);

std::string StatePath(const std::string& dir, std::int64_t step);
/// Paths of the checkpoints in `dir`, newest first.
std::vector<std::string> ListStates(const std::string& dir);
/// Keeps the newest `keep` up to that of `step`. Newer ones go: a run that is at `step` could not
/// read them, and they must not count.
void PruneStates(const std::string& dir, std::int64_t step, std::int64_t keep);
/// Removes the temporary files that a killed run left in `dir`. Nobody else may be writing there.
void RemoveUnfinished(const std::string& dir);

}  // namespace k3
