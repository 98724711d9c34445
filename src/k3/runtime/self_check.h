// Does this model, on this machine, keep its promises? Exact mode bit for bit, fast mode measured.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/kernels/exec.h"
#include "k3/model/model.h"

namespace k3 {

struct SelfCheckOptions {
  std::int64_t tokens = 160;  // of the text that is run again and again; at least 8
  int threads = 2;            // compared with one
  std::uint64_t seed = 0;
  std::string scratch_dir = "/tmp";  // where a state file is written for a moment
  /// What runs the passes; empty: the processor.
  std::function<std::unique_ptr<Exec>(int threads, MathMode math)> make_exec;
};

struct SelfCheckRow {
  std::string name;  // "cut anywhere", ...: stable, for scripts
  MathMode math = MathMode::kExact;
  std::string what;  // what was compared with what
  std::int64_t cases = 0;
  /// Whether all bits were the same; absent for figures that promise no identity.
  std::optional<bool> pass;
  std::int64_t different = 0;  // cases that differed
  double rel_l2 = 0;           // of the logits, the worst case
  double max_logprob = 0;      // largest difference of a log-probability
  double argmax = 1;           // share of positions with the same best token
  double seconds = 0;
};

struct SelfCheckReport {
  std::int64_t tokens = 0;
  std::vector<SelfCheckRow> rows;
  bool ok() const {
    for (const SelfCheckRow& r : rows) {
      if (r.pass.has_value() && !*r.pass) return false;
    }
    return true;
  }
};

/// The model continues a random token to get a text of its own kind; that text then runs in one
/// pass, cut, batched, forked, saved, on other thread counts and instruction sets, and in fast
/// mode. `progress` is told before each row. Errors are those of the model or the disk; a
/// difference is no error but a row that failed. `cancelled` ends it with kCancelled.
Result<SelfCheckReport> RunSelfCheck(const Model& model, const SelfCheckOptions& options,
                                     const std::function<void(const std::string&)>& progress = {},
                                     const std::function<bool()>& cancelled = {});

}  // namespace k3
