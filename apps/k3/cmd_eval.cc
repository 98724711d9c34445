// k3 eval: measured quality.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "k3/eval/perplexity.h"
#include "k3/io/mapped_file.h"
#include "options.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kEvalHelp =
    "Task ppl: how well the model predicts the documents of a file, which NUL bytes separate.\n"
    "Each document is BOS and its first --tokens tokens; those tokens are scored (without a BOS\n"
    "token all but the first). The mean is over documents; bits per byte are over all scored "
    "text.\n"
    "Empty documents do not count. --by-position tells the mean by distance from the start, in\n"
    "doubling stretches: past the length a model was trained on it shows what it does there.\n"
    "\nExamples:\n"
    "  k3 eval ppl --text books.txt --docs 8 --tokens 512\n"
    "  k3 eval MODEL ppl --text books.txt --json\n"
    "  k3 eval MODEL ppl --text books.txt --tokens 8192 --by-position";

struct EvalOptions {
  EngineOptions engine;
  std::vector<std::string> words;  // [MODEL] TASK
  std::string text;
  std::int64_t docs = 0, tokens = 512;
  bool json = false, by_position = false;
};

Json ReportJson(const EvalOptions& o, const Engine& engine, const PerplexityResult& r) {
  Json documents = Json::array();
  for (const DocumentScore& d : r.documents) {
    documents.push_back({{"nats", d.nats}, {"tokens", d.tokens}, {"bytes", d.bytes}});
  }
  Json j{{"task", "ppl"},
         {"model", engine.dir},
         {"text", o.text},
         {"math", o.engine.math},
         {"mean_nats", r.mean_nats},
         {"stderr_nats", nullptr},
         {"bits_per_byte", r.bits_per_byte},
         {"documents", std::move(documents)}};
  if (std::isfinite(r.stderr_nats)) j["stderr_nats"] = r.stderr_nats;
  if (o.by_position) {
    Json places = Json::array();
    for (const PositionScore& p : r.by_position) {
      if (p.tokens == 0) continue;
      places.push_back(
          {{"begin", p.begin}, {"end", p.end}, {"tokens", p.tokens}, {"nats", p.nats}});
    }
    j["by_position"] = std::move(places);
  }
  return j;
}

std::string PositionText(const PerplexityResult& r) {
  std::string text = "\n  from     to    tokens    nats/token\n";
  for (const PositionScore& p : r.by_position) {
    if (p.tokens == 0) continue;
    text += fmt::format("{:6} {:6} {:9} {:13.4f}\n", p.begin, p.end, p.tokens, p.nats);
  }
  return text;
}

std::string ReportText(const EvalOptions& o, const PerplexityResult& r) {
  std::int64_t tokens = 0;
  for (const DocumentScore& d : r.documents) tokens += d.tokens;
  const std::string spread =
      std::isfinite(r.stderr_nats) ? fmt::format(" +- {:.4f}", r.stderr_nats) : "";
  return fmt::format(
             "nats/token     {:.4f}{}\nbits/byte      {:.4f}\ndocuments      {}\ntokens scored  "
             "{}\n",
             r.mean_nats, spread, r.bits_per_byte, r.documents.size(), tokens) +
         (o.by_position ? PositionText(r) : "");
}

int Ppl(const EvalOptions& o) {
  int exit_code = kExitOk;
  const auto text = ReadTextFile(o.text, std::size_t{1} << 32);
  if (!text.ok()) return Fail(text.error());
  const auto engine = LoadEngine(o.engine, exit_code);
  if (engine == nullptr) return exit_code;
  PerplexityOptions options;
  options.n_docs = o.docs;
  options.n_tokens = o.tokens;
  options.bos = engine->bos;
  options.cancel = &Interrupted();
  engine->exec->cancel = &Interrupted();
  ProgressLine progress;
  const auto result = Perplexity(
      *engine->runner, *engine->tokenizer, *text, o.text, options,
      [&](std::int64_t done, std::int64_t total) { progress.Show("document", done, total); });
  progress.Clear();
  if (!result.ok()) return Fail(result.error());
  const auto found = static_cast<std::int64_t>(result->documents.size());
  if (found < o.docs) {
    Warn(fmt::format("{}: {} documents were asked for, {} have text", o.text, o.docs, found));
  }
  const Status written =
      WriteOut(o.json ? JsonText(ReportJson(o, *engine, *result)) : ReportText(o, *result));
  return written.ok() ? kExitOk : Fail(written.error());
}

/// The parser knows one list of words; the usage line shows what they mean.
class EvalHelp : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: k3 eval [OPTIONS] [MODEL] ppl --text FILE\n";
  }
};

/// Splits the words into model and task; an unknown task is a usage error.
void ReadWords(EvalOptions& o) {
  if (o.words.size() == 2) o.engine.model = o.words[0];
  const std::string& task = o.words.back();
  if (task != "ppl") {
    throw CLI::ValidationError("TASK", fmt::format("found \"{}\", expected ppl", task));
  }
}

}  // namespace

void AddEval(CLI::App& root, Action& action) {
  auto o = std::make_shared<EvalOptions>();
  CLI::App* app = root.add_subcommand("eval", "Measure quality: eval [MODEL] ppl");
  app->formatter(std::make_shared<EvalHelp>());
  app->footer(std::string(kEvalHelp) + kExitCodesHelp);
  app->add_option("TASK", o->words, "ppl; a model folder may stand before it")
      ->required()
      ->expected(1, 2)
      ->type_name("");
  app->add_option("--text", o->text, "File with the documents")->required()->type_name("FILE");
  AddInteger(*app, "--docs", o->docs, {1, std::numeric_limits<std::int32_t>::max()},
             "Only the first N documents (default: all)");
  AddInteger(*app, "--tokens", o->tokens, {1, std::numeric_limits<std::int32_t>::max()},
             "Tokens scored of each document (default 512)");
  app->add_flag("--by-position", o->by_position, "Tell the mean by distance from the start too");
  app->add_flag("--json", o->json, "Print a JSON object");
  AddEngineOptions(*app, o->engine, false);
  app->callback([o, &action] {
    ReadWords(*o);
    action = [o] { return Ppl(*o); };
  });
}

}  // namespace k3::app
