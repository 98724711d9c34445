// k3 bench: tokens a second, with the method in the output.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "k3/base/rng.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kHelp =
    "Reads prompts of random tokens, then decodes greedily after a prompt of 32. Each figure "
    "has\n"
    "one warm-up run that is not counted; given are median, slowest and fastest of the repeats.\n"
    "\nExamples:\n"
    "  k3 bench\n"
    "  k3 bench MODEL --prefill 64,512 --decode 64 --batch 4 --math fast --json";

constexpr std::int64_t kDecodePrompt = 32;

struct BenchOptions {
  EngineOptions engine;
  std::optional<std::string> prefill = "128,512";  // a list of small numbers, like ids
  std::int64_t decode = 64, batch = 1, repeats = 3;
  bool json = false;
};

struct Figure {
  std::string what;
  std::int64_t tokens;
  double median, slowest, fastest;  // tokens per second, all sequences together
};

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
  Result<double> Prefill(std::int64_t n) {
    Reset(n);
    const auto start = std::chrono::steady_clock::now();
    for (std::int64_t at = 0; at < n;) {
      const std::int64_t end =
          std::min(n, NextCut(at, options_.engine.prefill_chunk, engine_.exec->math));
      K3_TRY(Step(at, end, end == n ? LogitRows::kLast : LogitRows::kNone));
      at = end;
    }
    return Seconds(start);
  }
  /// Seconds for `n` more tokens in every sequence.
  Result<double> Decode(std::int64_t n) {
    auto prompt = Prefill(std::min(kDecodePrompt, engine_.context - n));
    if (!prompt.ok()) return prompt.error();
    const auto start = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < n; ++i) {
      TakeBest();
      const auto end = static_cast<std::int64_t>(tokens_[0].size());
      K3_TRY(Step(end - 1, end, LogitRows::kLast));
    }
    return Seconds(start);
  }

 private:
  static double Seconds(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
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

template <class F>
Result<Figure> Measure(const BenchOptions& o, const std::string& what, std::int64_t n, F&& once) {
  ProgressLine progress;
  std::vector<double> rates;
  for (std::int64_t r = -1; r < o.repeats; ++r) {  // -1: the warm-up
    progress.Show(fmt::format("{} {}", what, n), r + 1, o.repeats + 1);
    K3_ASSIGN(const double seconds, once());
    const auto tokens = static_cast<double>(n * o.batch);
    if (r >= 0) rates.push_back(seconds > 0 ? tokens / seconds : 0.0);
  }
  std::sort(rates.begin(), rates.end());
  const std::size_t half = rates.size() / 2;
  const double median = rates.size() % 2 == 1 ? rates[half] : (rates[half - 1] + rates[half]) / 2;
  return Figure{what, n, median, rates.front(), rates.back()};
}

std::string Report(const BenchOptions& o, const Engine& engine,
                   const std::vector<Figure>& figures) {
  if (o.json) {
    Json j{{"model", engine.dir},
           {"math", o.engine.math},
           {"threads", engine.exec->pool.size()},
           {"batch", o.batch},
           {"repeats", o.repeats},
           {"prefill_chunk", o.engine.prefill_chunk},
           {"decode_prompt", kDecodePrompt},
           {"results", Json::array()}};
    for (const Figure& f : figures) {
      j["results"].push_back({{"phase", f.what},
                              {"tokens", f.tokens},
                              {"tokens_per_s", f.median},
                              {"slowest", f.slowest},
                              {"fastest", f.fastest}});
    }
    return JsonText(j, 2);
  }
  std::string out =
      fmt::format("{}  math {}, {} threads, batch {}, median of {} after a warm-up\n", engine.dir,
                  o.engine.math, engine.exec->pool.size(), o.batch, o.repeats);
  for (const Figure& f : figures) {
    out += fmt::format("{:8} {:6} tokens  {:10.1f} tok/s  ({:.1f} to {:.1f})\n", f.what, f.tokens,
                       f.median, f.slowest, f.fastest);
  }
  return out;
}

Status RunBench(const BenchOptions& o, Engine& engine, const std::vector<TokenId>& lengths) {
  engine.exec->cancel = &Interrupted();
  Bench bench(engine, o);
  std::vector<Figure> figures;
  for (const TokenId n : lengths) {
    if (n < 1 || n > engine.context) {
      return Error{Code::kInvalidArgument,
                   fmt::format("--prefill: found {}, expected 1 to {}", n, engine.context)};
    }
    K3_ASSIGN(Figure f, Measure(o, "prefill", n, [&] { return bench.Prefill(n); }));
    figures.push_back(std::move(f));
  }
  if (o.decode > 0) {
    if (o.decode >= engine.context) {
      return Error{Code::kInvalidArgument, fmt::format("--decode: found {}, expected less than {}",
                                                       o.decode, engine.context)};
    }
    K3_ASSIGN(Figure f, Measure(o, "decode", o.decode, [&] { return bench.Decode(o.decode); }));
    figures.push_back(std::move(f));
  }
  return WriteOut(Report(o, engine, figures));
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
  app->footer(std::string(kHelp) + kExitCodesHelp);
  AddModel(*app, o->engine.model);
  AddIds(*app, "--prefill", o->prefill, "Prompt lengths (default 128,512)", "length")
      ->type_name("N,..");
  AddInteger(*app, "--decode", o->decode, {0, std::numeric_limits<std::int32_t>::max()},
             "Tokens to decode; 0 leaves it out (default 64)");
  AddInteger(*app, "--batch", o->batch, {1, 1024}, "Sequences side by side (default 1)");
  AddInteger(*app, "--repeats", o->repeats, {1, 1000}, "Counted runs of each figure (default 3)");
  app->add_flag("--json", o->json, "Print a JSON object");
  AddEngineOptions(*app, o->engine, true);
  app->callback([o, &action] { action = [o] { return Run(*o); }; });
}

}  // namespace k3::app
