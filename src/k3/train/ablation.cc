// RunAblation: what is done, what is left, what came out.
#include "k3/train/ablation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "k3/io/mapped_file.h"
#include "k3/train/folder_lock.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

double Seconds() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

/// What log.jsonl tells of a finished run.
void ReadLog(AblationRun& run) {
  std::ifstream in(run.dir + "/log.jsonl");
  std::vector<double> speeds, violations;
  double violation = 0, dead = 0, eval = -1;
  std::int64_t last_bad = 0;
  for (std::string line; std::getline(in, line);) {
    const Json j = Json::parse(line, nullptr, false);
    if (!j.is_object() || !j.contains("loss")) continue;
    const double step = j.value("step", 0.0);
    run.curve.emplace_back(step, j["loss"].is_number() ? j["loss"].get<double>() : NAN);
    speeds.push_back(j.value("tokens_per_s", 0.0));
    run.skipped = j.value("skipped", std::int64_t{0});
    run.resident_bytes = std::max(run.resident_bytes, j.value("memory_bytes", std::int64_t{0}));
    if (j.contains("eval_loss"))
      eval = j["eval_loss"].is_number() ? j["eval_loss"].get<double>() : NAN;
    if (!j.contains("balance")) continue;
    violation = dead = 0;
    for (const Json& layer : j["balance"]) {
      violation = std::max(violation, layer.value("max_violation", 0.0));
      dead = std::max(dead, layer.value("dead", 0.0));
    }
    violations.push_back(violation);
    if (violation >= 0.5) last_bad = static_cast<std::int64_t>(step);
    run.dead += dead;
  }
  const std::size_t n = run.curve.size();
  if (n == 0) return;
  if (!violations.empty()) {
    run.dead /= static_cast<double>(violations.size());
    const auto half = violations.begin() + static_cast<std::ptrdiff_t>(violations.size() / 2);
    run.max_violation =
        std::accumulate(half, violations.end(), 0.0) / static_cast<double>(violations.end() - half);
    if (violations.back() < 0.5) run.settled_at = last_bad + 1;
  }
  std::nth_element(speeds.begin(), speeds.begin() + static_cast<std::ptrdiff_t>(n / 2),
                   speeds.end());
  run.tokens_per_s = speeds[n / 2];
  const std::size_t tail = std::max<std::size_t>(1, n / 10);
  double sum = 0;
  for (std::size_t i = n - tail; i < n; ++i) sum += run.curve[i].second;
  run.loss = eval == -1 ? sum / static_cast<double>(tail) : eval;
}

constexpr const char* kResult = "/result.json";

/// Of the token files a run reads, as they are now; empty when they are not there.
std::string DataHash(const std::string& toml, const std::string& dir) {
  const auto config = ParseTrainConfig(toml, dir + "/run.toml");
  if (!config.ok()) return "";
  std::uint64_t hash = 0;
  for (const char* name : {"train.tokens", "valid.tokens"}) {
    // The folders that the path leads through may not be made yet.
    const auto file = MappedFile::Open((fs::path(config->data) / name).lexically_normal().string());
    if (!file.ok()) return "";
    hash = XXH3_64bits_withSeed(file->data(), file->size(), hash);
  }
  return fmt::format("{:016x}", hash);
}

/// A finished run leaves result.json with the text and a hash of the data it was run with; with
/// others it runs again. Data that is gone does not make a result worthless.
bool IsDone(AblationRun& run, const std::string& text, const std::string& data) {
  std::error_code e;
  if (!fs::exists(run.dir + kResult, e)) return false;
  const auto read = ReadTextFile(run.dir + kResult);
  if (!read.ok()) return false;
  const Json j = Json::parse(*read, nullptr, false);
  if (!j.is_object() || j.value("run", "") != text) return false;
  if (!data.empty() && j.value("data", data) != data) return false;
  run.error = j.value("error", "");
  run.planned_bytes = j.value("planned_bytes", std::int64_t{0});
  ReadLog(run);
  return true;
}

/// The text that says all about a run: its config and its model.
std::string Identity(const AblationArm& arm, const std::string& toml) {
  return toml + arm.config_json;
}

Status Prepare(const AblationRun& run, const AblationArm& arm, const std::string& toml) {
  std::error_code e;
  const auto before = ReadTextFile(run.dir + "/run.toml");
  const auto config = ReadTextFile(run.dir + "/config.json");
  // Another text, or a run that failed: nothing of it may be continued.
  const bool same = before.ok() && *before == toml && config.ok() && *config == arm.config_json &&
                    !fs::exists(run.dir + kResult, e);
  if (!same) fs::remove_all(run.dir, e);
  fs::create_directories(run.dir, e);
  if (e) return Error{Code::kIo, fmt::format("{}: cannot create: {}", run.dir, e.message())};
  K3_TRY(WriteFileAtomically(run.dir + "/config.json", arm.config_json));
  return WriteFileAtomically(run.dir + "/run.toml", toml);
}

Result<bool> TrainRun(AblationRun& run, const Trainer::RunLimits& limits) {
  K3_ASSIGN(const TrainConfig config, ReadTrainConfig(run.dir + "/run.toml"));
  K3_ASSIGN(auto trainer, Trainer::Open(config));
  run.planned_bytes = trainer->memory().total() - trainer->memory().program;
  K3_ASSIGN(const bool done, trainer->Run(limits));
  return done;
}

/// Errors of the machine end the ablation; those of the run itself are its result.
bool IsOfMachine(const Error& e) { return e.code == Code::kIo || e.code == Code::kCancelled; }

