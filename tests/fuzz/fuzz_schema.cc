// The JSON Schema compiler, and the automaton it makes, on arbitrary schemas. The first byte
// chooses the options; what follows is the schema, or the parameters of a tool.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "k3/base/rng.h"
#include "k3/grammar/constraint.h"
#include "k3/io/json.h"

namespace {

using k3::TokenId;
using namespace k3::grammar;  // NOLINT

constexpr TokenId kEos = 400;

std::shared_ptr<const VocabularyTrie> Vocabulary() {
  static const auto vocabulary = [] {
    std::vector<std::string> texts;
    for (int b = 0; b < 256; ++b) texts.emplace_back(1, static_cast<char>(b));
    for (const char* piece : {"{\"", "\":", "\",\"", "\"}", "},", "]]", "true", "null", "12", "\\u",
                              "aa", "\xC3\xA9", "\"a\":", "\" type=\"", "argument"}) {
      texts.emplace_back(piece);
    }
    return std::make_shared<const VocabularyTrie>(texts);
  }();
  return vocabulary;
}

/// Walks at random: every mask agrees with Accept, and there is no dead end. Returns the text when
/// it came to an end.
std::string Walk(k3::TokenConstraint& constraint, std::uint64_t seed, bool& ended) {
  k3::Rng rng(seed);
  std::vector<std::uint64_t> bits(8);
  std::string text;
  ended = false;
  for (int n = 0; n < 60; ++n) {
    constraint.Allowed(bits);
    std::vector<TokenId> ids;
    for (TokenId id = 0; id < 512; ++id) {
      const auto i = static_cast<std::size_t>(id);
      if ((bits[i / 64] >> (i % 64) & 1) != 0) ids.push_back(id);
    }
    if (ids.empty()) {
      if (!constraint.finished()) __builtin_trap();
      ended = true;
      return text;
    }
    const auto probe = static_cast<TokenId>(rng.Next() % 512);
    const bool in = (bits[static_cast<std::size_t>(probe) / 64] >> (probe % 64) & 1) != 0;
    if (constraint.Clone()->Accept(probe) != in) __builtin_trap();
    const TokenId id = n > 20 ? ids.back() : ids[rng.Next() % ids.size()];
    if (!constraint.Accept(id)) __builtin_trap();
    if (id < 300) text += Vocabulary()->Bytes(id);
  }
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view schema(reinterpret_cast<const char*>(data + 1), size - 1);
  const bool strict = (data[0] & 1) != 0;
  if ((data[0] & 2) != 0) {
    ReplyOptions options;
    options.inside = k3::chat::Section::kResponse;
    options.tools = {{"t", std::string(schema), strict}};
    options.tool_choice = k3::chat::ToolChoice::kRequired;
    auto reply = ReplyConstraint::Create(options, Vocabulary(), {450, 451, 452, 453});
    if (!reply.ok()) return 0;
    bool ended = false;
    Walk(**reply, size, ended);
    return 0;
  }
  SchemaOptions options;
  options.strict = strict;
  options.spacing = (data[0] & 4) != 0 ? Spacing::kSpaced : Spacing::kCompact;
  auto constraint = JsonConstraint::FromSchema(schema, options, Vocabulary(), {kEos}, "fuzz");
  if (!constraint.ok()) {
    if (constraint.message().find('\n') != std::string::npos) __builtin_trap();
    return 0;
  }
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    const auto clone = (*constraint)->Clone();
    bool ended = false;
    const std::string text = Walk(*clone, seed, ended);
    if (ended && !nlohmann::json::accept(text)) __builtin_trap();
  }
  return 0;
}
