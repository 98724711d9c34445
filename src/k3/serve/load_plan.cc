#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>

#include "k3/serve/load.h"

namespace k3::serve {
namespace {

template <class T>
bool ReadAll(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

/// Exponential with mean 1.
double Exponential(Rng& rng) { return -std::log1p(-rng.Uniform()); }

double Normal(Rng& rng) {
  const double radius = std::sqrt(2 * Exponential(rng));
  return radius * std::cos(2 * std::numbers::pi * rng.Uniform());
}

/// Steps through a pool so that requests begin at different places, and each at all of them.
std::size_t Stride(std::size_t size) {
  std::size_t stride = size * 618 / 1000 + 1;
  const auto common = [size](std::size_t a) {
    std::size_t b = size;
    while (a != 0) {
      const std::size_t rest = b % a;
      b = a;
      a = rest;
    }
    return b;
  };
  while (common(stride) != 1) ++stride;
  return stride;
}

std::size_t Place(std::size_t i, std::size_t size) { return i % size * Stride(size) % size; }

void Append(const PromptPool& pool, std::size_t begin, std::int64_t n, Json& ids,
            std::string& text) {
  for (std::int64_t k = 0; k < n; ++k) {
    const std::size_t at = (begin + static_cast<std::size_t>(k)) % pool.size();
    if (pool.ids.empty()) {
      text += pool.words[at];
    } else {
      ids.push_back(pool.ids[at]);
    }
  }
}

}  // namespace

Result<LengthSpread> LengthSpread::Parse(std::string_view text) {
  const auto bad = [text] {
    return Error{Code::kInvalidArgument,
                 fmt::format("found \"{}\", expected N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA "
                             "with lengths from 1 to {} and SIGMA from 0 to 4",
                             text, kMost)};
  };
  const auto in_range = [](std::int64_t n) { return n >= 1 && n <= kMost; };
  LengthSpread s;
  if (text.find(':') == text.npos) {
    if (!ReadAll(text, s.low) || !in_range(s.low)) return bad();
    return Fixed(s.low);
  }
  const std::string_view kind = text.substr(0, text.find(':'));
  std::string_view rest = text.substr(kind.size() + 1);
  const std::size_t colon = rest.find(':');
  if (colon == rest.npos) return bad();
  const std::string_view first = rest.substr(0, colon), second = rest.substr(colon + 1);
  if (!ReadAll(first, s.low) || !in_range(s.low)) return bad();
  if (kind == "uniform") {
    s.kind = Kind::kUniform;
    if (!ReadAll(second, s.high) || !in_range(s.high) || s.high < s.low) return bad();
    return s;
  }
  if (kind != "lognormal" || !ReadAll(second, s.sigma) || !(s.sigma >= 0 && s.sigma <= 4)) {
    return bad();
  }
  s.kind = Kind::kLognormal;
  s.median = static_cast<double>(s.low);
  s.high = std::min(kMost, 16 * s.low);
  s.low = 1;
  return s;
}

std::int64_t LengthSpread::Draw(Rng& rng) const {
  switch (kind) {
    case Kind::kFixed:
      return low;
    case Kind::kUniform:
      return low + static_cast<std::int64_t>(rng.Uniform() * static_cast<double>(high - low + 1));
    case Kind::kLognormal:
      break;
  }
  const double value = std::round(median * std::exp(sigma * Normal(rng)));
  return static_cast<std::int64_t>(
      std::clamp(value, static_cast<double>(low), static_cast<double>(high)));
}

Status CheckLoad(const LoadOptions& o) {
  const auto bad = [](std::string message) {
    return Error{Code::kInvalidArgument, std::move(message)};
  };
  if (o.requests < 1)
    return bad(fmt::format("requests: found {}, expected at least 1", o.requests));
  if (o.rate <= 0 && o.concurrency < 1) return bad("neither users nor a rate of arrivals");
  if (o.prefixes < 1 || o.prefix_tokens < 0) return bad("shared beginnings: negative or none");
  if (o.prefix_share > 0 && o.prefix_tokens == 0) {
    return bad("a share of requests with a common beginning needs its length");
  }
  return {};
}

std::vector<PlannedRequest> PlanLoad(const LoadOptions& o) {
  // Streams of their own: other lengths leave the arrivals as they are.
  Rng arrivals(o.seed ^ 0x61), lengths(o.seed ^ 0x62), shares(o.seed ^ 0x63);
  std::vector<PlannedRequest> plan(static_cast<std::size_t>(o.requests));
  double now = 0;
  for (PlannedRequest& r : plan) {
    if (o.rate > 0) now += Exponential(arrivals) / o.rate;
    r.due_s = now;
    r.prompt_tokens = o.prompt.Draw(lengths);
    r.answer_tokens = o.answer.Draw(lengths);
    const bool shared = o.prefix_tokens > 0 && shares.Uniform() < o.prefix_share;
    const double which = shares.Uniform() * static_cast<double>(o.prefixes);
    if (shared) r.prefix = static_cast<std::int64_t>(which);
  }
  return plan;
}

std::string RequestBody(const LoadOptions& o, const PromptPool& pool, const PlannedRequest& r,
                        std::size_t i) {
  Json ids = Json::array();
  std::string text;
  // Beginnings count from the far end, so that none is also the start of an early request.
  if (r.prefix >= 0) {
    const std::size_t back = static_cast<std::size_t>(r.prefix) % pool.size();
    Append(pool, Place(pool.size() - 1 - back, pool.size()), o.prefix_tokens, ids, text);
  }
  Append(pool, Place(i, pool.size()), r.prompt_tokens, ids, text);
  Json body = Json::object();
  if (o.chat) {
    body["messages"] = {{{"role", "user"}, {"content", text}}};
  } else {
    body["prompt"] = pool.ids.empty() ? Json(text) : std::move(ids);
  }
  if (!o.model.empty()) body["model"] = o.model;
  body[o.chat ? "max_completion_tokens" : "max_tokens"] = r.answer_tokens;
  body["temperature"] = o.temperature;
  body["seed"] = (o.seed + i) & 0x7fffffff;
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  if (o.ignore_eos) body["ignore_eos"] = true;
  if (!o.cache_prompt) body["cache_prompt"] = false;
  return Dump(body);
}

}  // namespace k3::serve
