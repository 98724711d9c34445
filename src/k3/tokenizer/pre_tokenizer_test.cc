#include "k3/tokenizer/pre_tokenizer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "k3/tokenizer/test_util.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

using Pieces = std::vector<std::string>;

Pieces Split(std::string_view text) {
  Pieces out;
  std::size_t at = 0;
  for (const std::string_view piece : SplitPieces(text)) {
    EXPECT_EQ(piece.data(), text.data() + at) << "pieces cover the text in order";
    EXPECT_FALSE(piece.empty());
    at += piece.size();
    out.emplace_back(piece);
  }
  EXPECT_EQ(at, text.size());
  return out;
}

std::vector<std::size_t> PartSizes(std::string_view text) {
  std::vector<std::size_t> out;
  ForEachPart(text, [&out](std::string_view part) { out.push_back(part.size()); });
  return out;
}

TEST(SplitPieces, GoldenRows) {
  const auto golden = ReadJson("tests/cases/tokenizer/golden.json", "cases");
  const auto text = ReadJson("tests/golden/text.json", "text");
  ASSERT_EQ(golden.size(), 29u);
  ASSERT_FALSE(text.empty());
  for (const auto* rows : {&golden, &text}) {
    for (const auto& row : *rows) {
      EXPECT_EQ(Split(row["text"].get<std::string>()), row["pieces"].get<Pieces>()) << row["text"];
    }
  }
}

TEST(SplitPieces, RandomTextsOfAnotherEngine) {
  const auto rows = ReadJson("tests/golden/tokenizer/pieces.json");
  ASSERT_GT(rows.size(), 500u);
  for (const auto& row : rows) {
    std::string text;
    for (const auto& piece : row) text += piece.get<std::string>();
    EXPECT_EQ(Split(text), row.get<Pieces>()) << row;
  }
}

TEST(SplitPieces, Backtracking) {
  EXPECT_EQ(Split("ABc"), (Pieces{"ABc"}));
  EXPECT_EQ(Split("aBC"), (Pieces{"a", "BC"}));
  EXPECT_EQ(Split("ABªCD"), (Pieces{"ABª", "CD"})) << "rule 2 gives C and D back";
  EXPECT_EQ(Split("\u0301ABC"), (Pieces{"\u0301", "ABC"})) << "a mark alone is the lower run";
  EXPECT_EQ(Split("-ABC'S'sx"), (Pieces{"-ABC'S", "'sx"}));
  EXPECT_EQ(Split("   a"), (Pieces{"  ", " a"})) << "rule 7 gives one space back";
  EXPECT_EQ(Split("   1"), (Pieces{"  ", " ", "1"}));
  EXPECT_EQ(Split(" \n \n  x"), (Pieces{" \n \n", " ", " x"}));
}

TEST(SplitPieces, ContractionsFoldCase) {
  EXPECT_EQ(Split("it'ſ so"), (Pieces{"it'ſ", " so"}));
  EXPECT_EQ(Split("it'Ll it'rE it'v it'"), (Pieces{"it'Ll", " it'rE", " it", "'v", " it", "'"}));
  EXPECT_EQ(Split("a'\xC5"), (Pieces{"a", "'", "\xC5"}));
}

TEST(SplitPieces, BytesThatAreNotUtf8AreAlone) {
  EXPECT_EQ(Split("ab\xFF\xFEzz"), (Pieces{"ab", "\xFF", "\xFE", "zz"}));
  EXPECT_EQ(Split("\xE6\xAD"), (Pieces{"\xE6", "\xAD"}));
  EXPECT_EQ(Split("\xED\xA0\x80 x"), (Pieces{"\xED", "\xA0", "\x80", " x"}));
}

