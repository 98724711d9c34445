#include "k3/serve/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <iterator>
#include <sstream>
#include <utility>
#include <vector>

#include "k3/base/memory.h"
#include "k3/serve/engine_metrics.h"
#include "k3/serve/telemetry.h"

namespace k3::serve {
namespace {

using prometheus::Family;
using prometheus::Registry;

const prometheus::Histogram::BucketBoundaries kSeconds{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                                                       1,     2.5,  5,     10,   30,  60,   300};
const prometheus::Histogram::BucketBoundaries kTokenSeconds{0.001, 0.0025, 0.005, 0.01, 0.02, 0.04,
                                                            0.08,  0.16,   0.32,  0.64, 1.28};
const prometheus::Histogram::BucketBoundaries kTokens{1,   4,    16,   64,    256,
                                                      512, 1024, 4096, 16384, 65536};

template <class T, class... Args>
Family<T>& Make(Registry& registry, prometheus::detail::Builder<T> (*build)(), const char* name,
                const char* help) {
  return build().Name(name).Help(help).Register(registry);
}

}  // namespace

struct Metrics::Impl {
  Registry registry;
  Family<prometheus::Counter>& http{Make(registry, prometheus::BuildCounter,
                                         "k3_http_requests_total",
                                         "HTTP requests by endpoint and status")};
  Family<prometheus::Histogram>& http_seconds{
      Make(registry, prometheus::BuildHistogram, "k3_http_request_seconds",
           "From a request's arrival to the end of its answer")};
  Family<prometheus::Counter>& jobs{Make(registry, prometheus::BuildCounter, "k3_requests_total",
                                         "Requests for text by how they ended")};
  prometheus::Histogram& ttfo{
      Make(registry, prometheus::BuildHistogram, "k3_ttfo_seconds",
           "From a request's arrival to the first token of its answer, after the reasoning")
          .Add({}, kSeconds)};
  prometheus::Histogram& tpot{
      Make(registry, prometheus::BuildHistogram, "k3_tpot_seconds",
           "Seconds per token after the first one, one value for each request")
          .Add({}, kTokenSeconds)};
  prometheus::Histogram& prompt{Make(registry, prometheus::BuildHistogram,
                                     "k3_request_prompt_tokens", "Tokens of a request's prompts")
                                    .Add({}, kTokens)};
  prometheus::Histogram& completion{Make(registry, prometheus::BuildHistogram,
                                         "k3_request_completion_tokens",
                                         "Tokens generated for a request")
                                        .Add({}, kTokens)};
  Family<prometheus::Gauge>& build{
      Make(registry, prometheus::BuildGauge, "k3_build_info", "Always 1; see the labels")};
  prometheus::Gauge& load{Make(registry, prometheus::BuildGauge, "k3_model_load_seconds",
                               "How long the model took to load")
                              .Add({})};
  prometheus::Gauge& connections{
      Make(registry, prometheus::BuildGauge, "k3_http_connections", "Open connections").Add({})};
  prometheus::Gauge& resident{Make(registry, prometheus::BuildGauge, "k3_process_resident_bytes",
                                   "Resident memory of the process, mapped model files included")
                                  .Add({})};
};

Metrics::Metrics() : impl_(std::make_unique<Impl>()) {}
Metrics::~Metrics() = default;

void Metrics::CountHttp(std::string_view endpoint, int status, double seconds) {
  const std::string name(endpoint);
  impl_->http.Add({{"endpoint", name}, {"status", std::to_string(status)}}).Increment();
  impl_->http_seconds.Add({{"endpoint", name}}, kSeconds).Observe(seconds);
}

void Metrics::CountJob(const JobReport& r) {
  impl_->jobs.Add({{"outcome", r.outcome}}).Increment();
  if (r.first_answer_s >= 0) impl_->ttfo.Observe(r.first_answer_s);
  if (r.first_token_s >= 0 && r.usage.completion_tokens > 1) {
    impl_->tpot.Observe((r.total_s - r.first_token_s) /
                        static_cast<double>(r.usage.completion_tokens - 1));
  }
  impl_->prompt.Observe(static_cast<double>(r.usage.prompt_tokens));
  impl_->completion.Observe(static_cast<double>(r.usage.completion_tokens));
}

void Metrics::SetModel(const BuildLabels& l, double load_seconds) {
  impl_->build
      .Add({{"version", l.version},
            {"model", l.model},
            {"math", l.math},
            {"fingerprint", l.fingerprint}})
      .Set(1);
  impl_->load.Set(load_seconds);
}

std::string Metrics::Page(const ServedModel* model, std::size_t connections) const {
  impl_->connections.Set(static_cast<double>(connections));
  impl_->resident.Set(static_cast<double>(ResidentBytes()));
  auto families = impl_->registry.Collect();
  const auto add = [&families](std::vector<prometheus::MetricFamily> more) {
    families.insert(families.end(), std::make_move_iterator(more.begin()),
                    std::make_move_iterator(more.end()));
  };
  if (model != nullptr) add(EngineFamilies(model->engine->stats()));
  if (model != nullptr && model->telemetry != nullptr) {
    add(TelemetryFamilies(model->telemetry->view()));
  }
  if (model != nullptr && model->drift != nullptr) add(DriftFamilies(*model->drift));
  std::erase_if(families, [](const auto& f) { return f.metric.empty(); });
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return out.str();
}

}  // namespace k3::serve
