// WriteAblationReport: Markdown, JSON and a picture.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "k3/base/memory.h"
#include "k3/io/mapped_file.h"
#include "k3/train/ablation.h"
#include "k3/train/line_plot.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

struct ArmSummary {
  AblationEffect effect;
  double violation = 0, dead = 0, tokens_per_s = 0;
  std::int64_t planned = 0, resident = 0, skipped = 0, settled = -1;
  std::vector<const AblationRun*> finished;
};

ArmSummary Summarise(const AblationPlan& plan, const std::vector<AblationRun>& runs,
                     const std::string& arm) {
  ArmSummary s;
  s.effect = EffectOf(plan, runs, arm);
  for (const AblationRun& r : runs) {
    if (r.arm != arm) continue;
    s.skipped += r.skipped;
    if (r.error.empty()) s.finished.push_back(&r);
  }
  bool all_settled = !s.finished.empty();
  for (const AblationRun* r : s.finished) {
    const double share = 1.0 / static_cast<double>(s.finished.size());
    s.violation += share * r->max_violation, s.dead += share * r->dead;
    s.tokens_per_s += share * r->tokens_per_s;
    s.planned = std::max(s.planned, r->planned_bytes);
    s.resident = std::max(s.resident, r->resident_bytes);
    s.settled = std::max(s.settled, r->settled_at);
    all_settled &= r->settled_at >= 0;
  }
  if (!all_settled) s.settled = -1;
  return s;
}

/// The part of a folder name that is the same wherever the tree stands.
std::string Shown(const AblationPlan& plan, const std::string& path) {
  const std::filesystem::path root = std::filesystem::path(plan.out);
  const std::filesystem::path p = std::filesystem::path(path).lexically_relative(root);
  return (root.filename() / p).string();
}

std::string Table(const AblationPlan& plan, const std::vector<AblationRun>& runs) {
  std::string out =
      "| arm | runs | failed | loss | spread | against base | spread | verdict | MaxVio | dead | "
      "below 0.5 from step | tok/s | planned | resident |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const AblationArm& arm : plan.arms) {
    const ArmSummary s = Summarise(plan, runs, arm.name);
    const AblationEffect& e = s.effect;
    const bool compared = arm.name != "base" && e.pairs > 0;
    auto number = [](bool there, const char* format, double v) {
      return there ? fmt::format(fmt::runtime(format), v) : std::string();
    };
    const bool some = e.finished > 0;
    out += fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
                       arm.name, e.finished, e.failed, number(some, "{:.4f}", e.mean),
                       number(e.finished > 1, "{:.4f}", e.spread),
                       number(compared, "{:+.4f}", e.difference),
                       number(compared && e.pairs > 1, "{:.4f}", e.difference_spread), e.verdict,
                       number(some, "{:.2f}", s.violation), number(some, "{:.3f}", s.dead),
                       s.settled >= 0 ? std::to_string(s.settled) : "never",
                       number(some, "{:.0f}", s.tokens_per_s), some ? BytesText(s.planned) : "",
                       some ? BytesText(s.resident) : "");
  }
  return out;
}

/// What parts do together beside what they do alone.
std::string Interactions(const AblationPlan& plan, const std::vector<AblationRun>& runs) {
  std::string out;
  for (const AblationArm& arm : plan.arms) {
    if (arm.parts.size() < 2) continue;
    const AblationEffect together = EffectOf(plan, runs, arm.name);
    double sum = 0;
    bool complete = together.pairs > 0;
    for (const std::string& part : arm.parts) {
      const AblationEffect alone = EffectOf(plan, runs, part);
      sum += alone.difference, complete &= alone.pairs > 0;
    }
    if (complete) {
      out += fmt::format("- {}: {:+.4f} together, {:+.4f} as a sum of single changes\n", arm.name,
                         together.difference, sum);
    }
  }
  return out.empty() ? out : "\n## Together and alone\n\n" + out;
}