Result<bool> DoRun(AblationRun& run, const AblationArm& arm, Trainer::RunLimits limits,
                   const std::function<void(const AblationRun&, const StepReport&)>& on_step) {
  const std::string toml = RunToml(arm, run.seed), identity = Identity(arm, toml);
  const std::string data = DataHash(toml, run.dir);
  if (IsDone(run, identity, data)) return true;
  K3_TRY(Prepare(run, arm, toml));
  limits.on_step = [&](const StepReport& r) {
    if (on_step) on_step(run, r);
  };
  const auto done = TrainRun(run, limits);
  if (!done.ok() && IsOfMachine(done.error())) return done.error();
  if (done.ok() && !*done) return false;
  ReadLog(run);
  if (!done.ok()) run.error = done.message();
  if (run.error.empty() && !std::isfinite(run.loss)) run.error = "the loss is not finite";
  const Json j{{"run", identity},
               {"data", data},
               {"error", run.error},
               {"planned_bytes", run.planned_bytes}};
  K3_TRY(WriteFileAtomically(run.dir + kResult, j.dump(1) + "\n"));
  std::error_code ignored;
  fs::remove_all(run.dir + "/checkpoints", ignored);  // the model stays
  return true;
}

std::string FolderOf(const AblationPlan& plan, const AblationArm& arm, std::int64_t seed) {
  return fmt::format("{}/{}/seed-{}", plan.out, arm.name, seed);
}

/// A missing folder or a teacher that does not fit is found before the first run, not once a run.
Status CheckData(const AblationPlan& plan) {
  for (const AblationArm& arm : plan.arms) {
    for (const std::int64_t seed : plan.seeds) {
      AblationRun run;
      run.dir = FolderOf(plan, arm, seed);
      const std::string toml = RunToml(arm, seed);
      if (IsDone(run, Identity(arm, toml), DataHash(toml, run.dir))) continue;
      K3_ASSIGN(TrainConfig config, ParseTrainConfig(toml, run.dir + "/run.toml"));
      for (std::string* p : {&config.data, &config.init_from, &config.distill.teacher}) {
        *p = fs::path(*p).lexically_normal().string();  // the folders it leads through are not made
      }
      if (const Status s = Trainer::Check(config, arm.config_json); !s.ok()) {
        return Error{s.error().code,
                     fmt::format("{}: arm {}: {}", plan.path, arm.name, s.message())};
      }
      break;  // seeds share their data
    }
  }
  return {};
}

}  // namespace

Result<std::vector<AblationRun>> RunAblation(const AblationPlan& plan,
                                             const AblationLimits& limits) {
  K3_TRY(CheckData(plan));
  K3_ASSIGN(const FolderLock lock, FolderLock::Take(plan.out, "another ablation"));
  std::vector<AblationRun> runs;
  const double start = Seconds();
  for (const std::int64_t seed : plan.seeds) {
    for (const AblationArm& arm : plan.arms) {
      Trainer::RunLimits l;
      l.stop = limits.stop, l.peak_flop_s = limits.peak_flop_s;
      if (limits.max_seconds > 0) {
        l.max_seconds = limits.max_seconds - (Seconds() - start);
        if (l.max_seconds <= 0) return runs;
      }
      if (limits.stop != nullptr && *limits.stop) return runs;
      AblationRun run;
      run.arm = arm.name, run.seed = seed;
      run.dir = FolderOf(plan, arm, seed);
      K3_ASSIGN(const bool done, DoRun(run, arm, l, limits.on_step));
      if (!done) return runs;
      if (limits.on_run) limits.on_run(run);
      runs.push_back(std::move(run));
    }
  }
  return runs;
}

AblationEffect EffectOf(const AblationPlan& plan, const std::vector<AblationRun>& runs,
                        const std::string& arm) {
  AblationEffect e;
  std::map<std::int64_t, double> base;
  std::vector<double> losses, differences;
  for (const AblationRun& r : runs) {
    if (r.arm == "base" && r.error.empty()) base[r.seed] = r.loss;
  }
  for (const AblationRun& r : runs) {
    if (r.arm != arm) continue;
    if (!r.error.empty()) {
      ++e.failed;
      continue;
    }
    losses.push_back(r.loss);
    if (const auto b = base.find(r.seed); b != base.end()) {
      differences.push_back(r.loss - b->second);
    }
  }
  auto moments = [](const std::vector<double>& v, double& mean, double& spread) {
    for (const double x : v) mean += x / static_cast<double>(v.size());
    for (const double x : v) spread += (x - mean) * (x - mean);
    spread = v.size() > 1 ? std::sqrt(spread / static_cast<double>(v.size() - 1)) : 0;
  };
  e.finished = static_cast<std::int64_t>(losses.size());
  e.pairs = static_cast<std::int64_t>(differences.size());
  moments(losses, e.mean, e.spread);
  moments(differences, e.difference, e.difference_spread);
  const double error =
      e.pairs > 0 ? 2 * e.difference_spread / std::sqrt(static_cast<double>(e.pairs)) : 0;
  if (arm == "base") {
    e.verdict = "the base";
  } else if (e.pairs == 0) {
    e.verdict = e.failed > 0 ? "every run failed" : "no pair of runs to compare";
  } else if (e.pairs == 1) {
    e.verdict = "one seed: no verdict";
  } else if (std::abs(e.difference) <= std::max(plan.threshold, error)) {
    e.verdict = "no difference beyond noise";
  } else {
    e.verdict = e.difference < 0 ? "better" : "worse";
  }
  return e;
}

}  // namespace k3
