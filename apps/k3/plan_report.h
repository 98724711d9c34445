// How k3 plan shows a plan: text, JSON and a curve.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "json_text.h"
#include "k3/base/memory.h"
#include "k3/kernels/machine_speed.h"
#include "k3/model/memory_plan.h"

namespace k3::app {

struct PlanReport {
  std::string model, source;
  MemoryPlan plan;
  MemoryLimit limit;                  // what the system gives
  bool memory_given = false;          // --memory replaced it
  std::optional<MachineSpeed> speed;  // measured unless --no-measure
  std::vector<MemoryPlan> sweep;
};

/// Seconds a step takes at least, and what sets that bound.
struct Bound {
  double seconds = 0;
  const char* by = "";
};
Bound BoundOf(const StepCost& cost, const MachineSpeed& speed);

std::string PlanText(const PlanReport& report);
Json PlanJson(const PlanReport& report);
/// Memory over context, both axes logarithmic, with the limit as a line.
std::string PlanSvg(const PlanReport& report);

}  // namespace k3::app
