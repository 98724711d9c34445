// k3 run: continue a prompt.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "k3/base/memory.h"
#include "k3/io/atomic_file.h"
#include "k3/runtime/generate.h"
#include "k3/runtime/sequence_state.h"
#include "options.h"
#include "output.h"
#include "prompt.h"
#include "sampling.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kRunHelp =
    "Text goes to standard output as it is generated, everything else to standard error.\n"
    "Temperature, top-p, top-k, min-p and repeat penalty come from generation_config.json where "
    "it\n"
    "says do_sample; otherwise the best token is taken every time. Options override the file.\n"
    "Ctrl-C once ends the text and keeps what is there, twice ends the program at once. With\n"
    "--save-state the first one waits for the end of a pass, so that the state is whole.\n"
    "A reader that closes the pipe ends the program with status 1 and no message.\n"
    "\nExamples:\n"
    "  k3 run -p \"Once upon a time\" -n 60\n"
    "  k3 run MODEL -p \"The captain\" --temp 0 --json --logprobs 5\n"
    "  echo \"Dear reader,\" | k3 run MODEL --seed 7\n"
    "  k3 run MODEL -p \"A long story\" -n 0 --save-state story.k3s\n"
    "  k3 run MODEL --load-state story.k3s -p \" and then\"";

constexpr std::int64_t kManyTokens = std::numeric_limits<std::int32_t>::max();

struct RunOptions {
  EngineOptions engine;
  PromptOptions prompt;
  std::int64_t max_tokens = 128;
  SamplingOptions sampling;
  std::vector<std::string> stop;
  bool json = false;
  std::int64_t logprobs = -1;
  std::string save_state, load_state;
};

Result<GenerateOptions> MakeOptions(const RunOptions& o, const Engine& engine) {
  K3_ASSIGN(GenerateOptions g, BaseGenerateOptions(o.sampling, o.engine, engine));
  g.stop = o.stop;
  g.max_tokens = o.max_tokens;
  g.top_logprobs = o.logprobs;
  return g;
}

Json LogprobsJson(const GenerateResult& result, const Tokenizer& tokenizer) {
  const auto entry = [&tokenizer](TokenId id, double logprob) {
    return Json{
        {"id", id}, {"token", std::string(tokenizer.Bytes(id).value_or(""))}, {"logprob", logprob}};
  };
  Json list = Json::array();
  for (const SampleResult& t : result.tokens) {
    Json one = entry(t.token, t.logprob);
    one["top"] = Json::array();
    for (const TokenLogprob& alternative : t.top) {
      one["top"].push_back(entry(alternative.id, alternative.logprob));
    }
    list.push_back(std::move(one));
  }
  return list;
}

double PerSecond(double n, double seconds) { return seconds > 0 ? n / seconds : 0.0; }

Json ResultJson(const RunOptions& o, const Engine& engine, const std::vector<TokenId>& prompt,
                const GenerateResult& r) {
  Json j{
      {"prompt_ids", prompt}, {"ids", r.ids}, {"text", r.text}, {"finish_reason", Name(r.finish)}};
  if (!r.matched_stop.empty()) j["stop"] = r.matched_stop;
  if (o.logprobs >= 0) j["logprobs"] = LogprobsJson(r, *engine.tokenizer);
  j["usage"] = {{"prompt_tokens", prompt.size()}, {"completion_tokens", r.ids.size()}};
  // The first token comes with the prompt's last pass, so decoding made the others.
  const double decoded = r.ids.empty() ? 0.0 : static_cast<double>(r.ids.size() - 1);
  j["timings"] = {
      {"load_s", engine.load_s},
      {"prefill_tokens", r.prefill_tokens},
      {"prefill_s", r.prefill_s},
      {"prefill_tokens_per_s", PerSecond(static_cast<double>(r.prefill_tokens), r.prefill_s)},
      {"decode_s", r.decode_s},
      {"decode_tokens_per_s", PerSecond(decoded, r.decode_s)}};
  j["memory"] = {{"peak_resident_bytes", PeakResidentBytes()}};
  j["math"] = o.engine.math;
  j["threads"] = engine.exec->pool.size();
  j["seed"] = o.sampling.params.seed;
  return j;
}

Result<SequenceState> StartState(const RunOptions& o, Engine& engine) {
  if (o.load_state.empty()) return NewSequence(*engine.runner, o.sampling.params.seed);
  K3_ASSIGN(SequenceState state, LoadState(o.load_state, *engine.runner));
  if (o.sampling.seed_given) state.sampler.set_rng_state(o.sampling.params.seed);
  return state;
}

