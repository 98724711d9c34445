// k3 quantize: a model folder in other weight formats.
#include <fmt/format.h>

#include <filesystem>
#include <limits>
#include <map>
#include <system_error>
#include <tuple>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "k3/base/memory.h"
#include "k3/base/threads.h"
#include "k3/model/quantize.h"
#include "options.h"
#include "output.h"
#include "quantize_report.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kQuantizeHelp =
    "Reads a model folder and writes OUT, a new folder in the same layout. The trunk is "
    "attention,\n"
    "dense, latent and shared-expert matrices. Norms, convolutions, decay vectors, routers and "
    "the\n"
    "residual stream always stay. FORMAT is bf16 (16 bits a weight), fp8-e4m3 (8.002, scales for\n"
    "128 x 128), int8 (8.5, scales for 32), mxfp4 (4.25, scales for 32) or keep.\n"
    "Matrices whose rows a format cannot hold stay, with a warning. OUT appears when it is "
    "complete\n"
    "and must not exist. --dry-run shows what would change, from headers alone.\n"
    "--report writes no OUT: it measures what each step costs on --text, alone and stacked.\n"
    "\nExamples:\n"
    "  k3 quantize MODEL OUT --trunk int8\n"
    "  k3 quantize MODEL OUT --trunk fp8-e4m3 --head fp8-e4m3 --keep '*.kv_b_proj.weight'\n"
    "  k3 quantize MODEL --trunk mxfp4 --dry-run\n"
    "  k3 quantize MODEL --report --text books.txt --docs 32 --stack trunk=int8,head=int8";

struct Options {
  std::vector<std::string> words;              // [MODEL] OUT, or [MODEL] when nothing is written
  std::map<std::string, std::string> formats;  // part -> word
  std::vector<std::string> stacks;
  bool dry_run = false, report = false;
  std::string out;
  QuantizeReportOptions measure;  // shares its patterns, engine and --json with the conversion
};

QuantizeOptions Recipe(const Options& o) {
  QuantizeOptions q = o.measure.base;
  for (const auto& [part, word] : o.formats) {
    if (word != "keep") Apply({"", part, *ParseWeightFormat(word)}, q);
  }
  return q;
}

Json MatrixJson(const QuantizedMatrix& m, bool measured) {
  Json j{{"name", m.name},
         {"role", Name(m.role)},
         {"shape", {m.rows, m.cols}},
         {"from", Name(m.from)},
         {"to", Name(m.to)},
         {"bytes_before", m.bytes_before},
         {"bytes_after", m.bytes_after},
         {"relative_l2", nullptr},
         {"max_abs", nullptr},
         {"kept_because", nullptr}};
  if (measured || !m.changes()) {
    j["relative_l2"] = m.error.relative_l2();
    j["max_abs"] = m.error.max_abs;
  }
  if (!m.kept_because.empty()) j["kept_because"] = m.kept_because;
  return j;
}

Json ResultJson(const Options& o, const std::string& dir, const QuantizeResult& r) {
  Json j{{"model", dir},
         {"out", nullptr},
         {"dry_run", o.dry_run},
         {"bytes_before", r.bytes_before},
         {"bytes_after", r.bytes_after},
         {"other", {{"tensors", r.other_tensors}, {"bytes", r.other_bytes}}},
         {"changed", r.changed()},
         {"matrices", Json::array()},
         {"warnings", r.warnings}};
  if (!o.dry_run) j["out"] = o.out;
  for (const QuantizedMatrix& m : r.matrices) j["matrices"].push_back(MatrixJson(m, !o.dry_run));
  return j;
}

/// Matrices of a role that share their formats.
struct Line {
  std::int64_t count = 0, before = 0, after = 0;
  RoundingError error;
};

