// What a training run holds in memory, counted before it starts.
#pragma once

#include <cstdint>
#include <string>

#include "k3/base/status.h"
#include "k3/kernels/math_mode.h"
#include "k3/model/config.h"
#include "k3/train/balancer.h"

namespace k3 {

struct PassShape {
  std::int64_t rows = 1, sequence = 1;  // of one pass
  double parts_per_row = 1.0;           // documents a row is cut into, on average
  int threads = 1;
  MathMode math = MathMode::kExact;
};

/// Bytes at the highest point.
struct RunMemory {
  std::int64_t weights = 0, gradients = 0, optimizer = 0;
  std::int64_t workspace = 0;  // values of a pass, and as much for their gradients
  std::int64_t saved = 0;      // inputs kept for the backward pass
  std::int64_t sequences = 0;  // caches and states, their gradients, their copies
  std::int64_t scratch = 0;    // of single ops
  std::int64_t balance = 0;    // scores kept for the balancer
  std::int64_t teacher = 0;    // weights and passes of the model that is learned from
  std::int64_t program = 0;    // what is there before: the program, mapped data

  std::int64_t activations() const { return workspace + saved + sequences + scratch + balance; }
  std::int64_t total() const {
    return weights + gradients + optimizer + activations() + teacher + program;
  }
};

/// Runs one row of the pass with ops that compute nothing, so that it is right for every variant.
/// Takes about a row's share of the activations while it runs; leaves `program` 0. kResource when
/// even the addresses of the weights cannot be had.
Result<RunMemory> PlanRunMemory(const ModelConfig& config, const PassShape& shape,
                                const BalanceOptions& balance, std::int64_t accumulate);

/// "weights 1.00 MiB, gradients ..., total ...": one line.
std::string MemoryText(const RunMemory& m);

}  // namespace k3
