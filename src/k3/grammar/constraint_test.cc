#include "k3/grammar/constraint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "k3/base/rng.h"
#include "k3/grammar/test_util.h"
#include "k3/io/json.h"

namespace k3::grammar {
namespace {

using nlohmann::json;

constexpr TokenId kEos = 1000;  // beyond the vocabularies of these tests

std::vector<TokenId> Ids(std::span<const std::uint64_t> bits) {
  std::vector<TokenId> ids;
  for (std::size_t i = 0; i < bits.size() * 64; ++i) {
    if (bits[i / 64] >> (i % 64) & 1) ids.push_back(static_cast<TokenId>(i));
  }
  return ids;
}

std::vector<TokenId> Ids(TokenConstraint& constraint) {
  std::vector<std::uint64_t> bits(kEos / 64 + 1, ~std::uint64_t{0});
  EXPECT_TRUE(constraint.Allowed(bits));
  return Ids(bits);
}

std::unique_ptr<TokenConstraint> Make(std::string_view schema,
                                      const std::shared_ptr<const VocabularyTrie>& vocabulary,
                                      SchemaOptions options = {}) {
  auto made = JsonConstraint::FromSchema(schema, options, vocabulary, {kEos}, "schema");
  EXPECT_TRUE(made.ok()) << schema << (made.ok() ? "" : made.message());
  return std::move(made).value();
}

/// The part of JSON Schema that the walks use, the plain way.
bool Valid(const json& schema, const json& value, const json& root) {
  if (schema.contains("$ref")) {
    const auto pointer = schema["$ref"].get<std::string>().substr(1);
    return Valid(root[json::json_pointer(pointer)], value, root);
  }
  for (const char* key : {"anyOf", "oneOf"}) {
    if (!schema.contains(key)) continue;
    bool any = false;
    for (const json& s : schema[key]) any = any || Valid(s, value, root);
    if (!any) return false;
  }
  if (schema.contains("enum")) {
    const json& list = schema["enum"];
    if (std::find(list.begin(), list.end(), value) == list.end()) return false;
  }
  if (schema.contains("const") && value != schema["const"]) return false;
  if (schema.contains("type")) {
    const auto type = schema["type"].get<std::string>();
    const bool ok =
        (type == "null" && value.is_null()) || (type == "boolean" && value.is_boolean()) ||
        (type == "integer" && value.is_number_integer()) ||
        (type == "number" && value.is_number()) || (type == "string" && value.is_string()) ||
        (type == "object" && value.is_object()) || (type == "array" && value.is_array());
    if (!ok) return false;
  }
  if (value.is_number()) {
    if (value.get<double>() < schema.value("minimum", -1e300)) return false;
    if (value.get<double>() > schema.value("maximum", 1e300)) return false;
  }
  if (value.is_string()) {
    std::int64_t n = 0;
    for (const char c : value.get<std::string>())
      n += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    if (n < schema.value("minLength", 0) || n > schema.value("maxLength", INT32_MAX)) return false;
  }
  if (value.is_array()) {
    const auto n = static_cast<int>(value.size());
    if (n < schema.value("minItems", 0) || n > schema.value("maxItems", INT32_MAX)) return false;
    for (const json& item : value) {
      if (schema.contains("items") && !Valid(schema["items"], item, root)) return false;
    }
  }
  if (!value.is_object()) return true;
  for (const json& name : schema.value("required", json::array())) {
    if (!value.contains(name)) return false;
  }
  for (const auto& [name, inner] : value.items()) {
    if (schema.contains("properties") && schema["properties"].contains(name)) {
      if (!Valid(schema["properties"][name], inner, root)) return false;
    } else if (schema.contains("additionalProperties")) {
      const json& more = schema["additionalProperties"];
      if (more == false || (more.is_object() && !Valid(more, inner, root))) return false;
    } else if (schema.contains("properties")) {
      return false;  // strict
    }
  }
  return true;
}

const char* const kSchemas[] = {
    R"({"type":"object"})",
    R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer","minimum":0,
        "maximum":150},"tags":{"type":"array","items":{"type":"string","maxLength":5},"maxItems":3},
        "ok":{"type":"boolean"}},"required":["name","tags"]})",
    R"({"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":{"v":{"type":"number",
        "minimum":-10,"maximum":1000},"next":{"anyOf":[{"type":"null"},{"$ref":"#/$defs/node"}]}},
        "required":["v","next"]}}})",
    R"({"type":"array","items":{"anyOf":[{"type":"string","minLength":2},{"enum":["a","ab",12,null]},
        {"type":"array","items":{"type":"integer"},"minItems":1}]},"minItems":1})",
    R"({"anyOf":[{"type":"object","properties":{"k":{"const":"a"},"t":{"type":"string"}},
        "required":["k","t"]},{"type":"object","properties":{"k":{"type":"string"},
        "u":{"type":"number"}},"required":["k","u"]}]})",
    R"({"type":"object","properties":{"a":{"type":"integer"},"ab":{"type":"null"}},
        "additionalProperties":{"type":"boolean"}})",
    R"({"type":"array","minItems":1,"items":{"type":"object","properties":{"x":{"type":"number"}}}})",
    // Around the lengths at which the bounds of a string begin to matter for short and long tokens.
    R"({"type":"string","minLength":30,"maxLength":60})",
    R"({"type":"array","items":{"type":"string","minLength":20},"minItems":1})",
    R"({"type":"object","properties":{"a":{"type":"string","maxLength":18},"b":{"type":"string"}}})",
};

