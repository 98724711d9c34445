#include "k3/serve/drift.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "k3/base/check.h"
#include "k3/io/json.h"

namespace k3::serve {
namespace {

double Sum(const std::vector<double>& v) { return std::accumulate(v.begin(), v.end(), 0.0); }

const char* Name(DriftDetector::State s) {
  switch (s) {
    case DriftDetector::State::kLearning:
      return "learning";
    case DriftDetector::State::kOk:
      return "ok";
    case DriftDetector::State::kAlert:
      break;
  }
  return "alert";
}

/// "counts": kBuckets numbers, not negative, at least one above zero.
Result<std::vector<double>> ReadCounts(const JsonReader& r, const std::string& where) {
  const nlohmann::json* list = r.Find("counts");
  const auto bad = [&where] {
    return Error{Code::kCorrupt,
                 fmt::format("{}: counts: expected {} numbers from 0 to 1e12, not all of them 0",
                             where, DriftDetector::kBuckets)};
  };
  if (list == nullptr || !list->is_array() || list->size() != DriftDetector::kBuckets) return bad();
  std::vector<double> counts;
  for (const nlohmann::json& n : *list) {
    if (!n.is_number()) return bad();
    counts.push_back(n.get<double>());
    if (!(counts.back() >= 0 && counts.back() <= 1e12)) return bad();
  }
  if (!(Sum(counts) > 0)) return bad();
  return counts;
}

}  // namespace

Json BucketsJson(const std::vector<double>& counts) {
  Json list = Json::array();
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) {
      list.push_back({{"from", DriftDetector::LowerBound(i)}, {"count", counts[i]}});
    }
  }
  return list;
}

double JensenShannonBits(const std::vector<double>& a, const std::vector<double>& b) {
  const double na = Sum(a), nb = Sum(b);
  if (!(na > 0) || !(nb > 0)) return 0;
  const double wa = na / (na + nb), wb = nb / (na + nb);
  double bits = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double p = a[i] / na, q = b[i] / nb, m = wa * p + wb * q;
    if (p > 0) bits += wa * p * std::log2(p / m);
    if (q > 0) bits += wb * q * std::log2(q / m);
  }
  return std::max(bits, 0.0);
}

/// 2 ln2 (a + b) JS is about chi-squared with bins - 1 degrees of freedom; its quantile by Wilson
/// and Hilferty.
double JensenShannonNoise(std::size_t bins, double a, double b) {
  if (bins < 2 || !(a + b > 0)) return 0;
  constexpr double kNormal999 = 3.0902;
  const double k = static_cast<double>(bins - 1), t = 2 / (9 * k);
  const double root = 1 - t + kNormal999 * std::sqrt(t);
  return k * root * root * root / (2 * std::log(2.0) * (a + b));
}

double DriftDetector::LowerBound(std::size_t i) {
  return i == 0 ? 0 : std::exp2((static_cast<double>(i) - kZero) / 2);
}

std::size_t DriftDetector::Bucket(double value) {
  if (!(value > 0)) return 0;
  const double place = std::floor(std::log2(value) * 2) + kZero;
  return static_cast<std::size_t>(std::clamp(place, 0.0, static_cast<double>(kBuckets - 1)));
}

void DriftDetector::SetReference(std::vector<double> counts) {
  K3_CHECK(counts.size() == kBuckets, "a reference has one count a bucket");
  reference_ = std::move(counts);
  learned_ = options_.reference;
  state_ = State::kOk;
}

void DriftDetector::Observe(double value) {
  if (!std::isfinite(value)) return;
  const std::size_t bucket = Bucket(value);
  if (learned_ < options_.reference) {
    reference_[bucket] += 1;
    if (++learned_ == options_.reference) state_ = State::kOk;
    return;
  }
  window_[bucket] += 1;
  if (++in_window_ == options_.window) CloseWindow();
}

