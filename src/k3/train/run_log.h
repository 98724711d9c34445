// The logs of a run: tables, JSON lines, TensorBoard events and a picture.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "k3/base/status.h"

namespace k3 {

struct StepReport;

/// Appends to log.csv, log.jsonl, balance.csv (one line a step and layer) and an event file in OUT,
/// and flushes every entry.
class RunLog {
 public:
  /// Entries of steps after `step` are dropped first: they will be done again.
  static Result<std::unique_ptr<RunLog>> Open(const std::string& out, std::int64_t step);
  ~RunLog();
  Status Add(const StepReport& report);
  /// Appends to OUT/samples.jsonl.
  Status AddSample(std::int64_t step, const std::string& text);
  /// Draws OUT/loss.svg from log.csv.
  Status Plot() const;

 private:
  Status Written() const;
  struct Files;
  explicit RunLog(std::unique_ptr<Files> files);
  std::unique_ptr<Files> files_;
};

}  // namespace k3
