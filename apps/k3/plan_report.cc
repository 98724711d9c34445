#include "plan_report.h"

#include <fmt/format.h>

#include <algorithm>

namespace k3::app {
namespace {

Json CostJson(const StepCost& cost, const std::optional<MachineSpeed>& speed) {
  Json j{{"tokens", cost.tokens},
         {"weight_bytes", cost.weight_bytes},
         {"state_bytes", cost.state_bytes},
         {"operations", cost.operations}};
  if (speed) {
    const Bound bound = BoundOf(cost, *speed);
    j["seconds_at_least"] = bound.seconds;
    j["bound_by"] = bound.by;
    j["tokens_per_s_at_most"] = static_cast<double>(cost.tokens) / bound.seconds;
  }
  return j;
}

/// "866 G", "444 T"
std::string CountText(double n) {
  const char* unit = "";
  for (const char* next : {"k", "M", "G", "T", "P", "E"}) {
    if (n < 1000) break;
    n /= 1000;
    unit = next;
  }
  return *unit == '\0' ? fmt::format("{:.3g}", n) : fmt::format("{:.3g} {}", n, unit);
}

/// `from_disk`: bytes that cannot be in memory when the step wants them, at least.
std::string CostText(const std::string& what, const StepCost& cost,
                     const std::optional<MachineSpeed>& speed, double from_disk) {
  const auto whole = [](double x) { return static_cast<std::int64_t>(x); };
  std::string out = fmt::format("  {}: {} of weights and {} of state moved, {} operations", what,
                                BytesText(whole(cost.weight_bytes)),
                                BytesText(whole(cost.state_bytes)), CountText(cost.operations));
  if (speed) {
    const Bound bound = BoundOf(cost, *speed);
    out += fmt::format("\n      at least {:.3g} s, at most {:.3g} tokens/s, bound by {}",
                       bound.seconds, static_cast<double>(cost.tokens) / bound.seconds, bound.by);
  }
  if (from_disk > 0) {
    out += fmt::format("\n      {} of it from disk at least, whose speed is not counted here",
                       BytesText(whole(from_disk)));
  }
  return out + "\n";
}

/// What the verdict means, and what would fit.
std::string VerdictText(const MemoryPlan& p) {
  const std::int64_t memory = p.options.memory;
  std::string out;
  switch (p.verdict) {
    case PlanVerdict::kNotAsked:
      return "  no memory given and none could be read from the system\n";
    case PlanVerdict::kFits:
      out = fmt::format("  FITS: {} of {} stay free\n", BytesText(memory - p.total_bytes()),
                        BytesText(memory));
      break;
    case PlanVerdict::kFromDisk:
      out = fmt::format(
          "  DOES NOT FIT: {} needed, {} there. It would run, because the heap fits; {} of "
          "weights\n"
          "  cannot stay in memory and are read from disk again and again\n",
          BytesText(p.total_bytes()), BytesText(memory), BytesText(p.total_bytes() - memory));
      break;
    case PlanVerdict::kTooLarge:
      out = fmt::format("  DOES NOT FIT: the heap alone needs {}, {} there\n",
                        BytesText(p.heap_bytes), BytesText(memory));
      break;
  }
  const bool weights = p.mapped_bytes < memory && p.verdict != PlanVerdict::kFromDisk;
  out += fmt::format(
      "  would fit ({} in memory): a context up to {} with {} sequence{}, or {} "
      "sequences at {}\n",
      weights ? "weights" : "weights not", p.largest_context, p.options.batch,
      p.options.batch == 1 ? "" : "s", p.largest_batch, p.options.context);
  return out;
}

std::string SweepText(const PlanReport& r) {
  std::string out = fmt::format("\n{:>10}{:>14}{:>14}{:>14}  {:<11}{}\n", "context", "state",
                                "heap", "all", "verdict", r.speed ? "decode at most" : "");
  for (const MemoryPlan& p : r.sweep) {
    std::int64_t state = 0;
    for (const char* name : {"KDA state", "convolution tails", "MLA rows", "GQA rows"}) {
      if (const PlanPart* part = p.Find(name)) state += part->bytes;
    }
    out += fmt::format("{:>10}{:>14}{:>14}{:>14}  {:<11}", p.options.context, BytesText(state),
                       BytesText(p.heap_bytes), BytesText(p.total_bytes()), Name(p.verdict));
    if (r.speed) {
      out += fmt::format("{:.3g} tokens/s", static_cast<double>(p.decode.tokens) /
                                                BoundOf(p.decode, *r.speed).seconds);
    }
    out += "\n";
  }
  return out;
}

std::string MemoryText(const PlanReport& r) {
  if (r.memory_given) return fmt::format("{} (--memory)", BytesText(r.plan.options.memory));
  return fmt::format("{} ({})", BytesText(r.plan.options.memory), r.limit.source);
}

}  // namespace

Bound BoundOf(const StepCost& cost, const MachineSpeed& speed) {
  const double read = cost.bytes() / std::max(1.0, speed.read_bytes_per_s);
  const double compute = cost.operations / std::max(1.0, speed.f32_ops_per_s);
  return read > compute ? Bound{read, "memory reads"} : Bound{compute, "arithmetic"};
}

std::string PlanText(const PlanReport& r) {
  const MemoryPlan& p = r.plan;
  std::string out = fmt::format(
      "{}\n  {}\n  context {}, {} sequence{}, prefill chunk {}, {} threads, math {}\n  memory: "
      "{}\n",
      r.model, r.source, p.options.context, p.options.batch, p.options.batch == 1 ? "" : "s",
      p.options.prefill_chunk, p.options.threads,
      p.options.math == MathMode::kExact ? "exact" : "fast", MemoryText(r));
  out += fmt::format("\n{:<24}{:>12}  {:<12}{}\n", "part", "bytes", "lives in", "note");
  for (const PlanPart& part : p.parts) {
    out += fmt::format(
        "{:<24}{:>12}  {:<12}{}{}\n", part.name, BytesText(part.bytes), Name(part.home), part.note,
        part.bf16_bytes < 0 ? "" : fmt::format("; {} in bf16", BytesText(part.bf16_bytes)));
  }
  out += fmt::format("{:<24}{:>12}\n{:<24}{:>12}\n{:<24}{:>12}\n", "heap", BytesText(p.heap_bytes),
                     "mapped files", BytesText(p.mapped_bytes), "all", BytesText(p.total_bytes()));
  out += fmt::format("cached rows: {} bytes a token and sequence ({} in bf16)\n\n", p.row_bytes,
                     p.row_bytes_bf16);
  out += VerdictText(p);
  out += "\nwhat bounds a step\n";
  // Weights that find room beside the heap stay; of what a step reads the rest comes from disk.
  const bool disk = p.verdict == PlanVerdict::kFromDisk;
  const auto room = static_cast<double>(p.options.memory - p.heap_bytes);
  const auto missing = [&](const StepCost& c) { return disk ? c.weight_bytes - room : 0.0; };
  out +=
      CostText(fmt::format("decode, {} token{}", p.decode.tokens, p.decode.tokens == 1 ? "" : "s"),
               p.decode, r.speed, missing(p.decode));
  out += CostText(fmt::format("prefill, {} tokens", p.prefill.tokens), p.prefill, r.speed,
                  missing(p.prefill));
  if (r.speed) {
    out +=
        fmt::format("  this machine: reads {:.3g} GB/s, computes {:.3g} GFLOP/s ({})\n",
                    r.speed->read_bytes_per_s / 1e9, r.speed->f32_ops_per_s / 1e9, r.speed->method);
  }
  if (!r.sweep.empty()) out += SweepText(r);
  return out;
}

Json PlanJson(const PlanReport& r) {
  const MemoryPlan& p = r.plan;
  Json j{{"model", r.model},
         {"source", r.source},
         {"context", p.options.context},
         {"batch", p.options.batch},
         {"prefill_chunk", p.options.prefill_chunk},
         {"threads", p.options.threads},
         {"math", p.options.math == MathMode::kExact ? "exact" : "fast"},
         {"memory_bytes", p.options.memory},
         {"memory_source", r.memory_given ? "--memory" : r.limit.source},
         {"verdict", Name(p.verdict)},
         {"heap_bytes", p.heap_bytes},
         {"mapped_bytes", p.mapped_bytes},
         {"total_bytes", p.total_bytes()},
         {"workspace_bytes", p.workspace_bytes},
         {"row_bytes_per_token", p.row_bytes},
         {"row_bytes_per_token_bf16", p.row_bytes_bf16},
         {"largest_context", p.largest_context},
         {"largest_batch", p.largest_batch},
         {"parts", Json::array()},
         {"decode", CostJson(p.decode, r.speed)},
         {"prefill", CostJson(p.prefill, r.speed)}};
  for (const PlanPart& part : p.parts) {
    Json one{
        {"name", part.name}, {"home", Name(part.home)}, {"bytes", part.bytes}, {"note", part.note}};
    if (part.bf16_bytes >= 0) one["bf16_bytes"] = part.bf16_bytes;
    j["parts"].push_back(std::move(one));
  }
  if (r.speed) {
    j["machine"] = {{"read_bytes_per_s", r.speed->read_bytes_per_s},
                    {"f32_operations_per_s", r.speed->f32_ops_per_s},
                    {"threads", r.speed->threads},
                    {"method", r.speed->method}};
  }
  for (const MemoryPlan& s : r.sweep) {
    Json one{{"context", s.options.context},
             {"heap_bytes", s.heap_bytes},
             {"total_bytes", s.total_bytes()},
             {"verdict", Name(s.verdict)},
             {"decode", CostJson(s.decode, r.speed)}};
    j["sweep"].push_back(std::move(one));
  }
  return j;
}

}  // namespace k3::app