void DriftDetector::CloseWindow() {
  score_ = JensenShannonBits(reference_, window_);
  std::size_t bins = 0;
  for (std::size_t i = 0; i < kBuckets; ++i) bins += reference_[i] + window_[i] > 0 ? 1u : 0u;
  threshold_ =
      std::max(options_.least_bits, JensenShannonNoise(bins, Sum(reference_), Sum(window_)));
  over_.push_back(score_ > threshold_);
  if (over_.size() > static_cast<std::size_t>(options_.of_windows)) over_.pop_front();
  const auto n = std::count(over_.begin(), over_.end(), true);
  if (n >= options_.alert_at) state_ = State::kAlert;
  if (n <= options_.clear_at) state_ = State::kOk;
  last_ = window_;
  window_.assign(kBuckets, 0);
  in_window_ = 0;
}

void DriftMonitor::Observe(std::string_view signal, std::string_view stratum, double value) {
  const std::lock_guard lock(mutex_);
  std::pair<std::string, std::string> key(signal, stratum);
  detectors_.try_emplace(std::move(key), options_).first->second.Observe(value);
}

std::string_view DriftMonitor::PromptStratum(std::int64_t n) {
  if (n <= 64) return "prompt<=64";
  if (n <= 512) return "prompt<=512";
  return n <= 4096 ? "prompt<=4096" : "prompt>4096";
}

Status DriftMonitor::LoadReference(std::string_view text, std::string_view where) {
  K3_ASSIGN(const nlohmann::json file, ParseJson(text, where));
  if (!file.is_object()) {
    return Error{Code::kCorrupt, fmt::format("{}: found no object at the root", where)};
  }
  const auto list = file.find("references");
  if (list == file.end() || !list->is_array()) {
    return Error{Code::kCorrupt, fmt::format("{}: references: expected a list", where)};
  }
  std::map<std::pair<std::string, std::string>, std::vector<double>> read;
  for (const nlohmann::json& row : *list) {
    const std::string place = fmt::format("{}: references[{}]", where, read.size());
    if (!row.is_object()) return Error{Code::kCorrupt, place + ": expected an object"};
    const JsonReader r(row, place);
    K3_ASSIGN(std::string signal, r.String("signal"));
    K3_ASSIGN(std::string stratum, r.String("stratum"));
    K3_ASSIGN(std::vector<double> counts, ReadCounts(r, place));
    if (!read.emplace(std::pair(std::move(signal), std::move(stratum)), std::move(counts)).second) {
      return Error{Code::kCorrupt, place + ": this signal and stratum stand there twice"};
    }
  }
  const std::lock_guard lock(mutex_);
  for (auto& [key, counts] : read) {
    detectors_.try_emplace(key, options_).first->second.SetReference(std::move(counts));
  }
  return {};
}

std::vector<DriftMonitor::Row> DriftMonitor::rows() const {
  const std::lock_guard lock(mutex_);
  std::vector<Row> out;
  for (const auto& [key, detector] : detectors_) out.push_back({key.first, key.second, detector});
  return out;
}

Json ReferenceJson(const DriftMonitor& monitor) {
  Json list = Json::array();
  for (const DriftMonitor::Row& r : monitor.rows()) {
    if (r.detector.state() == DriftDetector::State::kLearning) continue;
    list.push_back(
        {{"signal", r.signal}, {"stratum", r.stratum}, {"counts", r.detector.reference()}});
  }
  return {{"buckets_from", {{"first", 0}, {"bucket_32", 1}, {"steps_an_octave", 2}}},
          {"references", std::move(list)}};
}

Json AlertsJson(const DriftMonitor& monitor) {
  Json alerts = Json::array(), others = Json::array();
  for (const DriftMonitor::Row& r : monitor.rows()) {
    Json one{{"signal", r.signal},
             {"stratum", r.stratum},
             {"state", Name(r.detector.state())},
             {"distance_bits", r.detector.score()},
             {"threshold_bits", r.detector.threshold()}};
    if (r.detector.state() != DriftDetector::State::kAlert) {
      others.push_back(std::move(one));
      continue;
    }
    one["reference"] = BucketsJson(r.detector.reference());
    one["window"] = BucketsJson(r.detector.last_window());
    alerts.push_back(std::move(one));
  }
  return {{"alerts", std::move(alerts)}, {"watched", std::move(others)}};
}

}  // namespace k3::serve
