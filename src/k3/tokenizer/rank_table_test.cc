#include "k3/tokenizer/rank_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "k3/tokenizer/special_tokens.h"
#include "k3/tokenizer/test_util.h"

namespace k3 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string RanksError(const std::string& text) {
  const auto result = RankTable::Parse(text, "dir/tiktoken.model");
  if (result.ok()) return "no error";
  EXPECT_THAT(result.message(), StartsWith("dir/tiktoken.model: "));
  EXPECT_EQ(result.message().find('\n'), std::string::npos);
  EXPECT_LT(result.message().size(), 250u);
  return result.message();
}

std::string ConfigError(std::string_view text) {
  const auto result = ParseSpecialTokens(text, 300, "dir/tokenizer_config.json");
  if (result.ok()) return "no error";
  EXPECT_THAT(result.message(), StartsWith("dir/tokenizer_config.json: "));
  EXPECT_EQ(result.message().find('\n'), std::string::npos);
  EXPECT_LT(result.message().size(), 250u);
  return result.message();
}

std::string Named(const std::string& id, const std::string& name) {
  return R"({"added_tokens_decoder":{")" + id + R"(":{"content":")" + name + R"("}}})";
}

TEST(RankTable, FindsTokensAndNothingElse) {
  const std::string text = ByteRanks() + RankLine("ab", 256) + RankLine("abcdefghij", 257) + "\n" +
                           RankLine("abcdefgh", 258);
  const auto table = RankTable::Parse(text, "x");
  ASSERT_TRUE(table.ok()) << table.message();
  EXPECT_EQ(table->size(), 259u);
  EXPECT_EQ(table->Find("ab"), 256);
  EXPECT_EQ(table->FindPair('a', 'b'), 256);
  EXPECT_EQ(table->FindPair('b', 'a'), RankTable::kNone);
  EXPECT_EQ(table->Find("abcdefghij"), 257);
  EXPECT_EQ(table->Find("abcdefgh"), 258);
  EXPECT_EQ(table->Find("abcdefghi"), RankTable::kNone);
  EXPECT_EQ(table->Find("abcdefghijk"), RankTable::kNone);
  EXPECT_EQ(table->Find(std::string(1, '\0')), 0);
  EXPECT_EQ(table->Find(std::string(2, '\0')), RankTable::kNone);
  EXPECT_EQ(table->FindByte(0xFF), 255);
  EXPECT_EQ(table->Bytes(257), "abcdefghij");
}

TEST(RankTable, AnyOrderAndNoLastLineEnd) {
  std::string text = RankLine("zz", 256) + ByteRanks();
  text.pop_back();
  const auto table = RankTable::Parse(text, "x");
  ASSERT_TRUE(table.ok()) << table.message();
  EXPECT_EQ(table->Find("zz"), 256);
}

TEST(RankTable, RefusesWhatIsNotARankFile) {
  EXPECT_THAT(RanksError(""), HasSubstr("the file is empty"));
  EXPECT_THAT(RanksError("\n\n"), HasSubstr("no rank"));
  EXPECT_THAT(RanksError("\xEF\xBB\xBF" + ByteRanks()), HasSubstr("byte order mark"));
  EXPECT_THAT(RanksError("AA== 0\r\nAQ== 1\r\n"), HasSubstr("line 1: line ends in CR LF"));
  EXPECT_THAT(RanksError("AA== 0\nAQ==\n"), HasSubstr("line 2: found \"AQ==\""));
  EXPECT_THAT(RanksError("AA==\t0\n"), HasSubstr("\\x09"));
  EXPECT_THAT(RanksError(std::string("\0\0 0\n", 5)), HasSubstr("\\x00\\x00\" is not base64"));
  EXPECT_THAT(RanksError(std::string(100000, 'A')), HasSubstr("line of 100000 bytes"));
  EXPECT_THAT(RanksError(RankLine(std::string(4097, 'a'), 0)), HasSubstr("token of 4097 bytes"));
}

TEST(RankTable, RefusesBadBase64AndBadNumbers) {
  for (const char* code : {"", "A", "AA", "AAA", "A===", "====", "AA=A",
                           "AB==", "AA==AA==", "A*==", "AAB=", "AA-_", "AAAA="}) {
    EXPECT_THAT(RanksError(std::string(code) + " 0\n"), HasSubstr("is not base64")) << code;
  }
  for (const char* number : {"", "-1", "+1", "1.5", "0x1", " 1", "1 ", "1 2", "4294967296",
                             "99999999999999999999", "1073741824", "one"}) {
    EXPECT_THAT(RanksError("AA== " + std::string(number) + "\n"), HasSubstr("is not a rank"))
        << number;
  }
}

TEST(RankTable, RefusesDuplicatesGapsAndMissingBytes) {
  EXPECT_THAT(RanksError(ByteRanks() + RankLine("ab", 255)), HasSubstr("rank 255 appears twice"));
  EXPECT_THAT(RanksError(ByteRanks() + RankLine("ab", 256) + RankLine("ab", 257)),
              HasSubstr("token \"ab\" has the ranks 256 and 257"));
  EXPECT_THAT(RanksError(ByteRanks() + RankLine("ab", 258)),
              HasSubstr("rank 256 is missing: 257 ranks, the highest is 258"));
  EXPECT_THAT(RanksError(RankLine("a", 1)), HasSubstr("rank 0 is missing"));
  std::string text;
  for (std::size_t b = 0, rank = 0; b < 256; ++b) {
    if (b != 0xC7) text += RankLine(std::string(1, static_cast<char>(b)), rank++);
  }
  EXPECT_THAT(RanksError(text), HasSubstr("the single byte 0xc7 has no rank"));
}

