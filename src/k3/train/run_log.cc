#include "k3/train/run_log.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "k3/io/atomic_file.h"
#include "k3/io/mapped_file.h"
#include "k3/train/event_file.h"
#include "k3/train/line_plot.h"
#include "k3/train/trainer.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kColumns =
    "step,tokens,loss,eval_loss,eval_bits_per_byte,lr,grad_norm,skipped,tokens_per_s,"
    "max_violation,dead_experts,mfu,teacher_kl\n";
constexpr const char* kBalanceColumns =
    "step,layer,tokens,max_violation,dead,entropy,bias_min,bias_max\n";

/// Keeps the lines whose first number is at most `step`. `skip` characters stand before it.
Status Trim(const std::string& path, std::int64_t step, std::size_t skip, std::string head) {
  std::error_code e;
  std::string kept = std::move(head);
  if (std::filesystem::exists(path, e)) {
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) {
      if (line.size() <= skip || line[skip] < '0' || line[skip] > '9') continue;
      if (std::strtoll(line.c_str() + skip, nullptr, 10) <= step) kept += line + "\n";
    }
  }
  return WriteFileAtomically(path, kept);
}

std::string Cell(double v) { return v < 0 ? "" : fmt::format("{:.6g}", v); }

Json BalanceJson(const std::vector<LayerBalance>& balance) {
  Json layers = Json::array();
  for (const LayerBalance& b : balance) {
    layers.push_back({{"layer", b.layer},
                      {"max_violation", b.max_violation},
                      {"dead", b.dead},
                      {"entropy", b.entropy},
                      {"bias", {b.bias_min, b.bias_max}}});
  }
  return layers;
}

Json ProbeJson(const ProbeReport& p) {
  Json layers = Json::array();
  for (const LayerProbe& l : p.layers) {
    Json j{{"layer", l.layer}, {"kind", l.kind}};
    if (l.attention_entropy >= 0) j["attention_entropy"] = l.attention_entropy;
    if (l.has_similarity) j["similarity"] = l.similarity;
    if (!l.decay_histogram.empty()) {
      j["decay_histogram"] = l.decay_histogram, j["decay_mean"] = l.decay_mean;
    }
    layers.push_back(std::move(j));
  }
  Json depth = Json::object(), scales = Json::object();
  for (const auto& [site, weights] : p.depth_weights) depth[site] = weights;
  for (const auto& [name, value] : p.scales) scales[name] = value;
  return {{"layers", layers}, {"depth_weights", depth}, {"scales", scales}};
}

std::vector<EventFile::Scalar> Scalars(const StepReport& r) {
  std::vector<EventFile::Scalar> s{{"loss/train", r.loss},
                                   {"optimizer/lr", r.lr},
                                   {"optimizer/grad_norm", r.grad_norm},
                                   {"speed/tokens_per_s", r.tokens_per_s}};
  if (r.eval_loss >= 0) {
    s.emplace_back("loss/valid", r.eval_loss);
    s.emplace_back("loss/valid_bits_per_byte", r.eval_bits_per_byte);
  }
  if (r.mfu >= 0) s.emplace_back("speed/mfu", r.mfu);
  if (r.divergence >= 0) s.emplace_back("loss/teacher_kl", r.divergence);
  for (const LayerBalance& b : r.balance) {
    const std::string at = fmt::format("balance/layer_{}/", b.layer);
    s.emplace_back(at + "max_violation", b.max_violation);
    s.emplace_back(at + "dead", b.dead);
    s.emplace_back(at + "entropy", b.entropy);
    s.emplace_back(at + "bias_range", b.bias_max - b.bias_min);
  }
  if (!r.probe) return s;
  for (const LayerProbe& l : r.probe->layers) {
    const std::string at = fmt::format("probe/layer_{}/", l.layer);
    if (l.attention_entropy >= 0) s.emplace_back(at + "attention_entropy", l.attention_entropy);
    if (l.has_similarity) s.emplace_back(at + "similarity", l.similarity);
    if (!l.decay_histogram.empty()) s.emplace_back(at + "decay_mean", l.decay_mean);
  }
  for (const auto& [name, value] : r.probe->scales) s.emplace_back("probe/" + name, value);
  return s;
}

std::vector<EventFile::Histogram> Histograms(const StepReport& r) {
  std::vector<EventFile::Histogram> all;
  for (const LayerBalance& b : r.balance) {  // by the number of the expert
    all.push_back({fmt::format("balance/layer_{}/load", b.layer),
                   0,
                   static_cast<double>(b.load.size()),
                   {b.load.begin(), b.load.end()}});
  }
  if (!r.probe) return all;
  for (const LayerProbe& l : r.probe->layers) {
    all.push_back({fmt::format("probe/layer_{}/decay", l.layer), 0, 1, l.decay_histogram});
  }
  return all;
}

}  // namespace

