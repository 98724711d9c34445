#include "k3/tokenizer/utf8.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "k3/tokenizer/test_util.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

/// Hex of some bytes, and hex of Python's bytes.decode("utf-8", "replace").
const std::pair<const char*, const char*> kReplaced[] = {
    {"", ""},
    {"ff", "efbfbd"},
    {"80", "efbfbd"},
    {"c3", "efbfbd"},
    {"c328", "efbfbd28"},
    {"e6ad", "efbfbd"},
    {"e6ad41", "efbfbd41"},
    {"e08080", "efbfbdefbfbdefbfbd"},
    {"e0a0", "efbfbd"},
    {"e0a041", "efbfbd41"},
    {"e0a08080", "e0a080efbfbd"},
    {"eda080", "efbfbdefbfbdefbfbd"},
    {"edbfbf41", "efbfbdefbfbdefbfbd41"},
    {"f0808080", "efbfbdefbfbdefbfbdefbfbd"},
    {"f09f98", "efbfbd"},
    {"f09f9841", "efbfbd41"},
    {"f09f98c3a9", "efbfbdc3a9"},
    {"f4908080", "efbfbdefbfbdefbfbdefbfbd"},
    {"f5808080", "efbfbdefbfbdefbfbdefbfbd"},
    {"c080", "efbfbdefbfbd"},
    {"c1bf", "efbfbdefbfbd"},
    {"fffe0041", "efbfbdefbfbd0041"},
    {"f09f9880c3", "f09f9880efbfbd"},
    {"61f1808062", "61efbfbd62"},
    {"f0e6ad", "efbfbdefbfbd"},
    {"f0909180", "f0909180"},
    {"c2c2a9", "efbfbdc2a9"},
    {"efbfbd78", "efbfbd78"},
    {"e4bda0e4bd", "e4bda0efbfbd"},
};

TEST(Utf8Stream, EqualsPythonReplaceForEverySplit) {
  for (const auto& [hex, expected] : kReplaced) {
    const std::string bytes = FromHex(hex);
    for (std::size_t step = 1; step <= bytes.size() + 1; ++step) {
      Utf8Stream stream;
      std::string text;
      for (std::size_t at = 0; at < bytes.size(); at += step) {
        text += stream.Push(std::string_view(bytes).substr(at, step));
      }
      text += stream.Finish();
      EXPECT_EQ(ToHex(text), expected) << hex << " in steps of " << step;
      EXPECT_EQ(stream.Finish(), "") << "a finished stream starts anew";
    }
  }
}

TEST(Utf8Stream, GivesACharacterWithItsLastByte) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("\xF0"), "");
  EXPECT_EQ(stream.Push("\x9F\x98"), "");
  EXPECT_EQ(stream.Push(""), "");
  EXPECT_EQ(stream.Push("\x80"), "\xF0\x9F\x98\x80");
  EXPECT_EQ(stream.Push("\xFF"), "\xEF\xBF\xBD") << "can never start a character: at once";
  EXPECT_EQ(stream.Finish(), "");
}

TEST(Utf8Stream, CaseRowsOfTk08) {
  const auto file = ReadJson("tests/cases/tokenizer/stream_bytes.json");
  ASSERT_FALSE(file["rows"].empty());
  for (const auto& row : file["rows"]) {
    Utf8Stream stream;
    std::string text;
    int deltas = 0;
    for (const auto& id : row["ids"]) {
      const std::string delta = stream.Push(std::string(1, static_cast<char>(id.get<int>())));
      deltas += delta.empty() ? 0 : 1;
      text += delta;
    }
    text += stream.Finish();
    EXPECT_EQ(text, row["text"].get<std::string>());
    if (row.contains("deltas")) {
      EXPECT_EQ(deltas, 1) << row["deltas"];
    }
  }
}

TEST(Utf8, DecodesEveryCharacterAndNothingElse) {
  for (std::uint32_t c = 0; c < 0x110000; ++c) {
    const std::string s = ToUtf8(c);
    const bool surrogate = c >= 0xD800 && c < 0xE000;
    const utf8::Char got = utf8::Decode(s);
    ASSERT_EQ(got.kind == utf8::Kind::kValid, !surrogate) << c;
    if (surrogate) continue;
    ASSERT_EQ(got.code_point, c);
    ASSERT_EQ(got.length, s.size());
    ASSERT_EQ(utf8::DecodeValid(s.data()).code_point, c);
  }
}

TEST(Utf8, ValidPrefixStopsAtTheFirstBadByte) {
  for (std::size_t n = 0; n < 40; ++n) {
    const std::string good(n, 'a');
    EXPECT_EQ(utf8::ValidPrefix(good), n);
    EXPECT_EQ(utf8::ValidPrefix(good + "\x80zzzzzzzzzzzz"), n);
    EXPECT_EQ(utf8::ValidPrefix(good + "\xE6\xAD"), n);
    EXPECT_EQ(utf8::ValidPrefix(good + "\xE6\xAD\xA3"), n + 3);
  }
}

}  // namespace
}  // namespace k3