TEST(SpecialTokens, NamesAndReservedSlots) {
  const auto parsed = ParseSpecialTokens(
      R"({"added_tokens_decoder":{"300":{"content":"[BOS]"},"555":{"content":"[PAD]"}},
          "add_bos_token":true,"other":[1,{"x":null}]})",
      300, "x");
  ASSERT_TRUE(parsed.ok()) << parsed.message();
  ASSERT_EQ(parsed->names.size(), 256u);
  EXPECT_EQ(parsed->names[0], "[BOS]");
  EXPECT_EQ(parsed->names[1], "<|reserved_token_301|>");
  EXPECT_EQ(parsed->names[255], "[PAD]");
  EXPECT_TRUE(parsed->add_bos);
  for (const char* text : {"", "{}", R"({"add_bos_token":null,"added_tokens_decoder":null})"}) {
    const auto plain = ParseSpecialTokens(text, 300, "x");
    ASSERT_TRUE(plain.ok()) << text;
    EXPECT_FALSE(plain->add_bos);
    EXPECT_EQ(plain->names[0], "<|reserved_token_300|>");
  }
}

TEST(SpecialTokens, RefusesBadIdsAndNames) {
  EXPECT_THAT(ConfigError(Named("299", "x")), AllOf(HasSubstr("\"299\""), HasSubstr("300..555")));
  EXPECT_THAT(ConfigError(Named("556", "x")), HasSubstr("outside the control tokens"));
  EXPECT_THAT(ConfigError(Named("18446744073709551615", "x")), HasSubstr("outside"));
  for (const char* id : {"", "-1", "0300", "300 ", "3e2", "x", "99999999999999999999999"}) {
    EXPECT_THAT(ConfigError(Named(id, "x")), HasSubstr("is not a token id")) << id;
  }
  EXPECT_THAT(ConfigError(Named("300", "")), HasSubstr("empty \"content\""));
  EXPECT_THAT(ConfigError(Named("300", "<|reserved_token_301|>")), HasSubstr("two control tokens"));
  EXPECT_THAT(ConfigError(R"({"added_tokens_decoder":{"300":{"content":"a"},
                              "301":{"content":"a"}}})"),
              HasSubstr("two control tokens are named \"a\""));
  EXPECT_THAT(ConfigError(R"({"added_tokens_decoder":{"300":"a"}})"), HasSubstr("no text"));
  EXPECT_THAT(ConfigError(R"({"added_tokens_decoder":{"300":{"content":7}}})"),
              HasSubstr("no text"));
  EXPECT_THAT(ConfigError(R"({"added_tokens_decoder":[]})"), HasSubstr("not an object"));
  EXPECT_THAT(ConfigError(R"({"add_bos_token":1})"), HasSubstr("not true or false"));
}

/// Sixteen bytes of the same hash whatever `first` is (the look-up's own hash, inverted): both
/// halves are mixed as (a ^ b * kB) * kA, so the second half can undo what the first did.
std::string SameHash(std::uint64_t first) {
  constexpr std::uint64_t kB = 0x9E3779B97F4A7C15ull, kA = 0xD6E8FEB86659FD93ull;
  std::uint64_t inverse = kB;  // mod 2^64, by Newton's method
  for (int i = 0; i < 6; ++i) inverse *= 2 - kB * inverse;
  std::uint64_t a = 16 * 0xBF58476D1CE4E5B9ull;
  a = (a ^ (first * kB)) * kA;
  a ^= a >> 32;
  const std::uint64_t second = (a ^ 0x0123456789ABCDEFull) * inverse;
  std::string out(16, '\0');
  std::memcpy(out.data(), &first, 8);
  std::memcpy(out.data() + 8, &second, 8);
  return out;
}

TEST(RankTable, TokensOfOneHash) {
  std::string text = ByteRanks();
  for (std::size_t i = 0; i < 3; ++i) text += RankLine(SameHash(i), 256 + i);
  const auto table = RankTable::Parse(text, "x");
  ASSERT_TRUE(table.ok()) << table.message();
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(table->Find(SameHash(i)), static_cast<TokenId>(256 + i));
  }
  EXPECT_EQ(table->Find(SameHash(3)), RankTable::kNone);
  // Thousands of them would make loading quadratic. (Also proves that they do share their hash.)
  for (std::size_t i = 3; i < 5000; ++i) text += RankLine(SameHash(i), 256 + i);
  EXPECT_THAT(RanksError(text), HasSubstr("too many tokens share one hash value"));
}

TEST(SpecialTokens, RefusesHostileJson) {
  EXPECT_THAT(ConfigError("["), HasSubstr("not valid JSON"));
  EXPECT_THAT(ConfigError("{} x"), HasSubstr("not valid JSON"));
  EXPECT_THAT(ConfigError(std::string_view("{}\0x", 4)), HasSubstr("not valid JSON"));
  EXPECT_THAT(ConfigError("{\"a\":\"\xFF\"}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(ConfigError("[]"), HasSubstr("found array at the top"));
  EXPECT_THAT(ConfigError(std::string(1000000, '[')), HasSubstr("nested deeper than 64"));
  EXPECT_THAT(ConfigError(R"({"a":1,"b":{"c":1,"c":2}})"), HasSubstr("\"c\" appears twice"));
  EXPECT_THAT(ConfigError(R"({"added_tokens_decoder":{"300":{"content":"a"},
                              "300":{"content":"b"}}})"),
              HasSubstr("\"300\" appears twice"));
  EXPECT_EQ(ConfigError(R"([{"a":1},{"a":1}])").find("twice"), std::string::npos);
}

}  // namespace
}  // namespace k3
