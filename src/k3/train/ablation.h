// One change at a time: a plan of training runs that differ from a base, and what came of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "k3/base/status.h"
#include "k3/train/trainer.h"

namespace k3 {

/// One way to train: the base with some changes. Its files are complete texts, ready to be run.
struct AblationArm {
  std::string name;                // "base", an arm's name, "a+b", or "all"
  std::vector<std::string> parts;  // the arms it switches on
  std::string config_json;         // of the model
  std::string toml;                // of the run; {seed} stands for the seed
};

struct AblationPlan {
  std::string path, question, out;
  std::vector<std::int64_t> seeds;
  double threshold = 0.01;        // nats a token; smaller differences of means are called noise
  std::vector<AblationArm> arms;  // the base first
};

/// Reads PLAN (docs/ablations.md). Every arm's config and run are parsed, so that a wrong key is
/// found before the first run. Unknown keys, names used twice and unknown names are refused.
Result<AblationPlan> ReadAblationPlan(const std::string& path);

/// The text of run.toml of an arm and seed.
std::string RunToml(const AblationArm& arm, std::int64_t seed);

struct AblationRun {
  std::string arm, dir;
  std::int64_t seed = 0;
  std::string error;         // not empty: the run failed, and how
  double loss = 0;           // validation loss at the end, or the training loss of the last tenth
  double max_violation = 0;  // mean over the second half of the run; 0 without experts
  double dead = 0;           // mean over the whole run
  std::int64_t settled_at = -1;  // first step from which on MaxVio stays below 0.5; -1: never
  std::int64_t skipped = 0;
  double tokens_per_s = 0;  // median
  // Of the run alone; of the whole process, which keeps some of what runs before it held.
  std::int64_t planned_bytes = 0, resident_bytes = 0;
  std::vector<std::pair<double, double>> curve;  // training loss by step
};

struct AblationLimits {
  double max_seconds = 0;                   // of all runs together; 0: no limit
  const std::atomic<bool>* stop = nullptr;  // checked between passes
  std::function<void(const AblationRun&, const StepReport&)> on_step = nullptr;
  std::function<void(const AblationRun&)> on_run = nullptr;  // after each one
  double peak_flop_s = 0;                                    // as Trainer::RunLimits has it
};

/// Checks the data of all arms that have something to do, then does what is not done yet, seed by
/// seed, and returns all runs that are; all of them unless a limit was met. A run that fails is an
/// entry with its error, not an error of the ablation.
Result<std::vector<AblationRun>> RunAblation(const AblationPlan& plan,
                                             const AblationLimits& limits);

/// Writes OUT/report.md, report.json and report.svg.
Status WriteAblationReport(const AblationPlan& plan, const std::vector<AblationRun>& runs);

/// An arm against the base, over the seeds both finished.
struct AblationEffect {
  std::int64_t finished = 0, failed = 0, pairs = 0;
  double mean = 0, spread = 0;                   // of the loss; standard deviation
  double difference = 0, difference_spread = 0;  // to the base with the same seed
  std::string verdict;  // "better", "worse", "no difference beyond noise", ...
};
/// Beyond noise: the mean difference exceeds the threshold and twice its standard error.
AblationEffect EffectOf(const AblationPlan& plan, const std::vector<AblationRun>& runs,
                        const std::string& arm);

}  // namespace k3
