// A load for a server: who asks what and when, and what came of it. docs/serve.md defines the
// figures.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/rng.h"
#include "k3/base/status.h"
#include "k3/serve/http_client.h"
#include "k3/serve/json_out.h"

namespace k3::serve {

/// A distribution of lengths: "N", "uniform:LOW:HIGH" (both included) or
/// "lognormal:MEDIAN:SIGMA" (SIGMA of the natural logarithm; cut at 16 times the median).
struct LengthSpread {
  enum class Kind : std::uint8_t { kFixed, kUniform, kLognormal };
  Kind kind = Kind::kFixed;
  std::int64_t low = 0, high = 0;  // what Draw gives lies within; fixed: equal
  double median = 0, sigma = 0;

  static constexpr std::int64_t kMost = 1 << 20;
  static LengthSpread Fixed(std::int64_t n) { return {Kind::kFixed, n, n, 0, 0}; }
  static Result<LengthSpread> Parse(std::string_view text);
  std::int64_t Draw(Rng& rng) const;
};

struct LoadOptions {
  std::int64_t requests = 64;
  std::int64_t concurrency = 8;  // users that ask, wait for the answer and ask again
  double ramp_s = 0;             // the users begin evenly over so long
  double rate = 0;               // > 0: instead of users, Poisson arrivals, so many a second
  LengthSpread prompt = LengthSpread::Fixed(128), answer = LengthSpread::Fixed(64);
  double prefix_share = 0;         // of the requests, those with one of the shared beginnings
  std::int64_t prefix_tokens = 0;  // of a shared beginning; comes before the drawn prompt length
  std::int64_t prefixes = 1;       // how many different ones
  std::uint64_t seed = 0;
  double temperature = 0;
  bool chat = false;       // /v1/chat/completions instead of /v1/completions
  bool ignore_eos = true;  // answers have the drawn length, whatever the model says
  bool cache_prompt = true;
  std::string model;  // sent when not empty
  std::string key;
  std::string text;                       // where prompts come from; empty: random words
  double slo_ttft_s = 0, slo_tpot_s = 0;  // 0: no such objective
  HttpClientLimits limits;
};
Status CheckLoad(const LoadOptions& options);

/// Where prompts are cut from: tokens when the server can tell them (/tokenize), else words.
struct PromptPool {
  std::vector<TokenId> ids;
  std::vector<std::string> words;  // used when there are no ids; each begins with a blank
  std::size_t size() const { return ids.empty() ? words.size() : ids.size(); }
};

struct PlannedRequest {
  double due_s = 0;                // after the start; users: 0
  std::int64_t prefix = -1;        // which shared beginning
  std::int64_t prompt_tokens = 0;  // without it
  std::int64_t answer_tokens = 0;
};
/// The same options give the same plan.
std::vector<PlannedRequest> PlanLoad(const LoadOptions& options);
/// The pool's words or tokens of request `i`. Two requests of a run begin alike only where they
/// share a beginning on purpose, as long as the pool is larger than the number of requests.
std::string RequestBody(const LoadOptions& options, const PromptPool& pool,
                        const PlannedRequest& request, std::size_t i);

/// What came of one request. Times in seconds; negative: it never happened.
struct LoadSample {
  int status = 0;
  std::string error;    // empty: a complete answer; else one word or two
  bool shared = false;  // had a shared beginning
  double begin_s = 0;   // after the start: when it was due, or its user was free
  double late_s = 0;    // sent so much later than due
  double ttft_s = -1, last_s = -1, end_s = -1;  // after begin_s
  std::vector<double> gaps_s;                   // between parts of the text
  std::int64_t parts = 0;                       // events with text
  std::int64_t prompt_tokens = -1, cached_tokens = -1, completion_tokens = -1;  // as reported

  bool ok() const { return error.empty(); }
  std::int64_t tokens() const { return completion_tokens >= 0 ? completion_tokens : parts; }
  double tpot_s() const;  // negative with fewer than two tokens
};

/// Asks the server for tokens of the text. Without /tokenize there are words.
Result<PromptPool> MakePool(const LoadOptions& options, const HttpTarget& target,
                            const std::atomic<bool>* cancel);

struct LoadRun {
  std::vector<LoadSample> samples;  // in the order of the plan; those never sent are missing
  double seconds = 0;               // from the start to the end of the last answer
};
/// `progress` is told after each answer; may be empty. Cancelled runs give kCancelled.
Result<LoadRun> RunLoad(const LoadOptions& options, const HttpTarget& target,
                        const PromptPool& pool, const std::atomic<bool>* cancel,
                        const std::function<void(std::int64_t)>& progress);

struct Quantiles {
  std::size_t count = 0;
  double mean = 0, p50 = 0, p90 = 0, p99 = 0, max = 0;  // nearest rank
  static Quantiles Of(std::vector<double> values);
};

struct LoadSummary {
  std::int64_t sent = 0, ok = 0, in_slo = 0;
  std::map<std::string, std::int64_t> errors;  // by error
  double seconds = 0;
  std::int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;  // of complete answers
  Quantiles ttft, ttft_shared, tpot, itl, e2e, late;

  double requests_per_s() const { return seconds > 0 ? static_cast<double>(ok) / seconds : 0; }
  double tokens_per_s() const {
    return seconds > 0 ? static_cast<double>(completion_tokens) / seconds : 0;
  }
  double goodput_per_s() const { return seconds > 0 ? static_cast<double>(in_slo) / seconds : 0; }
};
LoadSummary Summarize(const LoadOptions& options, const LoadRun& run);
Json SummaryJson(const LoadOptions& options, const LoadSummary& summary);

}  // namespace k3::serve
