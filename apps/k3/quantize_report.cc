#include "quantize_report.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <set>
#include <system_error>

#include "exit_codes.h"
#include "json_text.h"
#include "k3/base/memory.h"
#include "k3/base/threads.h"
#include "k3/eval/perplexity.h"
#include "k3/io/atomic_folder.h"
#include "k3/io/mapped_file.h"
#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

/// Removes a folder when it goes out of scope.
struct Removed {
  std::string path;
  ~Removed() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

struct Row {
  std::vector<std::string> steps;  // none: the model as it is
  bool stacked = false;
  std::int64_t bytes = 0;
  double relative_l2 = 0;  // of the matrices that changed
  PerplexityResult score;
  PairedDifference change;
};

class Reporter {
 public:
  Reporter(const QuantizeReportOptions& options, std::string text, std::string dir)
      : o_(options), text_(std::move(text)), dir_(std::move(dir)) {}

  int Run();

 private:
  Status CheckSteps() const;
  int Score(const std::string& dir, Row& row);
  int Measure(const std::vector<QuantizeStep>& steps, bool stacked);
  std::string Text() const;
  Json ReportJson() const;

  const QuantizeReportOptions& o_;
  const std::string text_, dir_;
  std::vector<Row> rows_;
  ProgressLine progress_;
};

int Reporter::Score(const std::string& dir, Row& row) {
  int exit_code = kExitOk;
  EngineOptions engine_options = o_.engine;
  engine_options.model = dir;
  const auto engine = LoadEngine(engine_options, exit_code);
  if (engine == nullptr) return exit_code;
  PerplexityOptions options;
  options.n_docs = o_.docs;
  options.n_tokens = o_.tokens;
  options.bos = engine->bos;
  options.cancel = &Interrupted();
  engine->exec->cancel = &Interrupted();
  const std::string what = fmt::format("run {}, document", rows_.size() + 1);
  auto score =
      Perplexity(*engine->runner, *engine->tokenizer, text_, o_.text, options,
                 [&](std::int64_t done, std::int64_t total) { progress_.Show(what, done, total); });
  progress_.Clear();
  if (!score.ok()) return Fail(score.error());
  row.bytes = engine->model->weight_bytes();
  row.score = std::move(*score);
  return kExitOk;
}

int Reporter::Measure(const std::vector<QuantizeStep>& steps, bool stacked) {
  QuantizeOptions options = o_.base;
  Row row;
  row.stacked = stacked;
  for (const QuantizeStep& s : steps) {
    Apply(s, options);
    row.steps.push_back(s.name);
  }
  const Removed folder{
      fmt::format("{}/k3-quantize-report-{}-{}", o_.work, ::getpid(), rows_.size())};
  ThreadPool pool(o_.engine.threads > 0 ? static_cast<int>(o_.engine.threads) : UsableCpus());
  const auto converted = Quantize(dir_, folder.path, options, {&pool, &Interrupted(), {}});
  if (!converted.ok()) return Fail(converted.error());
  RoundingError error;
  for (const QuantizedMatrix& m : converted->matrices) {
    if (m.changes()) error.Merge(m.error);
  }
  row.relative_l2 = error.relative_l2();
  if (const int code = Score(folder.path, row); code != kExitOk) return code;
  const auto change = ComparePaired(rows_[0].score, row.score);
  if (!change.ok()) return Fail(change.error());
  row.change = *change;
  rows_.push_back(std::move(row));
  return kExitOk;
}

/// Whatever a conversion would refuse, before hours of measuring.
Status Reporter::CheckSteps() const {
  K3_TRY(AtomicFolder::Check(fmt::format("{}/k3-quantize-report-{}", o_.work, ::getpid())));
  for (const auto& stack : o_.stacks) {
    QuantizeOptions stacked = o_.base;
    for (const QuantizeStep& step : stack) {
      QuantizeOptions alone = o_.base;
      Apply(step, alone);
      Apply(step, stacked);
      K3_TRY(PlanQuantization(dir_, alone).status());
      K3_TRY(PlanQuantization(dir_, stacked).status());
    }
  }
  return {};
}

int Reporter::Run() {
  if (const Status s = CheckSteps(); !s.ok()) return Fail(s.error());
  Row base;
  if (const int code = Score(dir_, base); code != kExitOk) return code;
  rows_.push_back(std::move(base));
  std::set<std::string> seen;
  for (const auto& stack : o_.stacks) {
    for (const QuantizeStep& step : stack) {
      if (!seen.insert(step.name).second) continue;
      if (const int code = Measure({step}, false); code != kExitOk) return code;
    }
  }
  for (const auto& stack : o_.stacks) {
    for (std::size_t n = 2; n <= stack.size(); ++n) {
      const std::vector<QuantizeStep> steps(stack.begin(),
                                            stack.begin() + static_cast<std::ptrdiff_t>(n));
      if (const int code = Measure(steps, true); code != kExitOk) return code;
    }
  }
  const Status written = WriteOut(o_.json ? JsonText(ReportJson(), 1) : Text());
  return written.ok() ? kExitOk : Fail(written.error());
}

std::string Reporter::Text() const {
  std::string out = fmt::format("{:<58}{:>11}{:>10}{:>10}{:>11}{:>10}{:>9}\n", "", "weights",
                                "rounding", "nats", "change", "+-", "ppl");
  for (const Row& r : rows_) {
    std::string name = r.steps.empty() ? "as it is" : fmt::format("{}", fmt::join(r.steps, " + "));
    out += fmt::format("{:<58}{:>11}", name, BytesText(r.bytes));
    if (r.steps.empty()) {
      out += fmt::format("{:>10}{:>10.4f}{:>11}{:>10}", "", r.score.mean_nats, "", "");
    } else {
      const double spread = r.change.stderr_mean;  // NaN with one document
      out += fmt::format("{:>9.3f}%{:>10.4f}{:>+11.5f}{:>10}", 100 * r.relative_l2,
                         r.score.mean_nats, r.change.mean,
                         std::isfinite(spread) ? fmt::format("{:.5f}", spread) : "unknown");
    }
    out += fmt::format("{:>9.3f}\n", std::exp(r.score.mean_nats));
  }
  return out;
}

Json Reporter::ReportJson() const {
  Json rows = Json::array();
  for (const Row& r : rows_) {
    Json row{{"steps", r.steps},
             {"stacked", r.stacked},
             {"weight_bytes", r.bytes},
             {"relative_l2", r.relative_l2},
             {"mean_nats", r.score.mean_nats},
             {"perplexity", std::exp(r.score.mean_nats)},
             {"change_nats", r.change.mean},
             {"change_stderr", nullptr},
             {"document_nats", Json::array()}};
    if (std::isfinite(r.change.stderr_mean)) row["change_stderr"] = r.change.stderr_mean;
    for (const DocumentScore& d : r.score.documents) row["document_nats"].push_back(d.nats);
    rows.push_back(std::move(row));
  }
  std::int64_t tokens = 0;
  for (const DocumentScore& d : rows_[0].score.documents) tokens += d.tokens;
  return {{"model", dir_},          {"text", o_.text},
          {"math", o_.engine.math}, {"documents", rows_[0].score.documents.size()},
          {"tokens", tokens},       {"rows", std::move(rows)}};
}

}  // namespace

