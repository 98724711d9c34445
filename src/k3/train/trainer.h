// The training loop: batches, steps, checkpoints, resume, logs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/train/balancer.h"
#include "k3/train/gradient_pass.h"
#include "k3/train/optimizer.h"
#include "k3/train/probe.h"
#include "k3/train/run_memory.h"
#include "k3/train/teacher.h"
#include "k3/train/token_data.h"

namespace k3 {

/// A training run, as its TOML file says it (docs/training.md).
struct TrainConfig {
  std::string model_config;  // path of a config.json; or
  std::string init_from;     // folder of a model to continue from
  std::string data;          // folder written by `k3 data prepare`
  std::string out;
  bool across_documents = false;  // true: rows run on over document ends, state and all

  std::uint64_t seed = 0;
  std::int64_t steps = 0, batch = 8, sequence = 256, accumulate = 1;
  std::int64_t threads = 0;  // 0: all usable processors
  double clip = 1.0;         // 0: off
  double init_std = 0.02;
  std::int64_t log_every = 1, eval_every = 0, eval_rows = 16;
  std::int64_t checkpoint_every = 100, keep = 2;
  std::int64_t probe_every = 0;   // look inside the model; 0: whenever it is evaluated
  std::int64_t sample_every = 0;  // 0: no samples
  std::string sample_prompt = "The";
  bool pack_experts = true;  // of the exported model
  bool fast = false;         // arithmetic mode of the forward pass
  bool bf16 = false;         // products on operands rounded to bf16
  /// From this share of the steps on, routed experts are used as they will be packed; 1: never.
  double mxfp4_from = 1.0;
  std::int64_t plant_noise = -1;  // layer whose attention is drowned in noise; -1: none

  double lr = 1e-3;
  AdamWOptions adamw;
  MuonOptions muon;
  Schedule schedule;
  BalanceOptions balance;
  DistillOptions distill;

  std::string text;  // of the file: checkpoints remember a hash of it
};

/// Unknown keys, wrong kinds and impossible values are refused by name. Relative paths are taken
/// from the folder of the file.
Result<TrainConfig> ReadTrainConfig(const std::string& path);
/// The same of a text that stands for the file `path`.
Result<TrainConfig> ParseTrainConfig(std::string text, const std::string& path);

/// One step, for logs and progress.
struct StepReport {
  std::int64_t step = 0;   // completed steps, from 1
  double loss = 0;         // mean nats a token of this step: cross-entropy, whatever is learned
  double divergence = -1;  // mean T^2 KL to the teacher; negative: there is none
  double lr = 0, grad_norm = 0;
  bool skipped = false;
  std::int64_t skipped_total = 0, tokens = 0;  // since the start of the run, with earlier parts
  double tokens_per_s = 0;
  double mfu = -1;  // share of RunLimits::peak_flop_s in products with weights; negative: unknown
  std::int64_t steps_left = 0;
  double eta_s = 0;                                // at the speed of the latest steps
  std::int64_t memory_bytes = 0;                   // resident
  double eval_loss = -1, eval_bits_per_byte = -1;  // negative: not measured at this step
  std::vector<LayerBalance> balance;
  std::optional<ProbeReport> probe;
  std::string sample;  // empty: none at this step
};

class Trainer {
 public:
  /// Reads everything, allocates, and resumes from the newest readable checkpoint under out, if
  /// any. Refuses what cannot be trained, or not within the memory there is (kResource), before
  /// any work starts. Holds a lock on the folder.
  static Result<std::unique_ptr<Trainer>> Open(const TrainConfig& config);
  ~Trainer();
  /// What Open would say of the data, the rounding and the teacher, looked at alone: nothing is
  /// written or allocated for training. `config_json` stands for the model's config.json.
  static Status Check(const TrainConfig& config, const std::string& config_json);

  struct RunLimits {
    double max_seconds = 0;                   // 0: no limit
    const std::atomic<bool>* stop = nullptr;  // checked between passes
    std::function<void(const StepReport&)> on_step = nullptr;
    /// Text of the model as it is, for samples.jsonl. An error ends the run.
    std::function<Result<std::string>(const Model&)> sampler = nullptr;
    double peak_flop_s = 0;  // of the machine, for StepReport::mfu; 0: unknown
  };
  /// Until the last step, the time limit or `stop`; then a checkpoint and the exported model under
  /// out/model. True when the last step was done.
  Result<bool> Run(const RunLimits& limits);

  std::int64_t step() const;
  Parameters& params();
  /// Things worth telling the user: resumed where, which checkpoint was unreadable.
  const std::vector<std::string>& notes() const;
  /// What the run was expected to hold before it started.
  const RunMemory& memory() const;

 private:
  struct Impl;
  explicit Trainer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
