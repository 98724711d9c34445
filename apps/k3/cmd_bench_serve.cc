// k3 bench serve: what a server does under load.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>

#include "child_server.h"
#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "k3/io/atomic_file.h"
#include "k3/io/mapped_file.h"
#include "k3/serve/load.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kBenchServeHelp =
    "Sends streamed requests, each on a connection of its own, to a server of its own that serves\n"
    "MODEL, or to any that speaks the OpenAI API at --url. Lengths: N, uniform:LOW:HIGH or\n"
    "lognormal:MEDIAN:SIGMA.\n"
    "  TTFT  from when a request was due to the first part of its text\n"
    "  TPOT  from the first to the last part, by the tokens after the first\n"
    "  ITL   between two parts of one answer's text; drafted tokens come several in a part\n"
    "  goodput: complete answers a second with TTFT and TPOT within the objectives\n"
    "Figures are over complete answers; all others are counted by what went wrong.\n"
    "\nExamples:\n"
    "  k3 bench serve --concurrency 16 --requests 64\n"
    "  k3 bench serve MODEL --rate 4 --prompt lognormal:200:0.8 --answer uniform:16:128 \\\n"
    "      --slo-ttft 0.5 --slo-tpot 0.05 --json load.json\n"
    "  k3 bench serve --url http://10.0.0.7:8000 --prefix-tokens 2000 --prefix-share 0.5";

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();

struct BenchServeOptions {
  serve::LoadOptions load;
  std::string model, url, server_options, text_file, json;
  std::int64_t warmup = 1;
};

std::vector<std::string> SplitBlanks(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t at = 0; (at = text.find_first_not_of(' ', at)) != text.npos;) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    words.push_back(text.substr(at, end - at));
    at = end;
  }
  return words;
}

double LoadAverage() {
  double load = -1;
  return getloadavg(&load, 1) == 1 ? load : -1.0;
}

std::string Row(const char* name, const serve::Quantiles& q) {
  if (q.count == 0) return fmt::format("{:<12} {:>9}\n", name, "-");
  return fmt::format("{:<12} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f}\n", name, 1e3 * q.mean,
                     1e3 * q.p50, 1e3 * q.p90, 1e3 * q.p99, 1e3 * q.max);
}

std::string Table(const serve::LoadOptions& o, const serve::LoadSummary& s) {
  std::string text = fmt::format(
      "{} requests in {:.2f} s, {} complete\n"
      "throughput   {:.2f} requests/s, {:.1f} tokens/s; {} prompt tokens, {} of them cached\n",
      s.sent, s.seconds, s.ok, s.requests_per_s(), s.tokens_per_s(), s.prompt_tokens,
      s.cached_tokens);
  if (o.slo_ttft_s > 0 || o.slo_tpot_s > 0) {
    text +=
        fmt::format("goodput      {:.2f} requests/s, {} requests\n", s.goodput_per_s(), s.in_slo);
  }
  for (const auto& [error, count] : s.errors) {
    text += fmt::format("error        {}: {}\n", error, count);
  }
  text += fmt::format("{:<12} {:>9} {:>9} {:>9} {:>9} {:>9}\n", "ms", "mean", "p50", "p90", "p99",
                      "max");
  text += Row("TTFT", s.ttft);
  if (s.ttft_shared.count > 0) text += Row("TTFT shared", s.ttft_shared);
  return text + Row("TPOT", s.tpot) + Row("ITL", s.itl) + Row("whole", s.e2e);
}

Result<serve::HttpTarget> Target(const BenchServeOptions& o, std::unique_ptr<ChildServer>& child) {
  if (!o.url.empty()) return serve::ParseUrl(o.url);
  std::vector<std::string> words;
  if (!o.model.empty()) words.push_back(o.model);
  for (std::string& word : SplitBlanks(o.server_options)) words.push_back(std::move(word));
  K3_ASSIGN(child, ChildServer::Start(words));
  return serve::ParseUrl(child->url());
}

/// A few requests like the others, but none of them, so that nothing is done for the first time.
Status WarmUp(const BenchServeOptions& o, const serve::HttpTarget& target,
              const serve::PromptPool& pool) {
  if (o.warmup == 0) return {};
  serve::LoadOptions load = o.load;
  load.requests = o.warmup;
  load.rate = 0, load.ramp_s = 0, load.concurrency = 1, load.prefix_share = 0;
  load.seed += 1;
  serve::PromptPool turned = pool;  // other beginnings
  std::reverse(turned.ids.begin(), turned.ids.end());
  std::reverse(turned.words.begin(), turned.words.end());
  return serve::RunLoad(load, target, turned, &Interrupted(), {}).status();
}

Status WriteReport(const BenchServeOptions& o, const serve::LoadSummary& summary, Json report) {
  if (o.json == "-") return WriteOut(JsonText(report, 1));
  if (!o.json.empty()) K3_TRY(WriteFileAtomically(o.json, JsonText(report, 1)));
  return WriteOut(Table(o.load, summary));
}

