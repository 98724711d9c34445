// Schemas that are made to take long, or much memory.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>

#include "k3/grammar/schema.h"
#include "k3/grammar/test_util.h"

namespace k3::grammar {
namespace {

/// Refused or not, within the time.
void ExpectQuick(const std::string& schema, bool accepted, const char* what) {
  const auto start = std::chrono::steady_clock::now();
  const auto grammar = CompileJsonSchema(schema, {.strict = false}, "schema");
  EXPECT_EQ(grammar.ok(), accepted) << what << (grammar.ok() ? "" : grammar.message());
  if (grammar.ok()) {
    Matcher matcher(std::make_shared<Automaton>(*grammar, JsonVocabulary()));
    std::vector<std::uint64_t> mask(JsonVocabulary()->mask_words());
    matcher.Mask(mask);
    matcher.Accept("{\"a");
    matcher.Mask(mask);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  const double limit = 30;  // those take ten times as long
#else
  const double limit = 2;
#endif
  EXPECT_LT(took.count(), limit) << what;
}

TEST(Schema, Limits) {
  std::string deep = R"({"type":"integer"})";
  for (int i = 0; i < 1000; ++i) deep = R"({"type":"array","items":)" + deep + "}";
  ExpectQuick(deep, false, "1,000 deep");

  std::string list;
  for (int i = 0; i < 1'000'000; ++i) list += "\"v" + std::to_string(i * 7919L % 1000003) + "\",";
  list.pop_back();
  ExpectQuick("{\"enum\":[" + list + "]}", false, "10^6 values");

  std::string half;
  for (int i = 0; i < 20'000; ++i) half += "\"v" + std::to_string(i) + "\",";
  half.pop_back();
  ExpectQuick("{\"enum\":[" + half + "]}", true, "20,000 values");

  ExpectQuick(R"({"type":"string","maxLength":2000000000})", true, "huge maxLength");
  ExpectQuick(R"({"type":"string","minLength":2000000000})", true, "huge minLength");
  ExpectQuick(R"({"type":"array","minItems":1000000,"items":{"type":"string","maxLength":99999}})",
              true, "huge minItems");

  // 2^20 combinations.
  std::string all;
  for (int i = 0; i < 20; ++i) {
    const std::string p = fmt::format("p{}", i);
    all += R"({"anyOf":[{"properties":{")" + p + R"(":{"const":1}}},{"properties":{")" + p +
           R"(":{"const":2}}}]},)";
  }
  all.pop_back();
  ExpectQuick("{\"allOf\":[" + all + "]}", false, "exponential allOf");

  // The same name twice as often in each definition.
  std::string defs;
  for (int i = 0; i < 40; ++i) {
    const auto next = "{\"$ref\":\"#/$defs/d" + std::to_string(i + 1) + "\"}";
    defs += "\"d" + std::to_string(i) + "\":{\"anyOf\":[" + next + "," + next + "]},";
  }
  ExpectQuick("{\"$ref\":\"#/$defs/d0\",\"$defs\":{" + defs + "\"d40\":{\"type\":\"object\"}}}",
              true, "2^40 paths");
  std::string merged = defs;
  for (std::size_t at = 0; (at = merged.find("anyOf", at)) != merged.npos;) {
    merged.replace(at, 5, "allOf");
  }
  ExpectQuick("{\"$ref\":\"#/$defs/d0\",\"$defs\":{" + merged + "\"d40\":{\"type\":\"object\"}}}",
              false, "2^40 merges");

  std::string properties;
  for (int i = 0; i < 3000; ++i) properties += "\"property" + std::to_string(i) + "\":{},";
  properties.pop_back();
  ExpectQuick("{\"properties\":{" + properties + "}}", true, "3,000 properties");

  std::string choices;
  for (int i = 0; i < 1000; ++i) {
    choices += R"({"properties":{"a":{"type":"string"},"b)" + std::to_string(i) +
               R"(":{"type":"string"}},"required":["a"]},)";
  }
  choices.pop_back();
  ExpectQuick("{\"anyOf\":[" + choices + "]}", true, "1,000 objects alike");

  ExpectQuick(R"({"pattern":"((a{1000}){1000}){1000}"})", false, "repetitions of repetitions");
  ExpectQuick(R"({"pattern":"^(a|a)*(a|b)*a(a|b){20}$"})", true, "ambiguous");
  ExpectQuick("{\"pattern\":\"" + std::string(100'000, '(') + "\"}", false, "groups");
  ExpectQuick("{\"pattern\":\"" + std::string(40, '(') + "a" + std::string(40, ')') + "\"}", true,
              "40 groups");
  ExpectQuick("{\"properties\":{\"" + std::string(100'000, 'k') + "\":{}}}", false, "long name");
}

}  // namespace
}  // namespace k3::grammar
