// k3 train: a run described by a TOML file.
#include <fmt/format.h>

#include <memory>

#include "commands.h"
#include "exit_codes.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/train/trainer.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kHelp =
    "The folder OUT of the config receives log.csv, log.jsonl, checkpoints and, at the end or "
    "when\n"
    "stopped, a model folder that k3 run loads. Ctrl-C, SIGTERM and --max-seconds stop with a\n"
    "checkpoint and exit status 0; the same command then continues with the same bits.\n"
    "docs/training.md lists the keys.\n"
    "\nExamples:\n"
    "  k3 train small.toml\n"
    "  k3 train small.toml --max-seconds 600 && k3 run runs/small/model -p \"Once\"";

struct TrainOptions {
  std::string config;
  std::int64_t max_seconds = 0;
};

std::string Line(const StepReport& r) {
  double violation = 0;
  for (const LayerBalance& b : r.balance) violation = std::max(violation, b.max_violation);
  std::string line = fmt::format("step {} loss {:.4f}", r.step, r.loss);
  if (r.eval_loss >= 0) {
    line += fmt::format(" valid {:.4f} ({:.3f} bits/byte)", r.eval_loss, r.eval_bits_per_byte);
  }
  if (!r.balance.empty()) line += fmt::format(" MaxVio {:.2f}", violation);
  if (r.skipped_total > 0) line += fmt::format(" skipped {}", r.skipped_total);
  return line + fmt::format(" {:.0f} tok/s", r.tokens_per_s);
}

Status Train(const TrainOptions& o) {
  K3_TRY(cpu::ChooseTable().status());
  K3_ASSIGN(const TrainConfig config, ReadTrainConfig(o.config));
  K3_ASSIGN(auto trainer, Trainer::Open(config));
  for (const std::string& note : trainer->notes()) Warn(note);
  fmt::print(stderr, "{} parameters, {:.1f} MB for weights, gradients and optimiser\n",
             trainer->params().total(), static_cast<double>(trainer->state_bytes()) / 1e6);
  ProgressLine progress;
  Trainer::RunLimits limits;
  limits.max_seconds = static_cast<double>(o.max_seconds);
  limits.stop = &Interrupted();
  limits.on_step = [&](const StepReport& r) {
    if (r.eval_loss >= 0) {
      progress.Clear();
      fmt::print(stderr, "{}\n", Line(r));
    }
    progress.Show(Line(r), r.step, config.steps);
  };
  K3_ASSIGN(const bool done, trainer->Run(limits));
  progress.Clear();
  return WriteOut(fmt::format("{} at step {} of {}; model in {}/model\n",
                              done ? "finished" : "stopped", trainer->step(), config.steps,
                              config.out));
}

}  // namespace

void AddTrain(CLI::App& root, Action& action) {
  auto o = std::make_shared<TrainOptions>();
  CLI::App* app = root.add_subcommand("train", "Train a model as a TOML file describes");
  app->footer(std::string(kHelp) + kExitCodesHelp);
  app->add_option("CONFIG", o->config, "The TOML file")->required();
  AddInteger(*app, "--max-seconds", o->max_seconds, {0, 1'000'000'000},
             "Stop after this time with a checkpoint; 0: no limit");
  app->callback([o, &action] {
    action = [o] {
      const Status s = Train(*o);
      return s.ok() ? kExitOk : Fail(s.error());
    };
  });
}

}  // namespace k3::app