/// `last` is the last character that went to standard output.
Result<GenerateResult> Continue(const RunOptions& o, Engine& engine, std::vector<TokenId>& prompt,
                                char& last) {
  K3_ASSIGN(const GenerateOptions options, MakeOptions(o, engine));
  if (!o.save_state.empty()) K3_TRY(AtomicFile::Check(o.save_state));
  K3_ASSIGN(SequenceState state, StartState(o, engine));
  const bool continues = !state.tokens.empty();
  if (!continues || o.prompt.text.has_value() || o.prompt.ids.has_value()) {
    K3_ASSIGN(prompt, ReadPrompt(o.prompt, engine, !continues));
  }
  AppendPrompt(state, prompt);
  const auto length = static_cast<std::int64_t>(state.tokens.size());
  K3_TRY(CheckMemory(engine, o.engine, std::min(engine.context, length + o.max_tokens), 1));
  GenerateEvents events;
  ProgressLine progress;
  events.on_prefill = [&](std::int64_t done, std::int64_t total) {
    progress.Show("reading the prompt", done, total);
  };
  events.on_text = [&](std::string_view text) {
    progress.Clear();
    if (o.json) return Status();
    last = text.back();
    return WriteOut(text);
  };
  // A pass may take minutes. Stopped inside it the state is lost, so one that will be saved waits.
  if (o.save_state.empty()) engine.exec->cancel = &Interrupted();
  GenerateResult result;
  if (!state.tokens.empty()) {  // an empty prompt of a model without BOS continues to nothing
    K3_ASSIGN(result, Generate(*engine.runner, *engine.tokenizer, state, options, events));
  }
  if (!o.save_state.empty()) K3_TRY(SaveState(o.save_state, state, *engine.runner));
  return result;
}

int Run(const RunOptions& o) {
  int exit_code = kExitOk;
  EngineOptions engine_options = o.engine;
  constexpr std::int64_t kBrief = 64;  // tokens that save about the time of a copy
  engine_options.brief = o.max_tokens < kBrief;
  const auto engine = LoadEngine(engine_options, exit_code);
  if (engine == nullptr) return exit_code;
  std::vector<TokenId> prompt;
  char last = '\n';
  const auto result = Continue(o, *engine, prompt, last);
  // On a terminal the shell's prompt starts on a line of its own; files get the text alone.
  if (last != '\n' && StdoutIsTerminal()) (void)WriteOut("\n").ok();
  if (!result.ok()) return Fail(result.error());
  if (o.json) {
    const Status written = WriteOut(JsonText(ResultJson(o, *engine, prompt, *result)));
    if (!written.ok()) return Fail(written.error());
  }
  return result->finish == FinishReason::kCancelled ? kExitInterrupted : kExitOk;
}

}  // namespace

void AddRun(CLI::App& root, Action& action) {
  auto o = std::make_shared<RunOptions>();
  CLI::App* app = root.add_subcommand("run", "Continue a prompt");
  app->footer(std::string(kRunHelp) + kExitCodesHelp);
  AddModel(*app, o->engine.model);
  AddPromptOptions(*app, o->prompt);
  AddInteger(*app, "-n,--max-tokens", o->max_tokens, {0, kManyTokens},
             "Most tokens to generate; 0 only reads the prompt (default 128)");
  AddSamplingOptions(*app, o->sampling);
  app->add_option("--stop", o->stop, "End the text before this string; repeatable")
      ->type_name("TEXT")
      ->allow_extra_args(false)
      ->check([](const std::string& text) {
        return text.empty() ? std::string("a stop string must not be empty") : std::string();
      });
  auto* json = app->add_flag("--json", o->json, "Print one JSON object at the end");
  AddInteger(*app, "--logprobs", o->logprobs, {0, 20},
             "With --json: log-probabilities of each token and its N best alternatives")
      ->needs(json);
  app->add_option("--save-state", o->save_state, "Write the sequence's state to FILE at the end")
      ->type_name("FILE");
  app->add_option("--load-state", o->load_state,
                  "Continue from a saved state; a prompt is appended to it")
      ->type_name("FILE");
  AddEngineOptions(*app, o->engine, true);
  app->callback([o, &action] { action = [o] { return Run(*o); }; });
}

}  // namespace k3::app
