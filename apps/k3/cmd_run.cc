// k3 run: continue a prompt.
#include <fmt/format.h>

#include <limits>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "k3/io/atomic_file.h"
#include "k3/model/generation_config.h"
#include "k3/runtime/generate.h"
#include "k3/runtime/sequence_state.h"
#include "options.h"
#include "output.h"
#include "prompt.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kHelp =
    "Text goes to standard output as it is generated, everything else to standard error.\n"
    "Temperature, top-p, top-k, min-p and repeat penalty come from generation_config.json where "
    "it\n"
    "says do_sample; otherwise the best token is taken every time. Options override the file.\n"
    "Ctrl-C once ends the text and keeps what is there, twice ends the program at once.\n"
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
  // Absent: the model's default, which is known only once it is loaded.
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<std::int64_t> top_k;
  SamplingParams sampling;
  bool seed_given = false;
  std::vector<std::string> biases, stop;
  bool json = false;
  std::int64_t logprobs = -1;
  std::string save_state, load_state;
};

void AddSamplingOptions(CLI::App& app, RunOptions& o) {
  const auto real = [&app](const char* name, std::optional<double>& value, RealRange range,
                           const char* help) {
    app.add_option_function<std::string>(
           name,
           [&value, range, name](const std::string& text) {
             auto parsed = ParseReal(text, range.low, range.high);
             if (!parsed.ok()) throw CLI::ValidationError(name, parsed.message());
             value = *parsed;
           },
           help)
        ->type_name("X");
  };
  real("--temp", o.temperature, {0, 100}, "Temperature; 0 (or below 0.001) takes the best token");
  real("--top-p", o.top_p, {0, 1}, "Keep the best tokens up to this share of probability");
  app.add_option_function<std::string>(
         "--top-k",
         [&o](const std::string& text) {
           auto parsed = ParseInteger(text, 0, kManyTokens);
           if (!parsed.ok()) throw CLI::ValidationError("--top-k", parsed.message());
           o.top_k = *parsed;
         },
         "Keep the N best tokens; 0 keeps all")
      ->type_name("N");
  real("--min-p", o.min_p, {0, 1}, "Drop tokens below this share of the best one's probability");
  real("--repeat-penalty", o.repetition_penalty, {0.01, 100},
       "Divide the score of tokens seen before by this; 1 is off");
  AddReal(app, "--frequency-penalty", o.sampling.frequency_penalty, {-100, 100},
          "Lower a score by this for every time the token was generated");
  AddReal(app, "--presence-penalty", o.sampling.presence_penalty, {-100, 100},
          "Lower the score of tokens generated before");
  app.add_option("--logit-bias", o.biases, "Add VALUE (-100 to 100) to a token's score; repeatable")
      ->type_name("ID=VALUE")
      ->allow_extra_args(false)
      ->check([](const std::string& text) {
        const auto bias = ParseBias(text);
        return bias.ok() ? std::string() : bias.message();
      });
  AddSeed(app, o.sampling.seed)->each([&o](const std::string&) { o.seed_given = true; });
}

/// Flags over generation_config.json over greedy.
Result<GenerateOptions> MakeOptions(const RunOptions& o, const Engine& engine) {
  GenerateOptions g;
  K3_ASSIGN(const GenerationConfig defaults,
            ReadGenerationConfig(engine.dir, engine.model->config().vocab));
  g.sampling = o.sampling;
  g.sampling.temperature = 0;
  if (defaults.do_sample.value_or(false)) {
    g.sampling.temperature = defaults.temperature.value_or(1.f);
    g.sampling.top_p = defaults.top_p.value_or(1.f);
    g.sampling.min_p = defaults.min_p.value_or(0.f);
    g.sampling.top_k = defaults.top_k.value_or(0);
    g.sampling.repetition_penalty = defaults.repetition_penalty.value_or(1.f);
  }
  if (o.temperature.has_value()) g.sampling.temperature = *o.temperature;
  if (o.top_p.has_value()) g.sampling.top_p = *o.top_p;
  if (o.min_p.has_value()) g.sampling.min_p = *o.min_p;
  if (o.top_k.has_value()) g.sampling.top_k = *o.top_k;
  if (o.repetition_penalty.has_value()) g.sampling.repetition_penalty = *o.repetition_penalty;
  for (const std::string& text : o.biases) {
    K3_ASSIGN(const auto bias, ParseBias(text));
    g.sampling.logit_bias.insert_or_assign(bias.first, bias.second);
  }
  g.eos = defaults.eos.empty() ? engine.model->config().eos : defaults.eos;
  g.stop = o.stop;
  g.max_tokens = o.max_tokens;
  g.top_logprobs = o.logprobs;
  g.context = engine.context;
  g.prefill_chunk = o.engine.prefill_chunk;
  g.cancel = &Interrupted();
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
  j["math"] = o.engine.math;
  j["threads"] = engine.exec->pool.size();
  j["seed"] = o.sampling.seed;
  return j;
}

Result<SequenceState> StartState(const RunOptions& o, Engine& engine) {
  if (o.load_state.empty()) return NewSequence(*engine.runner, o.sampling.seed);
  K3_ASSIGN(SequenceState state, LoadState(o.load_state, *engine.runner));
  if (o.seed_given) state.sampler.set_rng_state(o.sampling.seed);
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
  if (state.tokens.empty()) return GenerateResult{};
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
  K3_ASSIGN(GenerateResult result,
            Generate(*engine.runner, *engine.tokenizer, state, options, events));
  if (!o.save_state.empty()) K3_TRY(SaveState(o.save_state, state, *engine.runner));
  return result;
}

int Run(const RunOptions& o) {
  int exit_code = kExitOk;
  const auto engine = LoadEngine(o.engine, exit_code);
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
  app->footer(std::string(kHelp) + kExitCodesHelp);
  AddModel(*app, o->engine.model);
  AddPromptOptions(*app, o->prompt);
  AddInteger(*app, "-n,--max-tokens", o->max_tokens, {0, kManyTokens},
             "Most tokens to generate; 0 only reads the prompt (default 128)");
  AddSamplingOptions(*app, *o);
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
