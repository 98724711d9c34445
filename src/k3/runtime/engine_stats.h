// What the engine counts while it runs, for reports and for a metrics page.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace k3 {

/// Counts of observations at or below each bound, the last for all above. A value type.
class Histogram {
 public:
  Histogram() = default;
  /// `bounds` ascend and live for ever (a constant array).
  explicit Histogram(std::span<const double> bounds)
      : bounds_(bounds), counts_(bounds.size() + 1) {}

  void Observe(double value);
  std::span<const double> bounds() const { return bounds_; }
  /// One more than there are bounds; of each bucket alone, not cumulative.
  const std::vector<std::uint64_t>& counts() const { return counts_; }
  std::uint64_t total() const { return total_; }
  double sum() const { return sum_; }

 private:
  std::span<const double> bounds_;
  std::vector<std::uint64_t> counts_ = std::vector<std::uint64_t>(1);
  std::uint64_t total_ = 0;
  double sum_ = 0;
};

enum class EngineFinish : std::uint8_t {
  kStop,       // an end token, a finished constraint, or the sink said so
  kLength,     // max_tokens, or the context is full
  kCancelled,  // Engine::Cancel
  kDeadline,
  kError,     // EngineResult::status says why
  kShutdown,  // the engine stopped before the request was done
};
std::string_view Name(EngineFinish finish);  // "stop", "length", "cancelled", ...
constexpr int kEngineFinishes = 6;

/// Where a request is; also where it was when it was cancelled, ran out of time or failed.
enum class EnginePhase : std::uint8_t { kWaiting, kPrefill, kDecode, kPreempted };
std::string_view Name(EnginePhase phase);  // "waiting", "prefill", "decode", "preempted"
constexpr int kEnginePhases = 4;

/// Why a prompt was not continued from a snapshot, or not from one at its end.
enum class CacheMiss : std::uint8_t {
  kDisabled,    // the request or the engine asked for none
  kLogprobs,    // scores of the whole prompt are wanted
  kShort,       // a prompt of one token
  kNothing,     // no common beginning with anything known
  kNoSnapshot,  // a common beginning, but no snapshot in it (never taken, or evicted)
  kDamaged,     // the snapshot's file could not be used
};
std::string_view Name(CacheMiss reason);  // "disabled", "logprobs", ...
constexpr int kCacheMisses = 6;

/// The prefix cache. `hits` and `misses` count requests, not steps.
struct CacheStats {
  std::uint64_t hits = 0, spill_hits = 0;  // spill_hits are among the hits
  std::array<std::uint64_t, kCacheMisses> misses{};
  std::uint64_t inserted = 0, refused = 0, evicted = 0, spilled = 0, damaged = 0;
  std::int64_t snapshots = 0, spilled_snapshots = 0;  // there now
  std::int64_t bytes = 0, spilled_bytes = 0;          // there now; a shared page counts once
};

/// All counters only grow; "now" marks gauges.
struct EngineStats {
  // Requests.
  std::int64_t running = 0, waiting = 0, preempted = 0;  // now
  bool draining = false;                                 // now
  std::uint64_t submitted = 0, refused_full = 0, refused_draining = 0, refused_invalid = 0;
  std::array<std::uint64_t, kEngineFinishes> finished{};
  std::array<std::uint64_t, kEnginePhases> aborted{};      // cancelled, late or shut down, by phase
  std::uint64_t preemptions = 0, preemptions_dropped = 0;  // dropped: read again from its tokens
  std::uint64_t numeric_errors = 0;

  // Tokens.
  std::uint64_t prompt_tokens = 0;   // of the requests that started
  std::uint64_t cached_tokens = 0;   // of those, continued from snapshots
  std::uint64_t prefill_tokens = 0;  // read, those read again after a preemption included
  std::uint64_t decode_tokens = 0;   // given out
  std::uint64_t steps = 0;
  double step_seconds = 0;

  // Speculation.
  std::uint64_t drafts = 0, drafted_tokens = 0, accepted_tokens = 0, rollbacks = 0;

  // Bytes now.
  std::int64_t state_bytes = 0;    // of running sequences, shared pages in full
  std::int64_t state_planned = 0;  // what they may grow to before somebody has to give way
  std::int64_t state_limit = 0;
  // Most sequences that run at once, if all of them are short, or fill the context.
  std::int64_t capacity_short = 0, capacity_context = 0;
  std::int64_t parked_bytes = 0;  // states of preempted sequences
  std::int64_t cache_limit = 0;
  CacheStats cache;

  // Seconds, and sequences of a step.
  Histogram queue, ttft, inter_token, e2e, batch_size, step_tokens, accepted_length;

  EngineStats();
};

}  // namespace k3
