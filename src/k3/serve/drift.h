// Alerts on distributions: what comes now against what came when all was well.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "k3/base/status.h"
#include "k3/serve/json_out.h"

namespace k3::serve {

struct DriftOptions {
  std::int64_t reference = 512;  // observations that are learned first
  std::int64_t window = 128;     // observations that are compared with them at a time
  int of_windows = 5;            // an alert begins when `alert_at` of the last so many are over the
  int alert_at = 3;              // threshold, and ends when at most `clear_at` are
  int clear_at = 1;
  double least_bits = 0.03;  // smaller distances are nobody's concern, however certain they are
};

/// The Jensen-Shannon distance, in bits, between two counts, each weighted with its size: 0 is
/// equal, at most 1. Equal lengths; 0 when one is empty.
double JensenShannonBits(const std::vector<double>& a, const std::vector<double>& b);
/// What that distance stays below with probability 0.999 when both come from one distribution over
/// `bins` bins: the G test with a chi-squared quantile.
double JensenShannonNoise(std::size_t bins, double a, double b);

/// Watches one stream of values in log2 buckets. Single thread.
class DriftDetector {
 public:
  enum class State { kLearning, kOk, kAlert };

  explicit DriftDetector(const DriftOptions& options) : options_(options) {}

  void Observe(double value);
  State state() const { return state_; }
  double score() const { return score_; }          // of the last full window
  double threshold() const { return threshold_; }  // it was compared with
  const std::vector<double>& reference() const { return reference_; }
  const std::vector<double>& last_window() const { return last_; }
  /// The lower bound of bucket i: 2^((i - kZero) / 2); bucket 0 has everything below.
  static double LowerBound(std::size_t i);
  static std::size_t Bucket(double value);

  /// Counts of another time instead of learning; kBuckets of them, at least one above zero.
  void SetReference(std::vector<double> counts);

  static constexpr std::size_t kBuckets = 64;
  static constexpr int kZero = 32;

 private:
  void CloseWindow();

  DriftOptions options_;
  std::vector<double> reference_ = std::vector<double>(kBuckets), window_ = reference_, last_;
  std::int64_t learned_ = 0, in_window_ = 0;
  std::deque<bool> over_;
  State state_ = State::kLearning;
  double score_ = 0, threshold_ = 0;
};

/// Detectors by signal and stratum, so that a change in the mix of requests (more long prompts,
/// say) is not taken for a change of the model. Any thread.
class DriftMonitor {
 public:
  explicit DriftMonitor(DriftOptions options = {}) : options_(options) {}

  /// Names come from the code, never from a request.
  void Observe(std::string_view signal, std::string_view stratum, double value);
  static std::string_view PromptStratum(std::int64_t prompt_tokens);

  struct Row {
    std::string signal, stratum;
    DriftDetector detector;
  };
  std::vector<Row> rows() const;

  /// What ReferenceJson of another run gave. Signals that it does not have are learned. Call before
  /// the first Observe; an error names the file's place and changes nothing.
  Status LoadReference(std::string_view json, std::string_view where);

 private:
  const DriftOptions options_;
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, DriftDetector, std::less<>> detectors_;  // guarded
};

/// Bucket by bucket, empty ones left out: [{"from": LowerBound, "count": n}].
Json BucketsJson(const std::vector<double>& counts);

/// The references that are complete, for LoadReference.
Json ReferenceJson(const DriftMonitor& monitor);

/// For /v1/k3/alerts: the alerts first, each with the two histograms that differ.
Json AlertsJson(const DriftMonitor& monitor);

}  // namespace k3::serve
