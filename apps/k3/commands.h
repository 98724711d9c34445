// The commands of the program. Each Add function declares its options on a subcommand of `root`;
// its callback stores what to do in `action`, which returns the exit status.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace k3::app {

using Action = std::function<int()>;

void AddRun(CLI::App& root, Action& action);
void AddChat(CLI::App& root, Action& action);
void AddServe(CLI::App& root, Action& action);
void AddTokenize(CLI::App& root, Action& action);
void AddEval(CLI::App& root, Action& action);
void AddTrace(CLI::App& root, Action& action);
void AddBench(CLI::App& root, Action& action);
void AddBenchServe(CLI::App& bench, Action& action);  // called by AddBench
void AddInspect(CLI::App& root, Action& action);
void AddPlan(CLI::App& root, Action& action);
void AddCheck(CLI::App& root, Action& action);
void AddQuantize(CLI::App& root, Action& action);
void AddInfo(CLI::App& root, Action& action);
void AddData(CLI::App& root, Action& action);
void AddTrain(CLI::App& root, Action& action);
void AddAblate(CLI::App& root, Action& action);

/// Last lines of every help page.
inline constexpr const char* kExitCodesHelp =
    "\n\nExit status: 0 done, 1 failed, 2 wrong usage, 3 not enough memory or no such device,\n"
    "130 interrupted.";

}  // namespace k3::app