TEST(SplitPieces, AsciiShortcutAgreesWithTheTables) {
  // A character's flags decide where a text of it and a probe is cut.
  for (unsigned c = 0; c < 128; ++c) {
    const std::string s(1, static_cast<char>(c));
    const std::uint8_t flags = unicode::ClassOf(c);
    const bool lead = (flags & (unicode::kLetter | unicode::kNumber | unicode::kNewline)) == 0;
    const bool upper = (flags & unicode::kUpper) != 0, lower = (flags & unicode::kLower) != 0;
    EXPECT_EQ(Split(s + "é").size() == 1, lead || upper || lower) << c;
    EXPECT_EQ(Split("é" + s).size() == 1, lower) << c;
    EXPECT_EQ(Split("É" + s).size() == 1, upper || lower) << c;
    EXPECT_EQ(Split("\u00b2" + s).size() == 1, (flags & unicode::kNumber) != 0) << c;
    EXPECT_EQ(Split("\u3000\u3000" + s).size() == 1, (flags & unicode::kSpace) != 0) << c;
  }
}

TEST(UnicodeTables, CountsOfUnicode16) {
  std::size_t han = 0, letter = 0, number = 0, upper = 0, lower = 0, space = 0, newline = 0;
  for (std::uint32_t c = 0; c < 0x110000; ++c) {
    const std::uint8_t f = unicode::ClassOf(c);
    han += f & unicode::kHan ? 1 : 0;
    letter += f & unicode::kLetter ? 1 : 0;
    number += f & unicode::kNumber ? 1 : 0;
    upper += f & unicode::kUpper ? 1 : 0;
    lower += f & unicode::kLower ? 1 : 0;
    space += f & unicode::kSpace ? 1 : 0;
    newline += f & unicode::kNewline ? 1 : 0;
  }
  EXPECT_EQ(han, 99030u);
  EXPECT_EQ(letter, 141028u);
  EXPECT_EQ(number, 1911u);
  EXPECT_EQ(upper, 42584u);
  EXPECT_EQ(lower, 42953u);
  EXPECT_EQ(space, 25u);
  EXPECT_EQ(newline, 2u);
  EXPECT_EQ(unicode::ClassOf(0x180E) & unicode::kSpace, 0);
  EXPECT_EQ(unicode::ClassOf(0x3002) & unicode::kHan, 0) << "Script, not Script_Extensions";
}

TEST(ForEachPart, CutsLikeTheReferenceEncoder) {
  const std::size_t run = kMaxRunChars, part = kMaxPartChars;
  EXPECT_EQ(PartSizes(""), (std::vector<std::size_t>{0}));
  EXPECT_EQ(PartSizes(std::string(run, 'a')), (std::vector<std::size_t>{run}));
  EXPECT_EQ(PartSizes(std::string(run + 1, 'a')), (std::vector<std::size_t>{run, 1}));
  EXPECT_EQ(PartSizes(std::string(run, 'a') + " " + std::string(run, 'b')),
            (std::vector<std::size_t>{2 * run + 1}));
  // The part that ends at a cut holds everything since the last cut, not the run alone.
  EXPECT_EQ(PartSizes("x y" + std::string(2 * run, ' ') + "z"),
            (std::vector<std::size_t>{run + 3, run + 1}));
  // U+001C is white space to Python although not to the pattern.
  EXPECT_EQ(PartSizes(std::string(run, 'a') + "\x1C" + "a"), (std::vector<std::size_t>{run + 2}));
  // Characters count, not bytes.
  std::string han;
  for (std::size_t i = 0; i < run + 1; ++i) han += "世";
  EXPECT_EQ(PartSizes(han), (std::vector<std::size_t>{3 * run, 3}));
  // Every 400000 characters, and counting starts anew there.
  std::string words;
  while (words.size() < part) words += "word ";
  EXPECT_EQ(PartSizes(words + "tail"), (std::vector<std::size_t>{part, 4}));
  const std::string before(part - 10, '.');
  std::string spaced = words.substr(0, part - 10) + std::string(run + 5, 'q');
  EXPECT_EQ(PartSizes(spaced), (std::vector<std::size_t>{part, run - 5}));
}

}  // namespace
}  // namespace k3