std::string ResultText(const Options& o, const QuantizeResult& r) {
  std::map<std::tuple<TensorRole, WeightFormat, WeightFormat>, Line> lines;
  for (const QuantizedMatrix& m : r.matrices) {
    Line& line = lines[{m.role, m.from, m.to}];
    line.count += 1;
    line.before += m.bytes_before;
    line.after += m.bytes_after;
    line.error.Merge(m.error);
  }
  std::string out = fmt::format("{:<15}{:<22}{:>8}{:>12}{:>12}{:>12}{:>12}\n", "role", "format",
                                "count", "before", "after", "rel. error", "max error");
  for (const auto& [key, line] : lines) {
    const auto [role, from, to] = key;
    const bool changed = from != to;
    out += fmt::format(
        "{:<15}{:<22}{:>8}{:>12}{:>12}", Name(role),
        changed ? fmt::format("{} -> {}", Name(from), Name(to)) : std::string(Name(from)),
        line.count, BytesText(line.before), BytesText(line.after));
    if (changed && !o.dry_run) {
      out += fmt::format("{:>12.3e}{:>12.3e}", line.error.relative_l2(), line.error.max_abs);
    }
    out += '\n';
  }
  out += fmt::format("{:<15}{:<22}{:>8}{:>12}{:>12}\n", "other tensors", "as they are",
                     r.other_tensors, BytesText(r.other_bytes), BytesText(r.other_bytes));
  out += fmt::format("{:<15}{:<22}{:>8}{:>12}{:>12}\n", "all", "",
                     r.other_tensors + static_cast<std::int64_t>(r.matrices.size()),
                     BytesText(r.bytes_before), BytesText(r.bytes_after));
  return out;
}

int Convert(const Options& o) {
  const auto dir = ResolveModel(o.measure.engine.model);
  if (!dir.ok()) return Fail(dir.error());
  const std::int64_t threads = o.measure.engine.threads;
  ThreadPool pool(threads > 0 ? static_cast<int>(threads) : UsableCpus());
  ProgressLine progress;
  const QuantizeRun run{&pool, &Interrupted(), [&](std::int64_t done, std::int64_t total) {
                          progress.Show("MiB", done >> 20, total >> 20);
                        }};
  const auto result =
      o.dry_run ? PlanQuantization(*dir, Recipe(o)) : Quantize(*dir, o.out, Recipe(o), run);
  progress.Clear();
  if (!result.ok()) return Fail(result.error());
  for (const std::string& warning : result->warnings) Warn(warning);
  const Status s =
      WriteOut(o.measure.json ? JsonText(ResultJson(o, *dir, *result), 1) : ResultText(o, *result));
  return s.ok() ? kExitOk : Fail(s.error());
}

/// Without --stack the formats given for parts are one stack.
void ReadStacks(Options& o) {
  std::vector<std::string> texts = o.stacks;
  std::string own;
  for (const char* part : {"experts", "trunk", "head", "embeddings"}) {
    const std::string& format = o.formats.at(part);
    if (format != "keep") own += fmt::format("{}{}={}", own.empty() ? "" : ",", part, format);
  }
  if (texts.empty() && own.empty()) {
    throw CLI::ValidationError("--report", "nothing to measure: give --stack, or --trunk ...");
  }
  if (!texts.empty() && !own.empty()) {
    throw CLI::ValidationError("--stack", fmt::format("found {} beside it, expected either", own));
  }
  if (texts.empty()) texts.push_back(own);
  for (const std::string& text : texts) {
    auto& stack = o.measure.stacks.emplace_back();
    for (std::size_t at = 0; at <= text.size();) {
      const std::size_t comma = std::min(text.find(',', at), text.size());
      const auto step = ParseQuantizeStep(text.substr(at, comma - at));
      if (!step.ok()) throw CLI::ValidationError("--stack", step.message());
      for (const QuantizeStep& before : stack) {
        if (before.part != step->part) continue;
        throw CLI::ValidationError(
            "--stack", fmt::format("found \"{}\" after \"{}\", expected each part once in a stack",
                                   step->name, before.name));
      }
      stack.push_back(*step);
      at = comma + 1;
    }
  }
}

