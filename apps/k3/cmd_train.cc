// k3 train: a run described by a TOML file.
#include <fmt/format.h>

#include <functional>
#include <memory>
#include <optional>

#include "commands.h"
#include "exit_codes.h"
#include "k3/base/memory.h"
#include "k3/base/threads.h"
#include "k3/kernels/cpu/ceiling.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/runtime/generate.h"
#include "k3/train/trainer.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kTrainHelp =
    "The folder OUT of the config receives logs, a plot, checkpoints and, at the end or when\n"
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

std::string Duration(double seconds) {
  const auto s = static_cast<std::int64_t>(std::min(seconds, 1e9));
  return s >= 3600 ? fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
                   : fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string Line(const StepReport& r) {
  double violation = 0;
  for (const LayerBalance& b : r.balance) violation = std::max(violation, b.max_violation);
  std::string line = fmt::format("loss {:.4f}", r.loss);
  if (r.eval_loss >= 0) {
    line += fmt::format(" valid {:.4f} ({:.3f} bits/byte)", r.eval_loss, r.eval_bits_per_byte);
  }
  if (r.divergence >= 0) line += fmt::format(" teacher {:.4f}", r.divergence);
  if (!r.balance.empty()) line += fmt::format(" MaxVio {:.2f}", violation);
  if (r.skipped_total > 0) line += fmt::format(" skipped {}", r.skipped_total);
  line += fmt::format(" {:.0f} tok/s", r.tokens_per_s);
  if (r.mfu >= 0) line += fmt::format(" MFU {:.0f}%", 100 * r.mfu);
  return line + fmt::format(" {} left {}", Duration(r.eta_s), BytesText(r.memory_bytes));
}

/// Text of the model in the making, sampled with the tokenizer of its data.
class SampleWriter {
 public:
  static Result<SampleWriter> Create(const TrainConfig& config) {
    SampleWriter s(config);
    if (config.sample_every == 0) return s;
    K3_ASSIGN(s.tokenizer_, Tokenizer::Load(config.data));
    if (s.tokenizer_->Encode(s.prompt_).empty()) {
      return Error{Code::kInvalidArgument, "train.sample_prompt is empty, expected some text"};
    }
    return s;
  }
  std::function<Result<std::string>(const Model&)> Function() {
    if (!tokenizer_) return nullptr;
    return [this](const Model& model) -> Result<std::string> {
      Exec exec(threads_);
      ModelRunner runner(model, exec);
      SequenceState state = NewSequence(runner, 1);
      std::vector<TokenId> ids = tokenizer_->Encode(prompt_);
      if (const auto bos = tokenizer_->SpecialId("[BOS]"); bos && tokenizer_->add_bos()) {
        ids.insert(ids.begin(), *bos);
      }
      AppendPrompt(state, ids);
      GenerateOptions o;
      o.max_tokens = 60, o.sampling.temperature = 0.8;
      auto r = Generate(runner, *tokenizer_, state, o);
      if (!r.ok() && r.error().code == Code::kNumeric) return prompt_ + " ... (scores not finite)";
      if (!r.ok()) return r.error();
      return prompt_ + r->text;
    };
  }

 private:
  explicit SampleWriter(const TrainConfig& c)
      : prompt_(c.sample_prompt),
        threads_(static_cast<int>(c.threads > 0 ? c.threads : UsableCpus())) {}
  std::string prompt_;
  int threads_;
  std::optional<Tokenizer> tokenizer_;
};

/// What the processor does at best in f32, which all of a backward pass is.
double PeakFlopPerSecond(const TrainConfig& c) {
  ThreadPool pool(static_cast<int>(c.threads > 0 ? c.threads : UsableCpus()));
  return 1e9 * cpu::MeasureProductRate(pool, MathMode::kExact);
}

/// On a terminal one line that is written over itself; elsewhere a line every `log_every` steps.
class Screen {
 public:
  explicit Screen(const TrainConfig& config) : config_(config) {}
  void Show(const StepReport& r) {
    const bool last = r.step == config_.steps;
    const std::string line = Line(r);
    if (r.eval_loss >= 0 || !r.sample.empty() || last ||
        (!StderrIsTerminal() && r.step % config_.log_every == 0)) {
      progress_.Clear();
      Say(fmt::format("step {}/{} {}\n", r.step, config_.steps, line));
    }
    if (!r.sample.empty()) Say(fmt::format("sample: {}\n", Printable(r.sample)));
    if (!last) progress_.Show(line + " step", r.step, config_.steps);
  }
  void Clear() { progress_.Clear(); }

 private:
  static std::string Printable(std::string text) {
    for (char& c : text) {
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
    }
    return text;
  }
  const TrainConfig& config_;
  ProgressLine progress_;
};

Status Train(const TrainOptions& o) {
  K3_TRY(cpu::ChooseTable().status());
  K3_ASSIGN(const TrainConfig config, ReadTrainConfig(o.config));
  K3_ASSIGN(SampleWriter sampler, SampleWriter::Create(config));
  K3_ASSIGN(auto trainer, Trainer::Open(config));
  for (const std::string& note : trainer->notes()) Warn(note);
  const RunMemory& memory = trainer->memory();
  Say(fmt::format("{} parameters\nmemory: {}\n", trainer->params().total(), MemoryText(memory)));
  Screen screen(config);
  Trainer::RunLimits limits;
  limits.max_seconds = static_cast<double>(o.max_seconds);
  limits.stop = &Interrupted();
  limits.peak_flop_s = PeakFlopPerSecond(config);
  limits.on_step = [&](const StepReport& r) { screen.Show(r); };
  limits.sampler = sampler.Function();
  K3_ASSIGN(const bool done, trainer->Run(limits));
  screen.Clear();
  Say(fmt::format("memory: planned {}, at most {} resident\n", BytesText(memory.total()),
                  BytesText(PeakResidentBytes())));
  return WriteOut(fmt::format("{} at step {} of {}; model in {}/model\n",
                              done ? "finished" : "stopped", trainer->step(), config.steps,
                              config.out));
}

}  // namespace

void AddTrain(CLI::App& root, Action& action) {
  auto o = std::make_shared<TrainOptions>();
  CLI::App* app = root.add_subcommand("train", "Train a model as a TOML file describes");
  app->footer(std::string(kTrainHelp) + kExitCodesHelp);
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
