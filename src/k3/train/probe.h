// A look inside a model that trains: decays, attention, depth weights, learned scales.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/train/params.h"

namespace k3 {

struct LayerProbe {
  std::int64_t layer = 0;
  std::string kind;  // "kda", "mla" or "gqa"
  /// Mean over heads and tokens of entropy / log(keys seen), from the second token on: 1 is a plain
  /// mean over the past, 0 one key. Negative: no softmax attention.
  double attention_entropy = -1;
  /// Mean cosine of what this layer's attention reads and what that of the layer before read.
  double similarity = 0;
  bool has_similarity = false;
  /// Shares of exp(g), the factor a state keeps a token, in ten equal bins of [0, 1]. KDA only.
  std::vector<double> decay_histogram;
  double decay_mean = 0;
};

struct ProbeReport {
  std::vector<LayerProbe> layers;
  /// Mean weights over the rows of a depth mix, oldest row first, by site as traces call it.
  std::vector<std::pair<std::string, std::vector<double>>> depth_weights;
  /// Learned scales (alpha, gamma) and the means of residual gates, by name.
  std::vector<std::pair<std::string, double>> scales;
};

/// One exact forward pass over `tokens` (not empty, inside the vocabulary). Changes nothing; on one
/// thread.
Result<ProbeReport> ProbeModel(const Parameters& params, std::span<const TokenId> tokens);

}  // namespace k3
