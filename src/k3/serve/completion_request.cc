#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "k3/serve/generation.h"

namespace k3::serve {
namespace {

using nlohmann::json;

/// Text gets BOS in front where the model wants one; ids are taken as they are.
ApiStatus AddText(const std::string& text, const ServedModel& model, Generation& out) {
  K3_API_TRY(CheckLength(text.size(), model, "prompt"));
  std::vector<TokenId> ids;
  if (model.bos) ids.push_back(*model.bos);
  const auto encoded = model.tokenizer->Encode(text);
  ids.insert(ids.end(), encoded.begin(), encoded.end());
  if (ids.empty()) return BadField("prompt", "expected at least one token");
  out.prompts.push_back(std::move(ids));
  return {};
}

ApiStatus AddIds(const json& list, const ServedModel& model, Generation& out) {
  std::vector<TokenId> ids;
  ids.reserve(list.size());
  for (const json& id : list) {
    if (!id.is_number_integer())
      return BadField("prompt", "expected only token ids in a list of them");
    const bool fits = id.is_number_unsigned() &&
                      id.get<std::uint64_t>() < static_cast<std::uint64_t>(model.vocab);
    if (!fits) {
      return BadField("prompt", fmt::format("found token id {}, expected 0 to {}",
                                            PrintableValue(id), model.vocab - 1));
    }
    ids.push_back(id.get<TokenId>());
  }
  if (ids.empty()) return BadField("prompt", "expected at least one token");
  out.prompts.push_back(std::move(ids));
  return {};
}

ApiStatus AddPrompt(const json& prompt, const ServedModel& model, Generation& out) {
  if (prompt.is_string()) return AddText(prompt.get_ref<const std::string&>(), model, out);
  if (prompt.is_array()) return AddIds(prompt, model, out);
  return BadField("prompt", "expected a string, a list of strings, or token ids");
}

/// A string, a list of strings, a list of ids, or a list of lists of ids.
ApiStatus ReadPrompt(const JsonReader& r, const ServedModel& model, Generation& out) {
  const json* prompt = r.Find("prompt");
  if (prompt == nullptr) return BadField("prompt", "is missing");
  const bool several = prompt->is_array() && !prompt->empty() && !prompt->front().is_number();
  if (!several) return AddPrompt(*prompt, model, out);
  for (const json& one : *prompt) {
    if (static_cast<std::int64_t>(out.prompts.size() + 1) * out.n > kMaxChoices) {
      return BadField("prompt", fmt::format("found {} prompts of n {}, expected at most {} choices",
                                            prompt->size(), out.n, kMaxChoices));
    }
    K3_API_TRY(AddPrompt(one, model, out));
  }
  return {};
}

ApiStatus ReadBestOf(const JsonReader& r, const Generation& g) {
  std::optional<std::int64_t> best_of;
  K3_API_TRY(Take(r.OptInt("best_of", 1, kMaxChoices), "best_of", best_of));
  if (best_of && *best_of != g.n) {
    return BadField(
        "best_of", fmt::format("found {}, expected n ({}): choices are not ranked", *best_of, g.n));
  }
  return {};
}

}  // namespace

ApiStatus ReadCompletion(const json& body, const ServedModel& model, Generation& out) {
  const JsonReader r(body, "request");
  out.prompt_field = "prompt";
  K3_API_TRY(ReadCommonFields(r, model, out));
  K3_API_TRY(ReadBestOf(r, out));
  if (r.Has("suffix")) {
    std::optional<std::string> suffix;
    K3_API_TRY(Take(r.OptString("suffix"), "suffix", suffix));
    if (!suffix->empty()) return BadField("suffix", "inserting text is not supported");
  }
  K3_API_TRY(Take(r.Bool("echo", false), "echo", out.echo));
  // Old clients send false for none.
  if (const json* none = r.Find("logprobs"); none == nullptr || *none != false) {
    K3_API_TRY(Take(r.Int("logprobs", 0, kMaxTopLogprobs, -1), "logprobs", out.top_logprobs));
  }
  std::int64_t max_tokens = 16;
  K3_API_TRY(Take(r.Int("max_tokens", 0, std::numeric_limits<std::int32_t>::max(), 16),
                  "max_tokens", max_tokens));
  out.max_tokens = max_tokens;
  return ReadPrompt(r, model, out);
}

}  // namespace k3::serve
