// k3 check: does the state survive everything that happens to it, here and with this model?
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "k3/runtime/self_check.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kCheckHelp =
    "The model writes a text; that text is then read in one pass, cut, batched, forked, saved and\n"
    "restored, on other thread counts and instruction sets. Exact mode must give the same bits\n"
    "every time, fast mode whenever it is cut on its grid; else a row says FAIL and the exit "
    "status\n"
    "is 1. The last row measures what fast mode costs in accuracy; it promises no identity.\n"
    "\nExamples:\n"
    "  k3 check\n"
    "  k3 check MODEL --tokens 300 --threads 8 --json";

struct CheckOptions {
  std::string model;
  std::int64_t tokens = 160, threads = 0;
  std::uint64_t seed = 0;
  bool json = false;
};

const char* Verdict(const SelfCheckRow& row) {
  if (!row.pass.has_value()) return "measured";
  return *row.pass ? "PASS" : "FAIL";
}

const char* MathName(MathMode math) { return math == MathMode::kExact ? "exact" : "fast"; }

Json ReportJson(const Engine& engine, const CheckOptions& o, const SelfCheckReport& report) {
  Json j{{"model", engine.dir}, {"tokens", report.tokens}, {"threads", engine.exec->pool.size()},
         {"seed", o.seed},      {"ok", report.ok()},       {"rows", Json::array()}};
  for (const SelfCheckRow& r : report.rows) {
    Json row{{"name", r.name},
             {"math", MathName(r.math)},
             {"what", r.what},
             {"verdict", Verdict(r)},
             {"cases", r.cases},
             {"different", r.different},
             {"logits_rel_l2", r.rel_l2},
             {"max_logprob_difference", r.max_logprob},
             {"argmax_agreement", r.argmax},
             {"seconds", r.seconds}};
    j["rows"].push_back(std::move(row));
  }
  return j;
}

std::string Text(const Engine& engine, const SelfCheckReport& report) {
  std::string out = fmt::format("{}: {} tokens, {} threads\n\n", engine.dir, report.tokens,
                                engine.exec->pool.size());
  out += fmt::format("{:<6}{:<20}{:<10}{:>6}{:>11}{:>13}{:>8}  {}\n", "math", "check", "verdict",
                     "cases", "rel L2", "max dlogprob", "argmax", "compared");
  for (const SelfCheckRow& r : report.rows) {
    out +=
        fmt::format("{:<6}{:<20}{:<10}{:>6}{:>11.2e}{:>13.2e}{:>7.1f}%  {}\n", MathName(r.math),
                    r.name, Verdict(r), r.cases, r.rel_l2, r.max_logprob, 100 * r.argmax, r.what);
  }
  out += report.ok() ? "\nall identities hold\n" : "\nan identity does not hold\n";
  return out;
}

int Check(const CheckOptions& o) {
  EngineOptions engine_options;
  engine_options.model = o.model;
  engine_options.threads = o.threads;
  int exit_code = kExitOk;
  const auto engine = LoadEngine(engine_options, exit_code);
  if (engine == nullptr) return exit_code;
  SelfCheckOptions options;
  options.tokens = std::min(o.tokens, engine->context);
  options.threads = engine->exec->pool.size();
  options.seed = o.seed;
  if (const char* dir = std::getenv("TMPDIR"); dir != nullptr && *dir != '\0') {
    options.scratch_dir = dir;
  }
  ProgressLine progress;
  std::int64_t row = 0;
  const auto report = RunSelfCheck(
      *engine->model, options,
      [&](const std::string& what) { progress.Show("check: " + what, row++, 10); },
      [] { return Interrupted().load(); });
  progress.Clear();
  if (!report.ok()) return Fail(report.error());
  const Status s =
      WriteOut(o.json ? JsonText(ReportJson(*engine, o, *report), 2) : Text(*engine, *report));
  if (!s.ok()) return Fail(s.error());
  return report->ok() ? kExitOk : kExitFailed;
}

}  // namespace

void AddCheck(CLI::App& root, Action& action) {
  auto o = std::make_shared<CheckOptions>();
  CLI::App* app = root.add_subcommand("check", "Prove state handling exact on this machine");
  app->footer(std::string(kCheckHelp) + kExitCodesHelp);
  AddModel(*app, o->model);
  AddInteger(*app, "--tokens", o->tokens, {8, 1 << 20}, "Length of the text (default 160)");
  AddInteger(*app, "--threads", o->threads, {0, 1024},
             "Threads to compare with one; 0 means all usable processors (default 0)");
  AddSeed(*app, o->seed);
  app->add_flag("--json", o->json, "Print a JSON object");
  app->callback([o, &action] { action = [o] { return Check(*o); }; });
}

}  // namespace k3::app