/// Random tokens; after a while those that end something, so that the walk ends.
std::string RandomWalk(TokenConstraint& constraint, const VocabularyTrie& vocabulary, Rng& rng) {
  std::string text;
  for (int n = 0; n < 4000; ++n) {
    const auto ids = Ids(constraint);
    EXPECT_FALSE(ids.empty()) << "a dead end after " << text;
    if (ids.empty()) break;
    TokenId id = ids[rng.Next() % ids.size()];
    const bool may_end = ids.back() == kEos;
    if (n > 30 || rng.Next() % 4 == 0) {
      std::vector<TokenId> closing;
      for (const TokenId t : ids) {
        const std::string_view bytes = vocabulary.Bytes(t);
        if (bytes == "]" || bytes == "}" || bytes == "\"") closing.push_back(t);
      }
      if (!closing.empty()) id = closing[rng.Next() % closing.size()];
      if (may_end) id = kEos;
    }
    EXPECT_TRUE(constraint.Accept(id));
    if (id == kEos) {
      EXPECT_TRUE(constraint.finished());
      EXPECT_TRUE(Ids(constraint).empty());
      EXPECT_FALSE(constraint.Accept(kEos));
      return text;
    }
    text += vocabulary.Bytes(id);
    EXPECT_EQ(constraint.finished(), Ids(constraint) == std::vector<TokenId>{kEos});
  }
  ADD_FAILURE() << "no end: " << text;
  return "";
}

TEST(JsonConstraint, RandomWalksGiveValidJson) {
  Rng rng(7);
  for (const auto& vocabulary : {TinyVocabulary(), JsonVocabulary()}) {
    for (const char* schema : kSchemas) {
      const json parsed = json::parse(schema);
      const auto prototype = Make(schema, vocabulary);
      for (int walk = 0; walk < 50; ++walk) {
        const auto constraint = prototype->Clone();
        const std::string text = RandomWalk(*constraint, *vocabulary, rng);
        // Free keys may repeat, which only the strict parser minds.
        const json value = json::parse(text, nullptr, false);
        ASSERT_FALSE(value.is_discarded()) << schema << "\n" << text;
        EXPECT_TRUE(Valid(parsed, value, parsed)) << schema << "\n" << text;
      }
    }
  }
}

TEST(JsonConstraint, MaskIsWhatAcceptAccepts) {
  Rng rng(11);
  for (const auto& vocabulary : {TinyVocabulary(), JsonVocabulary()}) {
    for (const char* schema : kSchemas) {
      const auto constraint = Make(schema, vocabulary);
      for (int n = 0; n < 60; ++n) {
        const auto ids = Ids(*constraint);
        std::vector<TokenId> accepted;
        for (TokenId id = -2; id <= kEos + 60; ++id) {
          if (constraint->Clone()->Accept(id)) accepted.push_back(id);
        }
        ASSERT_EQ(ids, accepted) << schema;
        TokenId id = ids[rng.Next() % ids.size()];
        if (id == kEos) {
          if (ids.size() == 1) break;
          id = ids[0];
        }
        ASSERT_TRUE(constraint->Accept(id));
      }
    }
  }
}

TEST(JsonConstraint, RefusedTokensChangeNothing) {
  const auto constraint = Make(kSchemas[1], JsonVocabulary());
  const auto before = Ids(*constraint);
  EXPECT_FALSE(constraint->Accept(-1));
  EXPECT_FALSE(constraint->Accept(1 << 30));
  EXPECT_FALSE(constraint->Accept(kEos));
  EXPECT_FALSE(constraint->Accept('x'));
  EXPECT_EQ(Ids(*constraint), before);
}

TEST(JsonConstraint, ClonesAreIndependent) {
  const auto constraint = Make(kSchemas[1], JsonVocabulary());
  const auto accept = [](TokenConstraint& c, std::string_view text) {
    for (const char b : text) ASSERT_TRUE(c.Accept(static_cast<unsigned char>(b))) << text << b;
  };
  accept(*constraint, R"({"name":"x)");
  const auto kept = constraint->Clone();  // then a draft that is rejected
  accept(*constraint, R"(","age":12)");
  EXPECT_NE(Ids(*constraint), Ids(*kept));
  accept(*kept, R"(y","tags":[]})");
  EXPECT_TRUE(kept->finished());
  accept(*constraint, R"(,"tags":[]})");
  EXPECT_TRUE(constraint->finished());
}

