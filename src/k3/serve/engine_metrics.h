// The engine's counters and the model's telemetry as Prometheus families.
#pragma once

#include <prometheus/metric_family.h>

#include <vector>

#include "k3/runtime/engine_stats.h"
#include "k3/serve/drift.h"
#include "k3/serve/telemetry.h"

namespace k3::serve {

std::vector<prometheus::MetricFamily> EngineFamilies(const EngineStats& stats);
/// Layers are put into at most 16 groups, so that deep models have few series.
std::vector<prometheus::MetricFamily> TelemetryFamilies(const TelemetryView& view);
std::vector<prometheus::MetricFamily> DriftFamilies(const DriftMonitor& monitor);

}  // namespace k3::serve