struct RunLog::Files {
  std::string out;
  std::ofstream csv, json, balance, samples;
  EventFile events;

  bool good() const { return csv.good() && json.good() && balance.good() && samples.good(); }
};

RunLog::RunLog(std::unique_ptr<Files> files) : files_(std::move(files)) {}
RunLog::~RunLog() = default;

Result<std::unique_ptr<RunLog>> RunLog::Open(const std::string& out, std::int64_t step) {
  constexpr std::size_t kJsonHead = 8;  // {"step":
  K3_TRY(Trim(out + "/log.csv", step, 0, kColumns));
  K3_TRY(Trim(out + "/balance.csv", step, 0, kBalanceColumns));
  K3_TRY(Trim(out + "/log.jsonl", step, kJsonHead, ""));
  K3_TRY(Trim(out + "/samples.jsonl", step, kJsonHead, ""));
  K3_ASSIGN(EventFile events, EventFile::Create(out, step));
  auto files = std::make_unique<Files>(Files{out, {}, {}, {}, {}, std::move(events)});
  files->csv.open(out + "/log.csv", std::ios::app);
  files->balance.open(out + "/balance.csv", std::ios::app);
  files->json.open(out + "/log.jsonl", std::ios::app);
  files->samples.open(out + "/samples.jsonl", std::ios::app);
  return std::unique_ptr<RunLog>(new RunLog(std::move(files)));
}

Status RunLog::Written() const {
  if (files_->good()) return {};
  return Error{Code::kIo,
               fmt::format("{}: cannot write the log: {}", files_->out, std::strerror(errno))};
}

Status RunLog::Add(const StepReport& r) {
  double violation = 0, dead = 0;
  for (const LayerBalance& b : r.balance) {
    violation = std::max(violation, b.max_violation);
    dead = std::max(dead, b.dead);
    files_->balance << fmt::format("{},{},{},{:.4f},{:.4f},{:.4f},{:.5f},{:.5f}\n", r.step, b.layer,
                                   b.tokens, b.max_violation, b.dead, b.entropy, b.bias_min,
                                   b.bias_max);
  }
  files_->balance << std::flush;
  files_->csv << fmt::format("{},{},{:.6f},{},{},{:.6g},{:.6g},{},{:.0f},{:.4f},{:.4f},{},{}\n",
                             r.step, r.tokens, r.loss, Cell(r.eval_loss),
                             Cell(r.eval_bits_per_byte), r.lr, r.grad_norm, r.skipped_total,
                             r.tokens_per_s, violation, dead, Cell(r.mfu), Cell(r.divergence))
              << std::flush;
  Json j{{"step", r.step},
         {"tokens", r.tokens},
         {"loss", r.loss},
         {"lr", r.lr},
         {"grad_norm", r.grad_norm},
         {"skipped", r.skipped_total},
         {"tokens_per_s", r.tokens_per_s},
         {"memory_bytes", r.memory_bytes}};
  if (r.eval_loss >= 0) {
    j["eval_loss"] = r.eval_loss, j["eval_bits_per_byte"] = r.eval_bits_per_byte;
  }
  if (r.mfu >= 0) j["mfu"] = r.mfu;
  if (r.divergence >= 0) j["teacher_kl"] = r.divergence;
  if (!r.balance.empty()) j["balance"] = BalanceJson(r.balance);
  if (r.probe) j["probe"] = ProbeJson(*r.probe);
  files_->json << j.dump() << "\n" << std::flush;
  K3_TRY(files_->events.Add(r.step, Scalars(r), Histograms(r)));
  return Written();
}

Status RunLog::AddSample(std::int64_t step, const std::string& text) {
  const Json j{{"step", step}, {"text", text}};
  files_->samples << j.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n" << std::flush;
  return Written();
}

Status RunLog::Plot() const {
  LinePlot plot;
  plot.title = "loss (nats a token): " + std::filesystem::path(files_->out).filename().string();
  plot.x_label = "step";
  plot.curves = {{"training", {}, false}, {"validation", {}, true}};
  std::ifstream in(files_->out + "/log.csv");
  std::string line;
  for (std::getline(in, line); std::getline(in, line);) {
    std::vector<std::string> cells(1);
    for (const char c : line) c == ',' ? void(cells.emplace_back()) : cells.back().push_back(c);
    if (cells.size() < 4) continue;
    const double step = std::strtod(cells[0].c_str(), nullptr);
    plot.curves[0].points.emplace_back(step, std::strtod(cells[2].c_str(), nullptr));
    if (cells[3].empty()) continue;
    plot.curves[1].points.emplace_back(step, std::strtod(cells[3].c_str(), nullptr));
  }
  if (plot.curves[1].points.empty()) plot.curves.pop_back();
  return WriteFileAtomically(files_->out + "/loss.svg", LinePlotSvg(plot));
}

}  // namespace k3
