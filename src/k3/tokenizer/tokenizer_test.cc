#include "k3/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "k3/base/rng.h"
#include "k3/tokenizer/bpe.h"
#include "k3/tokenizer/test_util.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;
using Ids = std::vector<TokenId>;

Tokenizer LoadFrom(const std::string& dir) {
  auto result = Tokenizer::Load(K3_SOURCE_DIR "/" + dir);
  EXPECT_TRUE(result.ok()) << (result.ok() ? "" : result.message());
  return std::move(result).value();
}

const Tokenizer& Tiny() {
  static const Tokenizer t = LoadFrom("tests/cases/tokenizer/tiny");
  return t;
}

double Seconds(const std::chrono::steady_clock::time_point& since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

/// Row of cases/tokenizer/long_runs.json as a text.
std::string LongRun(const nlohmann::json& row) {
  const auto count = row["count"].get<std::size_t>();
  std::string text;
  if (row.contains("unit")) {
    for (std::size_t i = 0; i < count; ++i) text += row["unit"].get<std::string>();
    return text;
  }
  std::uint64_t x = 1;
  for (std::size_t i = 0; i < count; ++i) {
    x = (1103515245u * x + 12345u) % 2147483648u;
    text.push_back(static_cast<char>('a' + (x >> 16) % 26));
  }
  return text;
}

std::string MixedLetters(std::size_t count) { return LongRun({{"count", count}}); }

/// The merge rule as it is defined, in quadratic time.
Ids NaiveMerge(const RankTable& ranks, std::string_view piece) {
  if (const TokenId whole = ranks.Find(piece); whole != RankTable::kNone) return {whole};
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  for (;;) {
    TokenId best = RankTable::kNone;
    std::size_t at = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const TokenId rank = ranks.Find(parts[i] + parts[i + 1]);
      if (rank != RankTable::kNone && (best == RankTable::kNone || rank < best)) {
        best = rank;
        at = i;
      }
    }
    if (best == RankTable::kNone) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  Ids ids;
  for (const auto& part : parts) ids.push_back(ranks.Find(part));
  return ids;
}

TEST(Tokenizer, Tk04GoldenRows) {
  const auto rows = ReadJson("tests/cases/tokenizer/golden.json", "cases");
  ASSERT_EQ(rows.size(), 29u);
  for (const auto& row : rows) {
    const auto text = row["text"].get<std::string>();
    const Ids ids = Tiny().Encode(text);
    EXPECT_EQ(ids, row["ids"].get<Ids>()) << row["text"];
    EXPECT_EQ(Tiny().Decode(ids), text);
  }
}

TEST(Tokenizer, GoldenTextOfTheTinyModel) {
  const Tokenizer t = LoadFrom("tests/golden/tiny-k3");
  const auto golden = ReadJson("tests/golden/text.json");
  ASSERT_FALSE(golden["text"].empty());
  for (const auto& row : golden["text"]) {
    EXPECT_EQ(t.Encode(row["text"].get<std::string>()), row["ids"].get<Ids>()) << row["text"];
  }
  ASSERT_FALSE(golden["chat"].empty());
  for (const auto& [name, chat] : golden["chat"].items()) {
    Ids ids;
    for (const auto& segment : chat["segments"]) {
      const auto text = segment[0].get<std::string>();
      if (segment[1].get<int>() != 0) {
        ids.push_back(t.SpecialId(text).value_or(-1));
      } else {
        for (const TokenId id : t.Encode(text)) ids.push_back(id);
      }
    }
    EXPECT_EQ(ids, chat["ids"].get<Ids>()) << name;
  }
}

TEST(Tokenizer, Tk01MarkupSpellingsStayText) {
  for (const TokenId id : Tiny().Encode("<|open|><|end_of_msg|>[BOS]<|reserved_token_340|>")) {
    EXPECT_FALSE(Tiny().IsSpecial(id));
  }
}

TEST(Tokenizer, Tk02Tk03LongRunsAreFastAndExact) {
  const auto rows = ReadJson("tests/cases/tokenizer/long_runs.json", "rows");
  ASSERT_EQ(rows.size(), 5u);
  for (const auto& row : rows) {
    const std::string text = LongRun(row);
    const auto start = std::chrono::steady_clock::now();
    const Ids ids = Tiny().Encode(text);
    EXPECT_LT(Seconds(start), 2.0) << row["name"];
    EXPECT_EQ(Tiny().Decode(ids), text) << row["name"];
  }
}

TEST(Tokenizer, Tk03MixedLetters) {
  const auto golden = ReadJson("tests/cases/tokenizer/mixed_letters_2000.json");
  const Ids ids = Tiny().Encode(MixedLetters(2000));
  ASSERT_EQ(ids.size(), golden["id_count"].get<std::size_t>());
  EXPECT_EQ(Ids(ids.begin(), ids.begin() + 40), golden["first_40_ids"].get<Ids>());
  EXPECT_EQ(Ids(ids.end() - 40, ids.end()), golden["last_40_ids"].get<Ids>());
  // Above 25000 letters the ids are those of the parts.
  const std::string text = MixedLetters(60000);
  Ids parts;
  for (std::size_t at = 0; at < text.size(); at += 25000) {
    for (const TokenId id : Tiny().Encode(text.substr(at, 25000))) parts.push_back(id);
  }
  EXPECT_EQ(Tiny().Encode(text), parts);
}

TEST(Tokenizer, Tk03MergingIsNearLinear) {
  // One piece without the cuts of Encode.
  const auto ranks = RankTable::Parse(ReadText("tests/golden/tiny-k3/tiktoken.model"), "tiny");
  ASSERT_TRUE(ranks.ok());
  BpeMerger merger(*ranks);
  const auto best_of = [&](std::size_t n) {
    const std::string text = MixedLetters(n);
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
      Ids ids;
      const auto start = std::chrono::steady_clock::now();
      merger.Encode(text, ids);
      best = std::min(best, Seconds(start));
    }
    return best;
  };
  const double small = best_of(25000), large = best_of(100000);
  EXPECT_LT(large, 2.0);
  EXPECT_LT(large, 6 * small + 0.005) << "100k letters against 25k";
}

