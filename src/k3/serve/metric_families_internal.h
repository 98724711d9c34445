// Building Prometheus families from numbers that are counted elsewhere. Internal to serve.
#pragma once

#include <prometheus/metric_family.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "k3/runtime/engine_stats.h"

namespace k3::serve::internal {

/// Puts metric families together.
class Families {
 public:
  /// One value, or with a label several.
  template <class T>
  void Counter(const char* name, const char* help, T value) {
    Begin(name, help, prometheus::MetricType::Counter);
    Value("", "", value);
  }
  template <class T>
  void Gauge(const char* name, const char* help, T value) {
    Begin(name, help, prometheus::MetricType::Gauge);
    Value("", "", value);
  }

  void Begin(const char* name, const char* help, prometheus::MetricType type) {
    prometheus::MetricFamily& f = list.emplace_back();
    f.name = name;
    f.help = help;
    f.type = type;
  }

  template <class T>
  void Value(const char* label, std::string_view text, T value) {
    prometheus::ClientMetric m;
    if (*label != '\0') m.label.push_back({label, std::string(text)});
    m.counter.value = m.gauge.value = static_cast<double>(value);
    list.back().metric.push_back(std::move(m));
  }

  void Distribution(const char* name, const char* help, const k3::Histogram& h) {
    Begin(name, help, prometheus::MetricType::Histogram);
    prometheus::ClientMetric m;
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < h.counts().size(); ++i) {
      sum += h.counts()[i];
      const double bound =
          i < h.bounds().size() ? h.bounds()[i] : std::numeric_limits<double>::infinity();
      m.histogram.bucket.push_back({sum, bound});
    }
    if (m.histogram.bucket.empty()) {
      m.histogram.bucket.push_back({0, std::numeric_limits<double>::infinity()});
    }
    m.histogram.sample_count = h.total();
    m.histogram.sample_sum = h.sum();
    list.back().metric.push_back(std::move(m));
  }

  std::vector<prometheus::MetricFamily> list;
};

}  // namespace k3::serve::internal
