// What k3 bench measured and how, as a table and as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "k3/eval/reference_check.h"
#include "k3/kernels/cpu/ceiling.h"
#include "k3/kernels/profile.h"

namespace k3::app {

/// Tokens a second, all sequences together, over the repeats of one measurement. CPU figures count
/// the processor time of all threads instead of the clock: what a busy machine would do when idle.
struct BenchFigure {
  std::string phase;
  std::int64_t tokens = 0;
  double median = 0, slowest = 0, fastest = 0, cpu_median = 0;
  std::vector<ProfileRow> profile;  // of the counted repeats; empty without --profile
};

struct BenchReport {
  std::string model, math, isa;
  int threads = 0;
  std::int64_t batch = 0, repeats = 0, prefill_chunk = 0, decode_prompt = 0;
  double load_before = 0, load_after = 0;  // 1-minute load average; negative when unknown
  bool forced = false;
  std::optional<ReferenceCheck> check;
  std::optional<cpu::Ceilings> ceilings;
  std::vector<BenchFigure> figures;
};

std::string ReportTable(const BenchReport& report);
std::string ReportJson(const BenchReport& report);

}  // namespace k3::app
