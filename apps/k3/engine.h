// Finding a model and getting it ready to run.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/kernels/exec.h"
#include "k3/model/model.h"
#include "k3/runtime/token_model.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::app {

/// Options shared by the commands that load a model.
struct EngineOptions {
  std::string model;  // empty: the demo model
  std::string math = "exact";
  std::string weights = "auto";
  bool brief = false;        // too few passes to pay for copying the weights, for "auto"
  std::int64_t threads = 0;  // 0: all usable processors
  std::int64_t ctx = 0;      // 0: the model's limit
  std::int64_t prefill_chunk = 512;
  std::int64_t memory = 0;  // 0: what the system has left
};

void AddModel(CLI::App& app, std::string& model);
/// --math, --weights, --threads and, unless the command has no use for them, --ctx and
/// --prefill-chunk.
void AddEngineOptions(CLI::App& app, EngineOptions& options, bool with_context);

/// Folder of the demo model: $K3_MODEL, else beside the program in a source tree, else where an
/// installed program finds it. The error lists all places.
Result<std::string> FindDemoModel();
/// `model`, or the demo model when it is empty.
Result<std::string> ResolveModel(const std::string& model);

/// A loaded model with its tokenizer and what it runs on.
struct Engine {
  std::string dir;
  std::unique_ptr<Model> model;
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<Exec> exec;
  std::unique_ptr<ModelRunner> runner;
  std::int64_t context = 0;
  std::optional<TokenId> bos;  // config.json's, else the tokenizer's [BOS]
  double load_s = 0;
  std::int64_t memory = 0;  // bytes there are for everything that is no file page; 0: unknown
  std::string memory_source;
};

/// Loads everything and prints warnings. On failure prints why, sets `exit_code` and returns null.
std::unique_ptr<Engine> LoadEngine(const EngineOptions& options, int& exit_code);

/// Refuses (kResource, with both numbers) a run whose state and buffers for `tokens` tokens in each
/// of `batch` sequences cannot fit into the engine's memory.
Status CheckMemory(const Engine& engine, const EngineOptions& options, std::int64_t tokens,
                   std::int64_t batch);

/// Refuses ids outside the model's vocabulary.
Status CheckIds(const std::vector<TokenId>& ids, std::int64_t vocab);

}  // namespace k3::app
