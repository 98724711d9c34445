// k3 bench: tokens a second, with the method in the output.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <limits>

#include "bench_report.h"
#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "k3/base/rng.h"
#include "k3/kernels/cpu/isa.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kBenchHelp =
    "Reads prompts of random tokens, then decodes greedily after a prompt of 32. Each figure has\n"
    "one warm-up run that is not counted; given are median, slowest and fastest of the repeats.\n"
    "Only one k3 bench runs on a machine at a time, and none on a busy one without --force.\n"
    "\nExamples:\n"
    "  k3 bench\n"
    "  k3 bench MODEL --profile --threads 1\n"
    "  k3 bench serve --concurrency 16\n"
    "  k3 bench MODEL --prefill 64,512 --decode 64 --batch 4 --math fast --check 8 --json";

constexpr std::int64_t kDecodePrompt = 32;

struct BenchOptions {
  EngineOptions engine;
  std::optional<std::string> prefill = "128,512";  // a list of small numbers, like ids
  std::int64_t decode = 64, batch = 1, repeats = 3, check = 0;
  bool json = false, profile = false, force = false;
};

/// Load average of the last minute, or -1 where the system does not tell.
double Load() {
  double load = -1;
  return getloadavg(&load, 1) == 1 ? load : -1.0;
}

/// Held while measuring: two benchmarks at once would both be wrong.
class MachineLock {
 public:
  MachineLock() {
    const char* folder = std::getenv("TMPDIR");
    path_ = fmt::format("{}/k3-bench.lock", folder != nullptr && *folder != 0 ? folder : "/tmp");
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    held_ = fd_ >= 0 && flock(fd_, LOCK_EX | LOCK_NB) == 0;
  }
  ~MachineLock() {
    if (fd_ >= 0) close(fd_);
  }
  MachineLock(const MachineLock&) = delete;
  MachineLock& operator=(const MachineLock&) = delete;
  bool held() const { return held_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
  bool held_ = false;
};

/// Refuses a machine on which figures would say more about the others than about us.
Status CheckMachine(const BenchOptions& o, const MachineLock& lock, double load) {
  if (o.force) return {};
  if (!lock.held()) {
    return Error{Code::kUnsupported,
                 fmt::format("{}: another k3 bench runs on this machine; --force measures anyway",
                             lock.path())};
  }
  const double busy = 0.5 * static_cast<double>(sysconf(_SC_NPROCESSORS_ONLN));
  if (load <= busy) return {};
  return Error{Code::kUnsupported,
               fmt::format("the machine is busy: load average {:.2f}, expected at most {:.2f}; "
                           "--force measures anyway",
                           load, busy)};
}

struct Seconds {
  double wall = 0, cpu = 0;
};

Seconds Now() {
  timespec t = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  const auto wall = std::chrono::steady_clock::now().time_since_epoch();
  return {std::chrono::duration<double>(wall).count(),
          static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec)};
}
Seconds Since(Seconds start) {
  const Seconds now = Now();
  return {now.wall - start.wall, now.cpu - start.cpu};
}

std::vector<TokenId> RandomTokens(std::int64_t n, std::int64_t vocab, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<TokenId> ids(static_cast<std::size_t>(n));
  for (TokenId& id : ids) id = static_cast<TokenId>(rng.Uniform() * static_cast<double>(vocab));
  return ids;
}

/// All sequences of the batch, one after the other step by step.
class Bench {
 public:
  Bench(Engine& engine, const BenchOptions& options) : engine_(engine), options_(options) {}

