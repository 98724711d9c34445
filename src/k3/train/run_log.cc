#include "k3/train/run_log.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "k3/io/atomic_file.h"
#include "k3/io/mapped_file.h"
#include "k3/train/trainer.h"

namespace k3 {
namespace {

constexpr const char* kColumns =
    "step,tokens,loss,eval_loss,eval_bits_per_byte,lr,grad_norm,skipped,tokens_per_s,"
    "max_violation,dead_experts\n";

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

}  // namespace

struct RunLog::Files {
  std::string out;
  std::ofstream csv, json;
};

RunLog::RunLog(std::unique_ptr<Files> files) : files_(std::move(files)) {}
RunLog::~RunLog() = default;

Result<std::unique_ptr<RunLog>> RunLog::Open(const std::string& out, std::int64_t step) {
  constexpr std::size_t kJsonHead = 8;  // {"step":
  K3_TRY(Trim(out + "/log.csv", step, 0, kColumns));
  K3_TRY(Trim(out + "/log.jsonl", step, kJsonHead, ""));
  auto files = std::make_unique<Files>();
  files->out = out;
  files->csv.open(out + "/log.csv", std::ios::app);
  files->json.open(out + "/log.jsonl", std::ios::app);
  return std::unique_ptr<RunLog>(new RunLog(std::move(files)));
}

Status RunLog::Add(const StepReport& r) {
  double violation = 0, dead = 0;
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const LayerBalance& b : r.balance) {
    violation = std::max(violation, b.max_violation);
    dead = std::max(dead, b.dead);
    layers.push_back({{"layer", b.layer},
                      {"max_violation", b.max_violation},
                      {"dead", b.dead},
                      {"entropy", b.entropy},
                      {"bias", {b.bias_min, b.bias_max}}});
  }
  files_->csv << fmt::format("{},{},{:.6f},{},{},{:.6g},{:.6g},{},{:.0f},{:.4f},{:.4f}\n", r.step,
                             r.tokens, r.loss, Cell(r.eval_loss), Cell(r.eval_bits_per_byte), r.lr,
                             r.grad_norm, r.skipped_total, r.tokens_per_s, violation, dead)
              << std::flush;
  nlohmann::ordered_json j{{"step", r.step},
                           {"tokens", r.tokens},
                           {"loss", r.loss},
                           {"lr", r.lr},
                           {"grad_norm", r.grad_norm},
                           {"skipped", r.skipped_total},
                           {"tokens_per_s", r.tokens_per_s}};
  if (r.eval_loss >= 0) {
    j["eval_loss"] = r.eval_loss, j["eval_bits_per_byte"] = r.eval_bits_per_byte;
  }
  if (!layers.empty()) j["balance"] = layers;
  files_->json << j.dump() << "\n" << std::flush;
  if (!files_->csv || !files_->json) {
    return Error{Code::kIo, fmt::format("{}: cannot write the log", files_->out)};
  }
  return {};
}

}  // namespace k3
