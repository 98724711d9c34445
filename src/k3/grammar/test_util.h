// Helpers of this module's tests. Not part of the library.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "k3/grammar/automaton.h"
#include "k3/grammar/schema.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::grammar {

inline const Tokenizer& TinyTokenizer() {
  static const Tokenizer tokenizer = [] {
    return std::move(Tokenizer::Load(K3_SOURCE_DIR "/tests/golden/tiny-k3")).value();
  }();
  return tokenizer;
}

/// Its tokens are single bytes and a few longer ones.
inline std::shared_ptr<const VocabularyTrie> TinyVocabulary() {
  static const auto vocabulary = std::make_shared<const VocabularyTrie>(TinyTokenizer());
  return vocabulary;
}

/// Tokens as JSON likes them: all bytes, then pieces that cross the borders of values.
inline std::shared_ptr<const VocabularyTrie> JsonVocabulary() {
  static const auto vocabulary = [] {
    std::vector<std::string> texts;
    for (int b = 0; b < 256; ++b) texts.emplace_back(1, static_cast<char>(b));
    for (const char* piece :
         {"{\"",      "\":",  "\":\"",    "\",\"",   "\"}",        "\"]",      "},{",
          "}}",       "[[",   "]]",       "],",      "{}",         "[]",       "true",
          "false",    "null", "ru",       "12",      "00",         "0.",       "e+",
          "-1",       "\\u",  "\\n",      "\\\"",    "d8",         "the",      " the",
          "name",     "a",    "ab",       "abc",     "\xC3\xA9",   "\xE6\xBC", "\xA2\xE5\xAD",
          "\xF0\x9F", "\": ", ", \"",     "2024",    "-0",         "aaaaaaaa", "\"a\":",
          "1,2",      "1]",   "\"\"",     ":{\"",    ":[",         ">",        "==\"",
          "\">\n",    "call", "argument", " key=\"", "\" type=\"", "string",   "number"}) {
      texts.emplace_back(piece);
    }
    return std::make_shared<const VocabularyTrie>(texts);
  }();
  return vocabulary;
}

/// Whether the whole text belongs to the grammar; byte by byte.
inline bool Matches(const std::shared_ptr<Automaton>& automaton, std::string_view text) {
  Matcher matcher(automaton);
  return matcher.Accept(text) && matcher.MayEnd();
}

inline std::shared_ptr<Automaton> AutomatonOf(std::string_view schema, SchemaOptions options = {}) {
  auto grammar = CompileJsonSchema(schema, options, "schema");
  EXPECT_TRUE(grammar.ok()) << schema << "\n" << (grammar.ok() ? "" : grammar.message());
  if (!grammar.ok()) return nullptr;
  return std::make_shared<Automaton>(*grammar, TinyVocabulary());
}

inline std::string ErrorOf(std::string_view schema, SchemaOptions options = {}) {
  const auto grammar = CompileJsonSchema(schema, options, "schema");
  return grammar.ok() ? "" : grammar.message();
}

}  // namespace k3::grammar
