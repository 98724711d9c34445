// k3 ablate: training runs that differ from a base in one thing each.
#include <fmt/format.h>

#include <memory>

#include "commands.h"
#include "exit_codes.h"
#include "k3/base/threads.h"
#include "k3/kernels/cpu/ceiling.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/train/ablation.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kAblateHelp =
    "PLAN is a TOML file: the config of a base run, arms that change it, seeds, pairs of arms.\n"
    "Every arm and seed is trained on the same rows in the same order. The folder OUT of the plan\n"
    "receives a folder for each run and report.md, report.json and report.svg; a run that fails\n"
    "is part of the report. Ctrl-C, SIGTERM and --max-seconds stop; the same command continues.\n"
    "docs/ablations.md describes the plan.\n"
    "\nExamples:\n"
    "  k3 ablate docs/ablations/balance.toml\n"
    "  k3 ablate plan.toml --max-seconds 3600";

struct AblateOptions {
  std::string plan;
  std::int64_t max_seconds = 0;
};

Status Ablate(const AblateOptions& o) {
  K3_TRY(cpu::ChooseTable().status());
  K3_ASSIGN(const AblationPlan plan, ReadAblationPlan(o.plan));
  const auto wanted = static_cast<std::int64_t>(plan.arms.size() * plan.seeds.size());
  Say(fmt::format("{} arms, {} seeds: {} runs; noise is less than {} nats\n", plan.arms.size(),
                  plan.seeds.size(), wanted, plan.threshold));
  ProgressLine progress;
  std::int64_t done = 0;
  AblationLimits limits;
  limits.max_seconds = static_cast<double>(o.max_seconds);
  limits.stop = &Interrupted();
  {
    ThreadPool pool(static_cast<int>(UsableCpus()));
    limits.peak_flop_s = 1e9 * cpu::MeasureProductRate(pool, MathMode::kExact);
  }
  limits.on_step = [&](const AblationRun& run, const StepReport& r) {
    progress.Show(fmt::format("run {}/{}: {} seed {} loss {:.4f} step", done + 1, wanted, run.arm,
                              run.seed, r.loss),
                  r.step, r.step + r.steps_left);
  };
  limits.on_run = [&](const AblationRun& run) {
    progress.Clear();
    ++done;
    Say(fmt::format(
        "run {}/{}: {} seed {}: {}\n", done, wanted, run.arm, run.seed,
        run.error.empty() ? fmt::format("loss {:.4f}", run.loss) : "failed: " + run.error));
  };
  K3_ASSIGN(const auto runs, RunAblation(plan, limits));
  progress.Clear();
  if (runs.empty()) return WriteOut("stopped before the first run was done\n");
  K3_TRY(WriteAblationReport(plan, runs));
  return WriteOut(
      fmt::format("{} of {} runs; report in {}/report.md\n", runs.size(), wanted, plan.out));
}

}  // namespace

void AddAblate(CLI::App& root, Action& action) {
  auto o = std::make_shared<AblateOptions>();
  CLI::App* app = root.add_subcommand("ablate", "Train with one change at a time and compare");
  app->footer(std::string(kAblateHelp) + kExitCodesHelp);
  app->add_option("PLAN", o->plan, "The TOML file")->required();
  AddInteger(*app, "--max-seconds", o->max_seconds, {0, 1'000'000'000},
             "Stop after this time; 0: no limit");
  app->callback([o, &action] {
    action = [o] {
      const Status s = Ablate(*o);
      return s.ok() ? kExitOk : Fail(s.error());
    };
  });
}

}  // namespace k3::app