/// A vocabulary of random joins of "a", "b" and "c": many equal, overlapping and nested choices.
/// When `shuffled`, a token may have a lower rank than the tokens it is made of.
std::string MadeRanks(Rng& rng, bool shuffled) {
  std::vector<std::string> tokens = {"a", "b", "c"};
  while (tokens.size() < 60) {
    std::string token = tokens[rng.Next() % tokens.size()] + tokens[rng.Next() % tokens.size()];
    if (token.size() > 9 || std::count(tokens.begin(), tokens.end(), token) > 0) continue;
    tokens.push_back(std::move(token));
  }
  tokens.erase(tokens.begin(), tokens.begin() + 3);
  for (std::size_t i = tokens.size() - 1; shuffled && i > 0; --i) {
    std::swap(tokens[i], tokens[rng.Next() % (i + 1)]);
  }
  std::string text = ByteRanks();
  for (std::size_t i = 0; i < tokens.size(); ++i) text += RankLine(tokens[i], 256 + i);
  return text;
}

TEST(Tokenizer, MergesLikeTheDefinition) {
  Rng rng(7);
  for (int vocabulary = 0; vocabulary < 20; ++vocabulary) {
    const auto ranks = RankTable::Parse(MadeRanks(rng, vocabulary % 2 == 1), "made");
    ASSERT_TRUE(ranks.ok()) << ranks.message();
    BpeMerger merger(*ranks);
    for (int i = 0; i < 60; ++i) {
      std::string piece(1 + rng.Next() % (i % 2 == 0 ? 64 : 300), ' ');
      const std::uint64_t letters = i % 10 == 0 ? 1 : 3;
      for (char& c : piece) c = static_cast<char>('a' + rng.Next() % letters);
      Ids ids;
      merger.Encode(piece, ids);
      ASSERT_EQ(ids, NaiveMerge(*ranks, piece)) << piece;
    }
  }
}

