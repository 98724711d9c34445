// The logs of a run: a CSV table and JSON lines, one entry a step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "k3/base/status.h"

namespace k3 {

struct StepReport;

/// Appends to OUT/log.csv and OUT/log.jsonl and flushes every entry.
class RunLog {
 public:
  /// Entries of steps after `step` are dropped first: they will be done again.
  static Result<std::unique_ptr<RunLog>> Open(const std::string& out, std::int64_t step);
  ~RunLog();
  Status Add(const StepReport& report);

 private:
  struct Files;
  explicit RunLog(std::unique_ptr<Files> files);
  std::unique_ptr<Files> files_;
};

}  // namespace k3