TEST(JsonConstraint, EndTokens) {
  const auto vocabulary = JsonVocabulary();
  auto made = JsonConstraint::FromSchema("{\"type\":\"integer\"}", {}, vocabulary, {kEos, 'x', -5},
                                         "schema");
  ASSERT_TRUE(made.ok());
  auto& c = **made;
  EXPECT_FALSE(c.Accept(kEos));
  EXPECT_TRUE(c.Accept('1'));
  EXPECT_FALSE(c.finished());  // 12 is as good
  const auto ids = Ids(c);
  EXPECT_THAT(ids, ::testing::Contains(kEos));
  EXPECT_THAT(ids, ::testing::Contains('x'));  // an ordinary token can be one
  EXPECT_TRUE(c.Clone()->Accept('2'));
  EXPECT_TRUE(c.Accept(kEos));
  EXPECT_TRUE(c.finished());
  EXPECT_FALSE(c.Accept('2'));
}

TEST(JsonConstraint, PaddedAndShortMasks) {
  const auto constraint = Make("{\"type\":\"null\"}", JsonVocabulary());
  std::vector<std::uint64_t> wide(100, ~std::uint64_t{0});
  constraint->Allowed(wide);
  EXPECT_EQ(Ids(wide), (std::vector<TokenId>{'n', 256 + 15}));  // "null" is one token
}

TEST(JsonConstraint, AFreshAutomatonGoesOnTheSame) {
  const auto vocabulary = JsonVocabulary();
  for (const char* schema : kSchemas) {
    auto grammar = CompileJsonSchema(schema, {}, "schema");
    ASSERT_TRUE(grammar.ok());
    auto automaton = std::make_shared<Automaton>(*grammar, vocabulary);
    Rng rng(3);
    Automaton::Place place = automaton->start();
    std::vector<std::uint64_t> a(vocabulary->mask_words()), b(vocabulary->mask_words());
    for (int n = 0; n < 60; ++n) {
      automaton->Mask(place, a);
      Automaton::Place moved = place;
      const auto fresh = automaton->Fresh(moved);
      fresh->Mask(moved, b);
      ASSERT_EQ(a, b) << schema;
      EXPECT_EQ(automaton->MayEnd(place), fresh->MayEnd(moved));
      const auto ids = Ids(a);
      if (ids.empty()) break;
      const auto bytes = vocabulary->Bytes(ids[rng.Next() % ids.size()]);
      place = automaton->Walk(place, bytes);
      if (n % 3 == 0) {
        automaton = fresh;
        place = fresh->Walk(moved, bytes);
      }
    }
  }
}

TEST(Matcher, MemoryIsBounded) {
  // Every length of the string is a place of its own.
  auto grammar = CompileJsonSchema(R"({"type":"string","maxLength":300000})", {}, "schema");
  ASSERT_TRUE(grammar.ok());
  Matcher matcher(std::make_shared<Automaton>(*grammar, JsonVocabulary()));
  std::vector<std::uint64_t> bits(JsonVocabulary()->mask_words());
  ASSERT_TRUE(matcher.Accept('"'));
  std::size_t most = 0;
  for (int i = 0; i < 300'000; ++i) {
    ASSERT_TRUE(matcher.Accept('a' + i % 26));
    if (i % 5000 == 0) matcher.Mask(bits);
    most = std::max(most, matcher.bytes());
  }
  EXPECT_LT(most, Automaton::kMaxBytes + (1u << 20));
  EXPECT_FALSE(matcher.CanAccept('a'));
  EXPECT_TRUE(matcher.Accept('"'));
  EXPECT_FALSE(matcher.MayGoOn());
}

TEST(VocabularyTrie, HasEveryOrdinaryToken) {
  const std::string large(20, 'x');
  const VocabularyTrie trie(
      std::vector<std::string>{"b", "ab", "", "a", "ab", "abc", "b", large, large + "y"});
  std::string path(trie.longest(), ' ');
  std::multimap<std::string, TokenId> found;
  for (const auto& part : trie.parts()) {
    for (const auto& node : part.nodes) {
      path[node.depth] = static_cast<char>(node.byte);
      if (node.token >= 0) found.emplace(path.substr(0, node.depth + 1u), node.token);
    }
  }
  EXPECT_EQ(found, (std::multimap<std::string, TokenId>{{"a", 3},
                                                        {"ab", 1},
                                                        {"ab", 4},
                                                        {"abc", 5},
                                                        {"b", 0},
                                                        {"b", 6},
                                                        {large, 7},
                                                        {large + "y", 8}}));
  EXPECT_EQ(trie.vocab_size(), 9u);
  const auto tiny = TinyVocabulary();
  EXPECT_EQ(tiny->vocab_size(), TinyTokenizer().vocab_size());
  EXPECT_TRUE(tiny->Bytes(*TinyTokenizer().SpecialId("<|open|>")).empty());
}

}  // namespace
}  // namespace k3::grammar