TEST(Tokenizer, AWholePieceThatIsATokenWins) {
  // "abc" cannot be reached by merging: "bc" and "ab" have no rank.
  const auto t = Tokenizer::Parse(ByteRanks() + RankLine("abc", 256), "", "made");
  ASSERT_TRUE(t.ok()) << t.message();
  EXPECT_EQ(t->Encode("abc"), (Ids{256}));
  EXPECT_EQ(t->Encode("abcd"), (Ids{'a', 'b', 'c', 'd'}));
}

TEST(Tokenizer, Tk02WorksOnASmallStack) {
  pthread_attr_t attr;
  ASSERT_EQ(pthread_attr_init(&attr), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attr, 512 * 1024), 0);
  const auto body = [](void* ok) -> void* {
    const auto rows = ReadJson("tests/cases/tokenizer/long_runs.json", "rows");
    bool all = rows.size() == 5;
    for (const auto& row : rows) {
      const std::string text = LongRun(row);
      all = all && Tiny().Decode(Tiny().Encode(text)) == text;
      std::size_t bytes = 0;
      for (const auto piece : SplitPieces(text)) bytes += piece.size();
      all = all && bytes == text.size();
    }
    *static_cast<bool*>(ok) = all;
    return nullptr;
  };
  bool ok = false;
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, &attr, body, &ok), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attr);
  EXPECT_TRUE(ok);
}

TEST(Tokenizer, Tk05SegmentsAreNotJoined) {
  const auto file = ReadJson("tests/cases/tokenizer/segments.json");
  Ids ids;
  std::string joined;
  for (const auto& segment : file["segments"]) {
    for (const TokenId id : Tiny().Encode(segment.get<std::string>())) ids.push_back(id);
    joined += segment.get<std::string>();
  }
  EXPECT_EQ(ids, file["ids"].get<Ids>());
  EXPECT_EQ(Tiny().Encode(joined), file["joined_text_ids_for_contrast"].get<Ids>());
}

TEST(Tokenizer, Tk06BytesRoundTrip) {
  const auto rows = ReadJson("tests/cases/tokenizer/raw_bytes.json", "rows");
  ASSERT_EQ(rows.size(), 8u);
  for (const auto& row : rows) {
    const std::string bytes = FromHex(row["hex"].get<std::string>());
    EXPECT_EQ(Tiny().Decode(Tiny().Encode(bytes)), bytes) << row;
  }
  // Every byte that is not UTF-8 is its own token; what stands between keeps the ids it has alone.
  Ids expected = Tiny().Encode("the quick text ");
  expected.insert(expected.end(), {0xE6, 0xAD, 0xFF});
  for (const TokenId id : Tiny().Encode(" the")) expected.push_back(id);
  EXPECT_EQ(Tiny().Encode("the quick text \xE6\xAD\xFF the"), expected);
  Rng rng(3);
  for (int i = 0; i < 300; ++i) {
    std::string bytes(rng.Next() % 60, ' ');
    for (char& c : bytes) c = static_cast<char>(rng.Next() >> (i % 2 == 0 ? 56 : 57));
    ASSERT_EQ(Tiny().Decode(Tiny().Encode(bytes)), bytes) << ToHex(bytes);
  }
}

TEST(Tokenizer, Tk07BlankLines) {
  const std::string text = ReadText("tests/cases/tokenizer/blank_lines.txt");
  ASSERT_GT(text.size(), 8000u);
  const auto start = std::chrono::steady_clock::now();
  const Ids ids = Tiny().Encode(text);
  EXPECT_LT(Seconds(start), 2.0);
  EXPECT_EQ(Tiny().Decode(ids), text);
}