Result<QuantizeStep> ParseQuantizeStep(const std::string& text) {
  const std::size_t equals = std::min(text.find('='), text.size());
  QuantizeStep step{text, text.substr(0, equals), WeightFormat::kBF16};
  const auto format = ParseWeightFormat(text.substr(std::min(equals + 1, text.size())));
  const bool part = step.part == "trunk" || step.part == "experts" || step.part == "embeddings" ||
                    step.part == "head";
  const bool expert_format = format == WeightFormat::kBF16 || format == WeightFormat::kMxfp4;
  if (!part || !format || *format == WeightFormat::kF32 || *format == WeightFormat::kF16 ||
      (step.part == "experts" && !expert_format)) {
    return Error{Code::kInvalidArgument,
                 fmt::format("found \"{}\", expected PART=FORMAT with PART trunk, experts, "
                             "embeddings or head and FORMAT bf16, fp8-e4m3, int8 or mxfp4, for "
                             "experts bf16 or mxfp4",
                             text)};
  }
  step.format = *format;
  return step;
}

void Apply(const QuantizeStep& step, QuantizeOptions& options) {
  (step.part == "trunk"     ? options.trunk
   : step.part == "experts" ? options.experts
   : step.part == "head"    ? options.head
                            : options.embeddings) = step.format;
}

int QuantizeReport(const QuantizeReportOptions& options) {
  auto text = ReadTextFile(options.text, std::size_t{1} << 32);
  if (!text.ok()) return Fail(text.error());
  auto dir = ResolveModel(options.engine.model);
  if (!dir.ok()) return Fail(dir.error());
  return Reporter(options, std::move(*text), std::move(*dir)).Run();
}

}  // namespace k3::app