std::string Markdown(const AblationPlan& plan, const std::vector<AblationRun>& runs) {
  const auto wanted = plan.arms.size() * plan.seeds.size();
  std::string out = fmt::format("# {}\n\n", plan.question.empty() ? "Ablation" : plan.question);
  out += fmt::format(
      "Stated before the first run: an arm differs from the base when the mean difference of the "
      "loss over seeds {}\nexceeds {} nats a token and twice its standard error. All arms of a "
      "seed read the same rows in the same order and\nhave the same budget. {} of {} runs are "
      "in.\n\n",
      fmt::join(plan.seeds, ", "), plan.threshold, runs.size(), wanted);
  out += Table(plan, runs);
  out +=
      "\nLoss: validation at the end, or the last tenth of training where nothing is kept for "
      "validation. MaxVio (largest load over\nthe mean, less one): of the worst layer, mean over "
      "the second half. Speed is that of the machine as it was; planned memory is the "
      "run's, resident memory the process's.\n";
  out += Interactions(plan, runs);
  std::string failed;
  for (const AblationRun& r : runs) {
    if (!r.error.empty()) {
      failed += fmt::format("- {}, seed {}: {}\n", r.arm, r.seed, r.error);
    } else if (r.skipped > 0) {
      failed += fmt::format("- {}, seed {}: {} steps skipped\n", r.arm, r.seed, r.skipped);
    }
  }
  if (!failed.empty()) out += "\n## Failed and limping runs\n\n" + failed;
  out += fmt::format(
      "\n## To repeat\n\n    k3 ablate {}\n\nor a single run, from the folder that holds the "
      "output:\n\n",
      std::filesystem::path(plan.path).filename().string());
  for (const AblationRun& r : runs) {
    out += fmt::format("    k3 train {}/run.toml\n", Shown(plan, r.dir));
  }
  return out;
}

Json ToJson(const AblationPlan& plan, const std::vector<AblationRun>& runs) {
  Json arms = Json::array(), list = Json::array();
  for (const AblationArm& arm : plan.arms) {
    const ArmSummary s = Summarise(plan, runs, arm.name);
    arms.push_back({{"name", arm.name},
                    {"parts", arm.parts},
                    {"finished", s.effect.finished},
                    {"failed", s.effect.failed},
                    {"loss", s.effect.mean},
                    {"spread", s.effect.spread},
                    {"difference", s.effect.difference},
                    {"difference_spread", s.effect.difference_spread},
                    {"verdict", s.effect.verdict},
                    {"max_violation", s.violation},
                    {"dead", s.dead},
                    {"settled_at", s.settled},
                    {"tokens_per_s", s.tokens_per_s},
                    {"planned_bytes", s.planned},
                    {"resident_bytes", s.resident}});
  }
  for (const AblationRun& r : runs) {
    list.push_back({{"arm", r.arm},
                    {"seed", r.seed},
                    {"error", r.error},
                    {"loss", r.loss},
                    {"max_violation", r.max_violation},
                    {"dead", r.dead},
                    {"settled_at", r.settled_at},
                    {"skipped", r.skipped},
                    {"tokens_per_s", r.tokens_per_s},
                    {"planned_bytes", r.planned_bytes},
                    {"resident_bytes", r.resident_bytes}});
  }
  return {{"question", plan.question},
          {"threshold", plan.threshold},
          {"seeds", plan.seeds},
          {"arms", arms},
          {"runs", list}};
}

/// Training loss by arm: the mean over seeds, each step smoothed with those before it.
std::string Picture(const AblationPlan& plan, const std::vector<AblationRun>& runs) {
  LinePlot plot;
  plot.title = plan.question.empty() ? "training loss by arm" : plan.question;
  plot.x_label = "step";
  for (const AblationArm& arm : plan.arms) {
    const ArmSummary s = Summarise(plan, runs, arm.name);
    std::map<double, std::pair<double, double>> sums;
    for (const AblationRun* r : s.finished) {
      for (const auto& [step, loss] : r->curve) sums[step].first += loss, sums[step].second += 1;
    }
    LinePlot::Curve curve{arm.name, {}, arm.name == "base"};
    double smooth = NAN;
    for (const auto& [step, sum] : sums) {
      const double mean = sum.first / sum.second;
      smooth = std::isfinite(smooth) ? 0.9 * smooth + 0.1 * mean : mean;
      curve.points.emplace_back(step, smooth);
    }
    plot.curves.push_back(std::move(curve));
  }
  return LinePlotSvg(plot);
}

}  // namespace

Status WriteAblationReport(const AblationPlan& plan, const std::vector<AblationRun>& runs) {
  K3_TRY(WriteFileAtomically(plan.out + "/report.md", Markdown(plan, runs)));
  K3_TRY(WriteFileAtomically(plan.out + "/report.json", ToJson(plan, runs).dump(1) + "\n"));
  return WriteFileAtomically(plan.out + "/report.svg", Picture(plan, runs));
}

}  // namespace k3
