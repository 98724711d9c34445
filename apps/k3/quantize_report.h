// k3 quantize --report: what each step of a conversion costs in nats per token.
#pragma once

#include <string>
#include <vector>

#include "engine.h"
#include "k3/model/quantize.h"

namespace k3::app {

/// "trunk=int8": a part and what it becomes.
struct QuantizeStep {
  std::string name, part;
  WeightFormat format = WeightFormat::kBF16;
};

/// "PART=FORMAT" with PART trunk, experts, embeddings or head.
Result<QuantizeStep> ParseQuantizeStep(const std::string& text);
/// Gives the part of `options` the format.
void Apply(const QuantizeStep& step, QuantizeOptions& options);

struct QuantizeReportOptions {
  EngineOptions engine;
  QuantizeOptions base;  // patterns and force; no formats
  std::vector<std::vector<QuantizeStep>> stacks;
  std::string text;
  std::int64_t docs = 0, tokens = 512;
  std::string work;  // folder for the converted models; each is removed after its turn
  bool json = false;
};

/// Scores the model as it is, then every different step alone, then each stack's first two steps
/// together, its first three, and so on. Returns the exit status.
int QuantizeReport(const QuantizeReportOptions& options);

}  // namespace k3::app
