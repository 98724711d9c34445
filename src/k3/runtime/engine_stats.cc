#include "k3/runtime/engine_stats.h"

#include <algorithm>

namespace k3 {
namespace {

constexpr double kSeconds[] = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
                               1,     2,     5,     10,   20,   50,   100, 200};
constexpr double kSequences[] = {1, 2, 4, 8, 16, 32, 64, 128, 256};
constexpr double kTokens[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
constexpr double kDrafts[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16};

}  // namespace

void Histogram::Observe(double value) {
  const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), value);
  ++counts_[static_cast<std::size_t>(at - bounds_.begin())];
  ++total_;
  sum_ += value;
}

EngineStats::EngineStats()
    : queue(kSeconds),
      ttft(kSeconds),
      inter_token(kSeconds),
      e2e(kSeconds),
      batch_size(kSequences),
      step_tokens(kTokens),
      accepted_length(kDrafts) {}

std::string_view Name(EngineFinish finish) {
  constexpr std::string_view kNames[kEngineFinishes] = {"stop",     "length", "cancelled",
                                                        "deadline", "error",  "shutdown"};
  return kNames[static_cast<std::size_t>(finish)];
}

std::string_view Name(EnginePhase phase) {
  constexpr std::string_view kNames[kEnginePhases] = {"waiting", "prefill", "decode", "preempted"};
  return kNames[static_cast<std::size_t>(phase)];
}

std::string_view Name(CacheMiss reason) {
  constexpr std::string_view kNames[kCacheMisses] = {"disabled", "logprobs",    "short",
                                                     "nothing",  "no_snapshot", "damaged"};
  return kNames[static_cast<std::size_t>(reason)];
}

}  // namespace k3