/// Which word is what, and which options go together. Errors are those of usage.
void ReadWords(Options& o) {
  const bool writes = !o.dry_run && !o.report;
  const std::size_t most = writes ? 2 : 1;
  if (o.words.size() > most || (writes && o.words.empty())) {
    throw CLI::ValidationError(
        "MODEL OUT", writes ? "expected the name of a new folder, after that of the model"
                            : "--dry-run and --report take a model alone and write no folder");
  }
  for (const std::string& word : o.words) {
    if (word.empty()) throw CLI::ValidationError("MODEL OUT", "found \"\", expected a folder");
  }
  if (o.report && o.dry_run) {
    throw CLI::ValidationError("--report and --dry-run", "found both, expected one of them");
  }
  if (writes) o.out = o.words.back();
  if (o.words.size() == most) o.measure.engine.model = o.words.front();
  if (o.report && o.measure.text.empty()) {
    throw CLI::ValidationError("--report", "needs --text FILE");
  }
  if (o.report) return ReadStacks(o);
  if (!o.stacks.empty() || !o.measure.text.empty()) {
    throw CLI::ValidationError("--stack and --text", "are for --report");
  }
  for (const auto& [part, word] : o.formats) {
    if (word != "keep") return;
  }
  throw CLI::ValidationError("--trunk, --experts, --embeddings, --head",
                             "nothing to change; give one of them a format");
}

void AddFormats(CLI::App& app, Options& o) {
  const auto add = [&](const std::string& part, const std::string& what,
                       const std::vector<std::string>& allowed) {
    app.add_option("--" + part, o.formats[part], what)->type_name("FORMAT")->check(OneOf(allowed));
    o.formats[part] = "keep";
  };
  add("trunk", "bf16, fp8-e4m3, int8, mxfp4 or keep (the default)",
      {"bf16", "fp8-e4m3", "int8", "mxfp4", "keep"});
  add("experts", "Routed experts: mxfp4, bf16 or keep", {"mxfp4", "bf16", "keep"});
  for (const char* part : {"embeddings", "head"}) {
    add(part, "As --trunk", {"bf16", "fp8-e4m3", "int8", "mxfp4", "keep"});
  }
}

void AddReport(CLI::App& app, Options& o) {
  app.add_flag("--report", o.report, "Measure the steps of the conversion; write no OUT");
  app.add_option("--text", o.measure.text, "--report: file with documents, NUL bytes between them")
      ->type_name("FILE");
  AddInteger(app, "--docs", o.measure.docs, {1, std::numeric_limits<std::int32_t>::max()},
             "--report: only the first N documents (default: all)");
  AddInteger(app, "--tokens", o.measure.tokens, {1, std::numeric_limits<std::int32_t>::max()},
             "--report: tokens scored of each (default 512)");
  app.add_option("--stack", o.stacks,
                 "--report: PART=FORMAT,PART=FORMAT,... measured one by one and on top of each "
                 "other; may be repeated")
      ->type_name("STEPS")
      ->allow_extra_args(false);
  app.add_option("--work", o.measure.work,
                 "--report: folder for converted models (default: the system's temporary one)")
      ->type_name("DIR");
}

}  // namespace

void AddQuantize(CLI::App& root, Action& action) {
  auto o = std::make_shared<Options>();
  CLI::App* app = root.add_subcommand("quantize", "Write a model in other weight formats");
  app->footer(std::string(kQuantizeHelp) + kExitCodesHelp);
  app->add_option("WORDS", o->words, "MODEL OUT; without MODEL the demo model")
      ->expected(0, 2)
      ->type_name("");
  AddFormats(*app, *o);
  app->add_option("--only", o->measure.base.only,
                  "Change only matrices whose names (NAME.weight) fit; * and ?, may be repeated")
      ->type_name("GLOB")
      ->allow_extra_args(false);
  app->add_option("--keep", o->measure.base.keep, "Keep matrices whose names fit; may be repeated")
      ->type_name("GLOB")
      ->allow_extra_args(false);
  app->add_flag("--force", o->measure.base.force, "Round again what was rounded before");
  app->add_flag("--dry-run", o->dry_run, "Show what would change and write nothing");
  app->add_flag("--json", o->measure.json, "Print a JSON object, with every matrix");
  AddReport(*app, *o);
  AddEngineOptions(*app, o->measure.engine, false);
  app->callback([o, &action] {
    ReadWords(*o);
    if (o->measure.work.empty()) {
      std::error_code ignored;
      o->measure.work = std::filesystem::temp_directory_path(ignored).string();
    }
    action = [o] { return o->report ? QuantizeReport(o->measure) : Convert(*o); };
  });
}

}  // namespace k3::app
