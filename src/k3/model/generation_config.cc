#include "k3/model/generation_config.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "k3/io/json.h"
#include "k3/io/mapped_file.h"

namespace k3 {
namespace {

Status ReadFloat(const JsonReader& r, const char* key, double lo, double hi,
                 std::optional<float>* out) {
  K3_ASSIGN(const auto v, r.OptNumber(key, lo, hi));
  if (v) *out = static_cast<float>(*v);
  return {};
}

}  // namespace

Result<GenerationConfig> ParseGenerationConfig(std::string_view text, std::string_view where,
                                               std::int64_t vocab) {
  K3_ASSIGN(const nlohmann::json root, ParseJson(text, where));
  if (!root.is_object()) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: is {}, expected an object", where, PrintableValue(root))};
  }
  const JsonReader r(root, where);
  GenerationConfig g;
  K3_ASSIGN(g.do_sample, r.OptBool("do_sample"));
  K3_TRY(ReadFloat(r, "temperature", 0, 100, &g.temperature));
  K3_TRY(ReadFloat(r, "top_p", 0, 1, &g.top_p));
  K3_TRY(ReadFloat(r, "min_p", 0, 1, &g.min_p));
  K3_TRY(ReadFloat(r, "repetition_penalty", 1e-6, 100, &g.repetition_penalty));
  K3_ASSIGN(g.top_k, r.OptInt("top_k", -1, std::numeric_limits<std::int32_t>::max()));
  if (g.top_k == -1) g.top_k = 0;
  K3_ASSIGN(g.max_new_tokens, r.OptInt("max_new_tokens", 1, std::int64_t{1} << 40));
  K3_ASSIGN(const auto eos, r.OptIntList("eos_token_id", 0, vocab - 1, true));
  if (eos) {
    for (const auto id : *eos) g.eos.push_back(static_cast<TokenId>(id));
  }
  return g;
}

Result<GenerationConfig> ReadGenerationConfig(const std::string& dir, std::int64_t vocab) {
  const std::string path =
      fmt::format("{}{}generation_config.json", dir, dir.empty() || dir.back() == '/' ? "" : "/");
  const auto text = ReadTextFile(path, std::size_t{1} << 24);
  if (!text.ok()) {
    if (text.error().code == Code::kNotFound) return GenerationConfig();
    return text.error();
  }
  return ParseGenerationConfig(*text, path, vocab);
}

}  // namespace k3