Result<serve::LoadSummary> Measure(const BenchServeOptions& o) {
  std::unique_ptr<ChildServer> child;
  K3_ASSIGN(const serve::HttpTarget target, Target(o, child));
  K3_ASSIGN(const serve::PromptPool pool, serve::MakePool(o.load, target, &Interrupted()));
  if (pool.ids.empty() && !o.load.chat) Warn("no /tokenize there: lengths of prompts are words");
  K3_TRY(WarmUp(o, target, pool));
  const double load_before = LoadAverage();
  const double cpu = child ? child->cpu_seconds() : -1;
  ProgressLine progress;
  K3_ASSIGN(const serve::LoadRun run,
            serve::RunLoad(o.load, target, pool, &Interrupted(), [&](std::int64_t done) {
              progress.Show("answer", done, o.load.requests);
            }));
  progress.Clear();
  const serve::LoadSummary summary = serve::Summarize(o.load, run);
  Json report{{"k3", K3_VERSION}};
  report.update(serve::SummaryJson(o.load, summary));
  report["server"] = o.url.empty() ? Json("own") : Json(o.url);
  if (o.url.empty()) report["server_options"] = o.server_options;
  if (cpu >= 0) report["server_cpu_s"] = child->cpu_seconds() - cpu;
  report["load_average"] = {load_before, LoadAverage()};
  K3_TRY(WriteReport(o, summary, std::move(report)));
  return summary;
}

int Run(const BenchServeOptions& given) {
  BenchServeOptions o = given;
  if (const char* key = std::getenv("K3_API_KEY"); key != nullptr && o.load.key.empty()) {
    o.load.key = key;
  }
  if (const Status s = serve::CheckLoad(o.load); !s.ok()) {
    Complain(s.message());
    return kExitUsage;
  }
  if (!o.text_file.empty()) {
    const auto text = ReadTextFile(o.text_file);
    if (!text.ok()) return Fail(text.error());
    o.load.text = *text;
  }
  const auto summary = Measure(o);
  if (!summary.ok()) return Fail(summary.error());
  if (summary->ok > 0) return kExitOk;
  Complain("no request got a complete answer");
  return kExitFailed;
}

void AddSpread(CLI::App& app, const std::string& name, serve::LengthSpread& value,
               const std::string& help) {
  app.add_option_function<std::string>(
         name,
         [&value, name](const std::string& text) {
           auto parsed = serve::LengthSpread::Parse(text);
           if (!parsed.ok()) throw CLI::ValidationError(name, parsed.message());
           value = *parsed;
         },
         help)
      ->type_name("LENGTH");
}

void AddWorkload(CLI::App& app, serve::LoadOptions& o) {
  AddInteger(app, "--requests", o.requests, {1, 10'000'000}, "Requests in all (default 64)");
  auto* users = AddInteger(app, "--concurrency", o.concurrency, {1, 16384},
                           "Users that ask again when they have their answer (default 8)");
  AddReal(app, "--ramp", o.ramp_s, {0, 1e5}, "Seconds over which the users begin (default 0)");
  AddReal(app, "--rate", o.rate, {1e-3, 1e6}, "Instead: arrivals a second, Poisson")
      ->excludes(users);
  AddSpread(app, "--prompt", o.prompt, "Tokens of a prompt (default 128)");
  AddSpread(app, "--answer", o.answer, "Tokens of an answer (default 64)");
  AddInteger(app, "--prefix-tokens", o.prefix_tokens, {1, serve::LengthSpread::kMost},
             "Tokens of a beginning that requests share, before their own");
  AddReal(app, "--prefix-share", o.prefix_share, {0, 1},
          "Part of the requests that have one (default 1 with --prefix-tokens)");
  AddInteger(app, "--prefixes", o.prefixes, {1, kMaxInt}, "Different beginnings (default 1)");
  AddSeed(app, o.seed);
  AddReal(app, "--temp", o.temperature, {0, 2}, "Temperature (default 0)");
  app.add_flag("--chat", o.chat, "Ask /v1/chat/completions; prompt lengths are words then");
  app.add_flag("!--natural-end", o.ignore_eos, "Let the model end its answers");
  AddReal(app, "--slo-ttft", o.slo_ttft_s, {1e-6, 1e6}, "Objective for TTFT in seconds");
  AddReal(app, "--slo-tpot", o.slo_tpot_s, {1e-6, 1e6}, "Objective for TPOT in seconds");
  AddReal(app, "--timeout", o.limits.call_s, {0.01, 1e6}, "Seconds for a request (default 600)");
}

}  // namespace

void AddBenchServe(CLI::App& bench, Action& action) {
  auto o = std::make_shared<BenchServeOptions>();
  CLI::App* app = bench.add_subcommand("serve", "Measure a server under load");
  app->footer(std::string(kBenchServeHelp) + kExitCodesHelp);
  AddModel(*app, o->model);
  app->add_option("--url", o->url, "A server that runs, instead of one of our own")
      ->type_name("URL");
  app->add_option("--server-options", o->server_options,
                  "Options of k3 serve for our own, separated by blanks")
      ->type_name("WORDS");
  AddWorkload(*app, o->load);
  AddInteger(*app, "--warmup", o->warmup, {0, kMaxInt}, "Requests before, not counted (default 1)");
  app->add_option("--text", o->text_file, "File that prompts are cut from (default: random words)")
      ->type_name("FILE");
  app->add_option("--api-key", o->load.key, "Key to show; others can see it in ps (K3_API_KEY)")
      ->type_name("KEY");
  app->add_option("--model-name", o->load.model, "What the requests call the model")
      ->type_name("NAME");
  app->add_option("--json", o->json, "Write a report there; - prints it instead of the table")
      ->type_name("FILE");
  app->callback([o, app, &action] {
    if (app->count("--prefix-tokens") > 0 && app->count("--prefix-share") == 0) {
      o->load.prefix_share = 1;
    }
    action = [o] { return Run(*o); };
  });
}

}  // namespace k3::app
