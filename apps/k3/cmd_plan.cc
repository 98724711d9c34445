// k3 plan: what running a model takes, before loading it.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "k3/base/threads.h"
#include "k3/io/mapped_file.h"
#include "k3/kernels/cpu/isa.h"
#include "options.h"
#include "output.h"
#include "plan_report.h"

namespace k3::app {
namespace {

constexpr const char* kPlanHelp =
    "Bytes of every part at its peak, where each would live, what fits into the memory and what\n"
    "would, and the least time a step can take: bytes moved against this machine's measured read\n"
    "rate, operations against its measured f32 rate. MODEL may be a folder with only config.json,\n"
    "or a config file. Without --memory: what the machine or the control group has left.\n"
    "Exit status 3 when not everything fits.\n"
    "\nExamples:\n"
    "  k3 plan --context 4096 --batch 4\n"
    "  k3 plan MODEL --context 131072 --memory 64G\n"
    "  k3 plan tests/configs/k3-text-config.json --context 1048576 --memory 2T --sweep\n"
    "  k3 plan MODEL --sweep --svg plan.svg";

constexpr std::int64_t kDefaultContext = 4096;

struct PlanCommand {
  EngineOptions engine;
  std::int64_t context = 0, batch = 1;
  bool json = false, sweep = false, no_measure = false;
  std::string svg;
};

Result<std::vector<MemoryPlan>> Sweep(const Inventory& inventory, PlanOptions options) {
  const std::int64_t limit = inventory.config.max_positions, asked = options.context;
  std::vector<std::int64_t> contexts{asked};
  for (std::int64_t c = 1024; c < limit && contexts.size() < 40; c *= 4) contexts.push_back(c);
  contexts.push_back(limit);
  std::sort(contexts.begin(), contexts.end());
  contexts.erase(std::unique(contexts.begin(), contexts.end()), contexts.end());
  std::vector<MemoryPlan> plans;
  for (const std::int64_t c : contexts) {
    options.context = c;
    K3_ASSIGN(MemoryPlan plan, MakePlan(inventory, options));
    plans.push_back(std::move(plan));
  }
  return plans;
}

Result<Inventory> TakeWithWarnings(const std::string& model) {
  if (const auto table = cpu::ChooseTable(); !table.ok()) return table.error();
  K3_ASSIGN(const std::string path, ResolveModel(model));
  K3_ASSIGN(Inventory inventory, TakeInventory(path));
  for (const std::string& warning : inventory.warnings) Warn(warning);
  if (!inventory.problems.empty()) {
    Warn(fmt::format("{}: {} problems, k3 inspect lists them; the first: {}", path,
                     inventory.problems.size(), inventory.problems[0]));
  }
  return inventory;
}

Result<PlanReport> Make(const PlanCommand& o, const Inventory& inventory) {
  PlanReport report;
  report.model = inventory.path;
  report.source = Name(inventory.source);
  report.limit = UsableMemory();
  report.memory_given = o.engine.memory > 0;
  PlanOptions options;
  options.context =
      o.context > 0 ? o.context : std::min(kDefaultContext, inventory.config.max_positions);
  options.batch = o.batch;
  options.prefill_chunk = o.engine.prefill_chunk;
  options.threads = o.engine.threads > 0 ? static_cast<int>(o.engine.threads) : UsableCpus();
  options.math = o.engine.math == "fast" ? MathMode::kFast : MathMode::kExact;
  options.memory = report.memory_given ? o.engine.memory : report.limit.bytes;
  K3_ASSIGN(report.plan, MakePlan(inventory, options));
  if (o.sweep || !o.svg.empty()) {
    K3_ASSIGN(report.sweep, Sweep(inventory, options));
  }
  if (!o.no_measure) {
    Exec exec(options.threads, options.math);
    const std::int64_t room = report.limit.bytes > 0 ? report.limit.bytes / 4 : 0;
    report.speed = MeasureMachine(exec, std::min<std::int64_t>(room, std::int64_t{256} << 20));
  }
  return report;
}

int Plan(const PlanCommand& o) {
  const auto inventory = TakeWithWarnings(o.engine.model);
  if (!inventory.ok()) return Fail(inventory.error());
  if (const std::int64_t limit = inventory->config.max_positions; o.context > limit) {
    Complain(fmt::format("--context: found {}, expected at most {}, the limit of {}", o.context,
                         limit, inventory->path));
    return kExitUsage;
  }
  const auto report = Make(o, *inventory);
  if (!report.ok()) return Fail(report.error());
  if (!o.svg.empty()) {
    const Status s = WriteFileAtomically(o.svg, PlanSvg(*report));
    if (!s.ok()) return Fail(s.error());
  }
  const Status s = WriteOut(o.json ? JsonText(PlanJson(*report), 2) : PlanText(*report));
  if (!s.ok()) return Fail(s.error());
  const MemoryPlan& plan = report->plan;
  if (plan.verdict == PlanVerdict::kFits || plan.verdict == PlanVerdict::kNotAsked) return kExitOk;
  Complain(fmt::format("does not fit: {} bytes needed, {} there", plan.total_bytes(),
                       plan.options.memory));
  return kExitResource;
}

}  // namespace

void AddPlan(CLI::App& root, Action& action) {
  auto o = std::make_shared<PlanCommand>();
  CLI::App* app = root.add_subcommand("plan", "Memory and speed before loading");
  app->footer(std::string(kPlanHelp) + kExitCodesHelp);
  AddModel(*app, o->engine.model);
  AddInteger(*app, "--ctx,--context", o->context, {1, std::numeric_limits<std::int32_t>::max()},
             "Tokens of every sequence (default 4096, or the model's limit if that is less)");
  AddInteger(*app, "--batch", o->batch, {1, 1 << 16}, "Sequences at once (default 1)");
  AddInteger(*app, "--prefill-chunk", o->engine.prefill_chunk, {1, 1 << 20},
             "Prompt tokens of one pass (default 512)");
  AddMemory(*app, o->engine.memory);
  AddEngineOptions(*app, o->engine, false);
  app->add_flag("--sweep", o->sweep, "A table over contexts too");
  app->add_option("--svg", o->svg, "Write the curve over contexts to FILE")->type_name("FILE");
  app->add_flag("--no-measure", o->no_measure, "Leave out the half second of measuring");
  app->add_flag("--json", o->json, "Print a JSON object");
  app->callback([o, &action] { action = [o] { return Plan(*o); }; });
}

}  // namespace k3::app
