// How long masks take with a vocabulary of the release's size. Prints the figures; processor time,
// so that a busy machine tells less.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <set>

#include "k3/base/rng.h"
#include "k3/grammar/constraint.h"
#include "k3/grammar/test_util.h"

namespace k3::grammar {
namespace {

constexpr std::size_t kVocabulary = 163'840;

double Milliseconds() { return 1e3 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

/// Bytes, punctuation of JSON, numbers up to 999, and made-up words with and without a space.
std::shared_ptr<const VocabularyTrie> LargeVocabulary() {
  std::vector<std::string> texts;
  std::set<std::string> known;
  const auto add = [&](std::string text) {
    if (known.insert(text).second) texts.push_back(std::move(text));
  };
  for (int b = 0; b < 256; ++b) add(std::string(1, static_cast<char>(b)));
  Rng rng(1);
  const auto pick = [&rng](std::string_view from) { return from[rng.Next() % from.size()]; };
  for (int i = 0; i < 1000; ++i) add(std::to_string(i));
  for (int i = 0; i < 3000; ++i) {
    std::string text;
    for (std::size_t n = 2 + rng.Next() % 3; n > 0; --n) text += pick("{}[]\",:. \n\\/-_()<>=");
    add(text);
  }
  while (texts.size() < kVocabulary) {
    std::string text(rng.Next() % 2, ' ');
    const bool wide = rng.Next() % 8 == 0;
    for (std::size_t n = 2 + rng.Next() % 8; n > 0; --n) {
      if (wide) {
        text += {'\xE4', static_cast<char>(0xB8 + rng.Next() % 4),
                 static_cast<char>(0x80 + rng.Next() % 64)};
      } else {
        text += pick("aaeeiioouunnrrsstthdlcmbpgfvkwyzxjqAEST");
      }
    }
    if (rng.Next() % 100 == 0) text += pick("\",:.}");
    add(text);
  }
  return std::make_shared<const VocabularyTrie>(texts);
}

struct Times {
  std::vector<double> all;
  double At(double quantile) {
    std::sort(all.begin(), all.end());
    return all[static_cast<std::size_t>(quantile * static_cast<double>(all.size() - 1))];
  }
};

/// Masks of 10 texts, each at most 80 tokens.
Times Walk(const TokenConstraint& prototype, const VocabularyTrie& vocabulary) {
  Times times;
  Rng rng(2);
  std::vector<std::uint64_t> bits(kVocabulary / 64);
  for (int text = 0; text < 10; ++text) {
    const auto constraint = prototype.Clone();
    for (int n = 0; n < 80 && !constraint->finished(); ++n) {
      const double start = Milliseconds();
      constraint->Allowed(bits);
      times.all.push_back(Milliseconds() - start);
      std::vector<TokenId> ids, closing;
      for (std::size_t i = 0; i < kVocabulary; ++i) {
        if ((bits[i / 64] >> (i % 64) & 1) == 0) continue;
        ids.push_back(static_cast<TokenId>(i));
        const auto bytes = vocabulary.Bytes(ids.back());
        if (bytes == "\"" || bytes == "}" || bytes == "]") closing.push_back(ids.back());
      }
      if (ids.empty()) break;  // only an end may follow
      const auto& from = !closing.empty() && rng.Next() % 4 == 0 ? closing : ids;
      constraint->Accept(from[rng.Next() % from.size()]);
    }
  }
  return times;
}

TEST(Speed, MasksOfALargeVocabulary) {
  const auto vocabulary = LargeVocabulary();
  std::printf("vocabulary: %zu tokens\n", vocabulary->vocab_size());
  const std::pair<const char*, const char*> schemas[] = {
      {"any object", R"({"type":"object"})"},
      {"person", R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer",
          "minimum":0,"maximum":150},"tags":{"type":"array","items":{"type":"string"}},
          "zip":{"pattern":"^[0-9]{5}$"}},"required":["name","age","tags","zip"]})"},
      {"bounded", R"({"type":"object","properties":{"a":{"type":"string","maxLength":50},
          "b":{"type":"string","minLength":1,"maxLength":1000},"c":{"format":"date-time"}},
          "required":["a","b","c"]})"}};
  for (const auto& [name, schema] : schemas) {
    ASSERT_TRUE(CompileJsonSchema(schema, {}, "schema").ok());  // warms up the allocator
    const double start = Milliseconds();
    const auto made = JsonConstraint::FromSchema(schema, {}, vocabulary, {}, "schema");
    const double compile = Milliseconds() - start;
    ASSERT_TRUE(made.ok());
    Times cold = Walk(**made, *vocabulary), warm = Walk(**made, *vocabulary);
    std::printf(
        "%-10s compile %.2f ms; first masks p50 %.3f p99 %.3f max %.2f ms; again p50 %.3f p99 "
        "%.3f ms (processor time)\n",
        name, compile, cold.At(0.5), cold.At(0.99), cold.At(1), warm.At(0.5), warm.At(0.99));
    // With room for sanitizers; usual values are a tenth.
    EXPECT_LT(compile, 50);
    EXPECT_LT(warm.At(0.99), 5);
    EXPECT_LT(cold.At(1), 500);
  }
}

}  // namespace
}  // namespace k3::grammar