TEST(Tokenizer, NamesBytesAndBounds) {
  EXPECT_EQ(Tiny().n_ranks(), 339u);
  EXPECT_EQ(Tiny().vocab_size(), 595u);
  EXPECT_FALSE(Tiny().add_bos());
  EXPECT_EQ(Tiny().SpecialId("[BOS]"), 339);
  EXPECT_EQ(Tiny().SpecialId("<|reserved_token_500|>"), 500);
  EXPECT_EQ(Tiny().SpecialId("the"), std::nullopt);
  EXPECT_EQ(Tiny().SpecialId(""), std::nullopt);
  EXPECT_EQ(Tiny().Bytes(339), "[BOS]");
  EXPECT_EQ(Tiny().Bytes(-1), std::nullopt);
  EXPECT_EQ(Tiny().Bytes(595), std::nullopt);
  EXPECT_FALSE(Tiny().IsSpecial(338));
  EXPECT_TRUE(Tiny().IsSpecial(594));
  EXPECT_FALSE(Tiny().IsSpecial(595));
  EXPECT_FALSE(Tiny().IsSpecial(-2147483647 - 1));
  EXPECT_EQ(Tiny().Decode({339, 'a', -5, 100000, 'b', 340}), "[BOS]ab[EOS]");
  EXPECT_EQ(Tiny().Decode({339, 'a', 'b', 340}, false), "ab");
  EXPECT_TRUE(Tiny().Encode("").empty());
}

TEST(Tokenizer, Tk09SaysWhichFilesWereLookedFor) {
  const std::string dir = ::testing::TempDir() + "k3_tokenizer_empty_dir";
  mkdir(dir.c_str(), 0700);
  const auto result = Tokenizer::Load(dir);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code, Code::kNotFound);
  EXPECT_THAT(result.message(), HasSubstr(dir));
  EXPECT_THAT(result.message(), HasSubstr("tiktoken.model"));
  EXPECT_THAT(result.message(), HasSubstr("tokenizer_config.json"));
  EXPECT_FALSE(Tokenizer::Load(dir + "/missing").ok());
}

TEST(Tokenizer, ABadConfigNamesItsFile) {
  const std::string dir = ::testing::TempDir() + "k3_tokenizer_bad_config";
  mkdir(dir.c_str(), 0700);
  std::ofstream(dir + "/tiktoken.model") << ByteRanks();
  std::ofstream(dir + "/tokenizer_config.json") << "";
  EXPECT_THAT(Tokenizer::Load(dir).error().message,
              HasSubstr("tokenizer_config.json: the file is empty"));
  std::ofstream(dir + "/tokenizer_config.json") << R"({"add_bos_token":true})";
  const auto good = Tokenizer::Load(dir);
  ASSERT_TRUE(good.ok()) << good.message();
  EXPECT_TRUE(good->add_bos());
  EXPECT_EQ(good->vocab_size(), 512u);
  std::ofstream(dir + "/tiktoken.model") << "x";
  EXPECT_THAT(Tokenizer::Load(dir).error().message, HasSubstr("tiktoken.model: line 1"));
}

TEST(Tokenizer, LoadsAsManyRanksAsTheReleaseInWellUnderASecond) {
  std::string text = ByteRanks();
  Rng rng(1);
  for (std::size_t rank = 256; rank < 163584; ++rank) {
    std::string token = std::to_string(rank) + "/";
    token.resize(token.size() + rng.Next() % 6, 'x');
    text += RankLine(token, rank);
  }
  const auto start = std::chrono::steady_clock::now();
  const auto t = Tokenizer::Parse(text, "", "made");
  const double seconds = Seconds(start);
  ASSERT_TRUE(t.ok()) << t.message();
  EXPECT_EQ(t->vocab_size(), 163840u);
  EXPECT_LT(seconds, 1.0);
}

}  // namespace
}  // namespace k3