  /// Seconds for reading `n` tokens into every sequence.
  Result<Seconds> Prefill(std::int64_t n) {
    Reset(n);
    const Seconds start = Now();
    for (std::int64_t at = 0; at < n;) {
      const std::int64_t end =
          std::min(n, NextCut(at, options_.engine.prefill_chunk, engine_.exec->math));
      K3_TRY(Step(at, end, end == n ? LogitRows::kLast : LogitRows::kNone));
      at = end;
    }
    return Since(start);
  }
  /// Seconds for `n` more tokens in every sequence.
  Result<Seconds> Decode(std::int64_t n) {
    auto prompt = Prefill(std::min(kDecodePrompt, engine_.context - n));
    if (!prompt.ok()) return prompt.error();
    const Seconds start = Now();
    for (std::int64_t i = 0; i < n; ++i) {
      TakeBest();
      const auto end = static_cast<std::int64_t>(tokens_[0].size());
      K3_TRY(Step(end - 1, end, LogitRows::kLast));
    }
    return Since(start);
  }

 private:
  void Reset(std::int64_t n) {
    tokens_.clear();
    states_.clear();
    for (std::int64_t b = 0; b < options_.batch; ++b) {
      tokens_.push_back(
          RandomTokens(n, engine_.model->config().vocab, static_cast<std::uint64_t>(b)));
      states_.push_back(engine_.model->NewState());
    }
  }
  Status Step(std::int64_t begin, std::int64_t end, LogitRows rows) {
    if (Interrupted().load()) return Error{Code::kCancelled, ""};
    std::vector<SequenceInput> batch;
    for (std::size_t b = 0; b < tokens_.size(); ++b) {
      batch.push_back(
          {std::span(tokens_[b])
               .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)),
           &states_[b], rows});
    }
    return engine_.runner->Forward(batch, logits_);
  }
  void TakeBest() {
    const auto vocab = static_cast<std::size_t>(engine_.model->config().vocab);
    for (std::size_t b = 0; b < tokens_.size(); ++b) {
      const auto row = std::span(logits_).subspan(b * vocab, vocab);
      tokens_[b].push_back(
          static_cast<TokenId>(std::max_element(row.begin(), row.end()) - row.begin()));
    }
  }

  Engine& engine_;
  const BenchOptions& options_;
  std::vector<std::vector<TokenId>> tokens_;
  std::vector<ModelState> states_;
  std::vector<float> logits_;
};

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const std::size_t half = v.size() / 2;
  return v.size() % 2 == 1 ? v[half] : (v[half - 1] + v[half]) / 2;
}

/// `profiler`, when set, times the ops of the counted runs.
template <class F>
Result<BenchFigure> Measure(const BenchOptions& o, ProfilingBackend* profiler,
                            const std::string& what, std::int64_t n, F&& once) {
  ProgressLine progress;
  std::vector<double> rates, cpu_rates;
  for (std::int64_t r = -1; r < o.repeats; ++r) {  // -1: the warm-up
    progress.Show(fmt::format("{} {}", what, n), r + 1, o.repeats + 1);
    if (r == 0 && profiler != nullptr) profiler->Clear();
    K3_ASSIGN(const Seconds seconds, once());
    const auto tokens = static_cast<double>(n * o.batch);
    if (r < 0) continue;
    rates.push_back(seconds.wall > 0 ? tokens / seconds.wall : 0.0);
    cpu_rates.push_back(seconds.cpu > 0 ? tokens / seconds.cpu : 0.0);
  }
  BenchFigure f{what,
                n,
                Median(rates),
                *std::min_element(rates.begin(), rates.end()),
                *std::max_element(rates.begin(), rates.end()),
                Median(cpu_rates),
                {}};
  if (profiler != nullptr) f.profile = profiler->Rows();
  return f;
}

Status MeasureAll(const BenchOptions& o, Engine& engine, const std::vector<TokenId>& lengths,
                  ProfilingBackend* profiler, BenchReport& report) {
  Bench bench(engine, o);
  for (const TokenId n : lengths) {
    if (n < 1 || n > engine.context) {
      return Error{Code::kInvalidArgument,
                   fmt::format("--prefill: found {}, expected 1 to {}", n, engine.context)};
    }
    K3_ASSIGN(BenchFigure f, Measure(o, profiler, "prefill", n, [&] { return bench.Prefill(n); }));
    report.figures.push_back(std::move(f));
  }
  if (o.decode == 0) return {};
  if (o.decode >= engine.context) {
    return Error{Code::kInvalidArgument, fmt::format("--decode: found {}, expected less than {}",
                                                     o.decode, engine.context)};
  }
  K3_ASSIGN(BenchFigure f,
            Measure(o, profiler, "decode", o.decode, [&] { return bench.Decode(o.decode); }));
  report.figures.push_back(std::move(f));
  return {};
}

