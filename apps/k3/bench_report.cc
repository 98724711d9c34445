#include "bench_report.h"

#include <fmt/format.h>

#include "json_text.h"

namespace k3::app {
namespace {

double Rate(double amount, double seconds) { return seconds > 0 ? amount / seconds * 1e-9 : 0.0; }

double Total(const BenchFigure& f) {
  double sum = 0;
  for (const ProfileRow& r : f.profile) sum += r.seconds;
  return sum;
}

std::string CheckText(const std::optional<ReferenceCheck>& c) {
  if (!c) return "not checked against the reference (--check N)";
  std::string text =
      fmt::format("{} the reference check: {:.1e} over {} tokens, allowed {:.0e}",
                  c->passed() ? "passed" : "FAILED", c->error, c->tokens, c->tolerance);
  if (c->other_choices > 0) {
    text += fmt::format(", given the same experts; alone the reference takes {} others of {}",
                        c->other_choices, c->choices);
  }
  return text;
}

void AddProfile(const BenchFigure& f, std::string& out) {
  const double total = Total(f);
  out += fmt::format("  {:32} {:>8} {:>10} {:>6} {:>9} {:>9}\n", "op", "calls", "ms", "share",
                     "GB/s", "GFLOP/s");
  for (const ProfileRow& r : f.profile) {
    out += fmt::format("  {:32} {:>8} {:>10.2f} {:>5.1f}% {:>9} {:>9}\n", r.name, r.calls,
                       r.seconds * 1e3, total > 0 ? 100 * r.seconds / total : 0.0,
                       r.bytes > 0 ? fmt::format("{:.1f}", Rate(r.bytes, r.seconds)) : "",
                       r.flops > 0 ? fmt::format("{:.1f}", Rate(r.flops, r.seconds)) : "");
  }
}

Json ProfileJson(const BenchFigure& f) {
  Json rows = Json::array();
  for (const ProfileRow& r : f.profile) {
    rows.push_back({{"op", r.name},
                    {"calls", r.calls},
                    {"seconds", r.seconds},
                    {"gb_per_s", Rate(r.bytes, r.seconds)},
                    {"gflop_per_s", Rate(r.flops, r.seconds)}});
  }
  return rows;
}

}  // namespace

std::string ReportTable(const BenchReport& b) {
  std::string out = fmt::format(
      "{}  math {}, {}, {} threads, batch {}, median of {} after a warm-up\n{}; load {:.2f} "
      "before, "
      "{:.2f} after{}\n",
      b.model, b.math, b.isa, b.threads, b.batch, b.repeats, CheckText(b.check), b.load_before,
      b.load_after, b.forced ? " (forced)" : "");
  if (b.ceilings) {
    out += fmt::format("this machine at best: reads {:.1f} GB/s, products {:.0f} GFLOP/s\n",
                       b.ceilings->read_gb_s, b.ceilings->product_gflop_s);
  }
  for (const BenchFigure& f : b.figures) {
    out += fmt::format(
        "{:8} {:6} tokens  {:10.1f} tok/s  ({:.1f} to {:.1f}; {:.1f} per second of CPU time)\n",
        f.phase, f.tokens, f.median, f.slowest, f.fastest, f.cpu_median);
    if (!f.profile.empty()) AddProfile(f, out);
  }
  return out;
}

std::string ReportJson(const BenchReport& b) {
  Json j{{"model", b.model},
         {"math", b.math},
         {"isa", b.isa},
         {"threads", b.threads},
         {"batch", b.batch},
         {"repeats", b.repeats},
         {"prefill_chunk", b.prefill_chunk},
         {"decode_prompt", b.decode_prompt},
         {"load_before", b.load_before},
         {"load_after", b.load_after},
         {"forced", b.forced},
         {"reference_check", nullptr},
         {"results", Json::array()}};
  if (b.check) {
    j["reference_check"] = {{"passed", b.check->passed()},
                            {"tokens", b.check->tokens},
                            {"error", b.check->error},
                            {"tolerance", b.check->tolerance},
                            {"expert_choices", b.check->choices},
                            {"other_choices", b.check->other_choices}};
  }
  if (b.ceilings) {
    j["ceilings"] = {{"read_gb_per_s", b.ceilings->read_gb_s},
                     {"product_gflop_per_s", b.ceilings->product_gflop_s}};
  }
  for (const BenchFigure& f : b.figures) {
    Json row{{"phase", f.phase},     {"tokens", f.tokens},   {"tokens_per_s", f.median},
             {"slowest", f.slowest}, {"fastest", f.fastest}, {"tokens_per_cpu_s", f.cpu_median}};
    if (!f.profile.empty()) row["profile"] = ProfileJson(f);
    j["results"].push_back(std::move(row));
  }
  return JsonText(j, 2);
}

}  // namespace k3::app
