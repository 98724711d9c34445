#include <algorithm>
#include <cmath>

#include "k3/serve/load.h"

namespace k3::serve {
namespace {

Json QuantilesJson(const Quantiles& q) {
  if (q.count == 0) return nullptr;
  return {{"count", q.count}, {"mean", q.mean}, {"p50", q.p50},
          {"p90", q.p90},     {"p99", q.p99},   {"max", q.max}};
}

Json SpreadJson(const LengthSpread& s) {
  switch (s.kind) {
    case LengthSpread::Kind::kFixed:
      return s.low;
    case LengthSpread::Kind::kUniform:
      return {{"uniform", {s.low, s.high}}};
    case LengthSpread::Kind::kLognormal:
      break;
  }
  return {{"lognormal", {{"median", s.median}, {"sigma", s.sigma}, {"most", s.high}}}};
}

Json WorkloadJson(const LoadOptions& o) {
  Json out{{"requests", o.requests}};
  if (o.rate > 0) {
    out["arrivals"] = {{"poisson_per_s", o.rate}};
  } else {
    out["arrivals"] = {{"users", o.concurrency}, {"ramp_s", o.ramp_s}};
  }
  out["prompt_tokens"] = SpreadJson(o.prompt);
  out["answer_tokens"] = SpreadJson(o.answer);
  out["prefix"] = {
      {"share", o.prefix_share}, {"tokens", o.prefix_tokens}, {"different", o.prefixes}};
  out["text"] = o.text.empty() ? "random words" : "file";
  out["seed"] = o.seed;
  out["temperature"] = o.temperature;
  out["endpoint"] = o.chat ? "chat" : "completions";
  out["ignore_eos"] = o.ignore_eos;
  return out;
}

bool InSlo(const LoadOptions& o, const LoadSample& s) {
  return s.ok() && (o.slo_ttft_s <= 0 || s.ttft_s <= o.slo_ttft_s) &&
         (o.slo_tpot_s <= 0 || s.tpot_s() <= o.slo_tpot_s);
}

}  // namespace

Quantiles Quantiles::Of(std::vector<double> values) {
  Quantiles q;
  q.count = values.size();
  if (values.empty()) return q;
  std::sort(values.begin(), values.end());
  const auto n = static_cast<double>(values.size());
  const auto rank = [&](double p) {
    const auto i = static_cast<std::size_t>(std::ceil(p * n));
    return values[std::clamp<std::size_t>(i, 1, values.size()) - 1];
  };
  for (const double v : values) q.mean += v / n;
  q.p50 = rank(0.5), q.p90 = rank(0.9), q.p99 = rank(0.99), q.max = values.back();
  return q;
}

LoadSummary Summarize(const LoadOptions& o, const LoadRun& run) {
  LoadSummary sum;
  sum.seconds = run.seconds;
  std::vector<double> ttft, shared, tpot, itl, e2e, late;
  for (const LoadSample& s : run.samples) {
    ++sum.sent;
    late.push_back(s.late_s);
    if (!s.ok()) {
      ++sum.errors[s.error];
      continue;
    }
    ++sum.ok;
    if (InSlo(o, s)) ++sum.in_slo;
    sum.prompt_tokens += std::max<std::int64_t>(s.prompt_tokens, 0);
    sum.cached_tokens += std::max<std::int64_t>(s.cached_tokens, 0);
    sum.completion_tokens += s.tokens();
    ttft.push_back(s.ttft_s);
    if (s.shared) shared.push_back(s.ttft_s);
    if (s.tpot_s() >= 0) tpot.push_back(s.tpot_s());
    itl.insert(itl.end(), s.gaps_s.begin(), s.gaps_s.end());
    e2e.push_back(s.end_s);
  }
  sum.ttft = Quantiles::Of(std::move(ttft));
  sum.ttft_shared = Quantiles::Of(std::move(shared));
  sum.tpot = Quantiles::Of(std::move(tpot));
  sum.itl = Quantiles::Of(std::move(itl));
  sum.e2e = Quantiles::Of(std::move(e2e));
  sum.late = Quantiles::Of(std::move(late));
  return sum;
}

Json SummaryJson(const LoadOptions& o, const LoadSummary& s) {
  Json out{
      {"workload", WorkloadJson(o)},
      {"seconds", s.seconds},
      {"requests", {{"sent", s.sent}, {"ok", s.ok}, {"errors", s.errors}}},
      {"tokens",
       {{"prompt", s.prompt_tokens},
        {"cached", s.cached_tokens},
        {"completion", s.completion_tokens}}},
      {"throughput", {{"requests_per_s", s.requests_per_s()}, {"tokens_per_s", s.tokens_per_s()}}}};
  if (o.slo_ttft_s > 0 || o.slo_tpot_s > 0) {
    const auto limit = [](double v) { return v > 0 ? Json(v) : Json(); };
    out["goodput"] = {{"slo_ttft_s", limit(o.slo_ttft_s)},
                      {"slo_tpot_s", limit(o.slo_tpot_s)},
                      {"requests", s.in_slo},
                      {"requests_per_s", s.goodput_per_s()}};
  }
  out["ttft_s"] = QuantilesJson(s.ttft);
  if (s.ttft_shared.count > 0) out["ttft_shared_s"] = QuantilesJson(s.ttft_shared);
  out["tpot_s"] = QuantilesJson(s.tpot);
  out["itl_s"] = QuantilesJson(s.itl);
  out["e2e_s"] = QuantilesJson(s.e2e);
  out["sent_late_s"] = QuantilesJson(s.late);
  return out;
}

}  // namespace k3::serve
