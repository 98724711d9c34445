#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "k3/serve/generation.h"
#include "k3/tokenizer/utf8.h"

namespace k3::serve {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxInt = std::numeric_limits<std::int64_t>::max();

std::uint64_t RandomSeed() {
  thread_local std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

ApiStatus ReadNumber(const JsonReader& r, const char* key, double lo, double hi, double& out) {
  std::optional<double> value;
  K3_API_TRY(Take(r.OptNumber(key, lo, hi), key, value));
  if (value) out = *value;
  return {};
}

ApiStatus ReadSamplingNumbers(const JsonReader& r, SamplingParams& p) {
  K3_API_TRY(ReadNumber(r, "temperature", 0, 2, p.temperature));
  K3_API_TRY(ReadNumber(r, "top_p", 0, 1, p.top_p));
  K3_API_TRY(ReadNumber(r, "min_p", 0, 1, p.min_p));
  K3_API_TRY(ReadNumber(r, "frequency_penalty", -2, 2, p.frequency_penalty));
  K3_API_TRY(ReadNumber(r, "presence_penalty", -2, 2, p.presence_penalty));
  K3_API_TRY(ReadNumber(r, "repetition_penalty", 0.01, 100, p.repetition_penalty));
  std::optional<std::int64_t> top_k;
  K3_API_TRY(Take(r.OptInt("top_k", -1, kMaxInt), "top_k", top_k));
  if (top_k) p.top_k = *top_k < 0 ? 0 : *top_k;
  std::optional<std::int64_t> seed;
  K3_API_TRY(
      Take(r.OptInt("seed", std::numeric_limits<std::int64_t>::min(), kMaxInt), "seed", seed));
  p.seed = seed ? static_cast<std::uint64_t>(*seed) : RandomSeed();
  return {};
}

ApiStatus ReadLogitBias(const JsonReader& r, std::int64_t vocab, SamplingParams& p) {
  const json* biases = r.Find("logit_bias");
  if (biases == nullptr) return {};
  if (!biases->is_object()) return BadField("logit_bias", "expected an object");
  for (const auto& [key, value] : biases->items()) {
    std::int64_t id = 0;
    const auto parsed = std::from_chars(key.data(), key.data() + key.size(), id);
    const bool whole = parsed.ec == std::errc() && parsed.ptr == key.data() + key.size();
    if (!whole || id < 0 || id >= vocab) {
      return BadField("logit_bias", fmt::format("found token id \"{}\", expected 0 to {}",
                                                Printable(key), vocab - 1));
    }
    if (!value.is_number() || !(std::abs(value.get<double>()) <= 100)) {
      return BadField("logit_bias", fmt::format("found {} for token {}, expected -100 to 100",
                                                PrintableValue(value), id));
    }
    p.logit_bias[static_cast<TokenId>(id)] = value.get<double>();
  }
  return {};
}

ApiStatus ReadStreamOptions(const JsonReader& r, Generation& g) {
  K3_API_TRY(Take(r.Bool("stream", false), "stream", g.stream));
  std::optional<JsonReader> options;
  auto found = r.Object("stream_options");
  if (!found.ok()) return BadField("stream_options", "expected an object");
  if (!found->has_value()) return {};
  if (!g.stream) return BadField("stream_options", "only with stream true");
  return Take((*found)->Bool("include_usage", false), "stream_options", g.include_usage);
}

}  // namespace

ApiStatus ParseBody(std::string_view body, json& out) {
  auto parsed = ParseJson(body, "request");
  if (!parsed.ok()) {
    ApiError e;
    e.message = parsed.message();
    e.code = "invalid_json";
    return e;
  }
  if (!parsed->is_object()) return BadField("", "request: expected a JSON object");
  out = std::move(parsed).value();
  return {};
}

ApiStatus CheckLength(std::size_t text_bytes, const ServedModel& model, const char* field) {
  if (model.longest_token == 0) return {};
  const auto tokens =
      static_cast<std::int64_t>((text_bytes + model.longest_token - 1) / model.longest_token);
  if (tokens <= model.context) return {};
  return TooLong(tokens, true, model, field);
}

ApiError TooLong(std::int64_t tokens, bool at_least, const ServedModel& model, const char* field) {
  ApiError e;
  e.message = fmt::format("the prompt has {}{} tokens, but the context only {}",
                          at_least ? "at least " : "", tokens, model.context);
  e.param = field;
  e.code = "context_length_exceeded";
  return e;
}

ApiStatus ReadStops(const JsonReader& r, const char* key, std::vector<std::string>& out) {
  const json* value = r.Find(key);
  if (value == nullptr) return {};
  const json list = value->is_string() ? json::array({*value}) : *value;
  if (!list.is_array()) return BadField(key, "expected a string or a list of strings");
  if (list.size() > kMaxStops) {
    return BadField(key,
                    fmt::format("found {} strings, expected at most {}", list.size(), kMaxStops));
  }
  for (const json& stop : list) {
    if (!stop.is_string()) return BadField(key, "expected a string or a list of strings");
    const auto& text = stop.get_ref<const std::string&>();
    if (text.empty() || text.size() > kMaxStopBytes) {
      return BadField(key, fmt::format("found a string of {} bytes, expected 1 to {}", text.size(),
                                       kMaxStopBytes));
    }
    out.push_back(text);
  }
  return {};
}

ApiStatus ReadCommonFields(const JsonReader& r, const ServedModel& model, Generation& g) {
  g.sampling = model.defaults;
  K3_API_TRY(ReadSamplingNumbers(r, g.sampling));
  K3_API_TRY(ReadLogitBias(r, model.vocab, g.sampling));
  K3_API_TRY(Take(r.Int("n", 1, kMaxChoices, 1), "n", g.n));
  K3_API_TRY(ReadStops(r, "stop", g.stop));
  K3_API_TRY(ReadStreamOptions(r, g));
  std::int64_t priority = 0;
  K3_API_TRY(Take(r.Int("priority", -100, 100, 0), "priority", priority));
  g.priority = static_cast<int>(priority);
  K3_API_TRY(Take(r.OptNumber("timeout", 0.001, 86400), "timeout", g.timeout_s));
  K3_API_TRY(
      Take(r.Int("id_slot", -1, std::numeric_limits<std::int32_t>::max(), -1), "id_slot", g.slot));
  K3_API_TRY(Take(r.Bool("ignore_eos", false), "ignore_eos", g.ignore_eos));
  return Take(r.Bool("cache_prompt", true), "cache_prompt", g.prefix_cache);
}

}  // namespace k3::serve
