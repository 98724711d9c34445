// Options of the commands that choose tokens.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine.h"
#include "k3/base/status.h"
#include "k3/runtime/generate.h"
#include "k3/runtime/sampler.h"

namespace k3::app {

struct SamplingOptions {
  // Absent: the model's default, which is known only once it is loaded.
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<std::int64_t> top_k;
  SamplingParams params;
  bool seed_given = false;
  std::vector<std::string> biases;
};

void AddSamplingOptions(CLI::App& app, SamplingOptions& options);

/// Sampling by flags over generation_config.json over greedy; the model's stop tokens; the context
/// and the prefill chunk of the engine; Ctrl-C.
Result<GenerateOptions> BaseGenerateOptions(const SamplingOptions& options,
                                            const EngineOptions& engine_options,
                                            const Engine& engine);

}  // namespace k3::app