Status RunBench(const BenchOptions& o, Engine& engine, const std::vector<TokenId>& lengths) {
  engine.exec->cancel = &Interrupted();
  const MachineLock lock;
  BenchReport report;
  report.model = engine.dir, report.math = o.engine.math, report.isa = cpu::ActiveIsaName();
  report.threads = engine.exec->pool.size(), report.batch = o.batch, report.repeats = o.repeats;
  report.prefill_chunk = o.engine.prefill_chunk, report.decode_prompt = kDecodePrompt;
  report.forced = o.force, report.load_before = Load();
  K3_TRY(CheckMachine(o, lock, report.load_before));
  if (o.check > 0) {
    const auto ids = RandomTokens(o.check, engine.model->config().vocab, 17);
    K3_ASSIGN(report.check, CheckAgainstReference(*engine.model, *engine.exec, ids));
  }
  ProfilingBackend* profiler = nullptr;
  if (o.profile) {
    report.ceilings = cpu::MeasureCeilings(engine.exec->pool, engine.exec->math);
    auto wrapped = std::make_unique<ProfilingBackend>(std::move(engine.exec->ops));
    profiler = wrapped.get();
    engine.exec->ops = std::move(wrapped);
  }
  K3_TRY(MeasureAll(o, engine, lengths, profiler, report));
  report.load_after = Load();
  return WriteOut(o.json ? ReportJson(report) : ReportTable(report));
}

int Run(const BenchOptions& o) {
  const auto lengths = ParseIds(*o.prefill, "length");
  if (!lengths.ok()) return Fail(lengths.error());
  int exit_code = kExitOk;
  const auto engine = LoadEngine(o.engine, exit_code);
  if (engine == nullptr) return exit_code;
  const Status s = RunBench(o, *engine, *lengths);
  return s.ok() ? kExitOk : Fail(s.error());
}

}  // namespace

void AddBench(CLI::App& root, Action& action) {
  auto o = std::make_shared<BenchOptions>();
  CLI::App* app = root.add_subcommand("bench", "Measure prompt and decoding speed");
  app->footer(std::string(kBenchHelp) + kExitCodesHelp);
  AddModel(*app, o->engine.model);
  AddIds(*app, "--prefill", o->prefill, "Prompt lengths (default 128,512)", "length")
      ->type_name("N,..");
  AddInteger(*app, "--decode", o->decode, {0, std::numeric_limits<std::int32_t>::max()},
             "Tokens to decode; 0 leaves it out (default 64)");
  AddInteger(*app, "--batch", o->batch, {1, 1024}, "Sequences side by side (default 1)");
  AddInteger(*app, "--repeats", o->repeats, {1, 1000}, "Counted runs of each figure (default 3)");
  AddInteger(
      *app, "--check", o->check, {0, 4096},
      "Tokens to compare with the float64 reference first, given the experts that were taken;\n"
      "0 leaves it out (default 0)");
  app->add_flag("--profile", o->profile, "Time every op, beside what the machine can do at best");
  app->add_flag("--force", o->force, "Measure on a busy machine too");
  app->add_flag("--json", o->json, "Print a JSON object");
  AddEngineOptions(*app, o->engine, true);
  AddBenchServe(*app, action);
  app->callback([o, app, &action] {  // called after the one of "bench serve"
    if (app->get_subcommands().empty()) action = [o] { return Run(*o); };
  });
}

}  // namespace k3::app
