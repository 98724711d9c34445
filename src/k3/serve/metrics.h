// What /metrics shows (docs/serve.md lists it). Any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "k3/runtime/engine_stats.h"
#include "k3/serve/job.h"

namespace k3::serve {

struct BuildLabels {
  std::string version, model, math, fingerprint;
};

class Metrics {
 public:
  Metrics();
  ~Metrics();

  /// One HTTP request has been answered. `endpoint` comes from the list of routes, never from the
  /// request.
  void CountHttp(std::string_view endpoint, int status, double seconds);
  /// A request for text has ended.
  void CountJob(const JobReport& report);
  void SetModel(const BuildLabels& labels, double load_seconds);

  /// The page in Prometheus's text format. `model` is null while it is loading.
  std::string Page(const ServedModel* model, std::size_t connections) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3::serve
