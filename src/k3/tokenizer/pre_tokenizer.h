// The Kimi pre-tokenizer: where text is cut before pairs are merged (spec section 12).
#pragma once

#include <cstddef>
#include <string_view>

#include "k3/tokenizer/unicode_tables.h"
#include "k3/tokenizer/utf8.h"

namespace k3 {

/// End of the piece that begins at `begin`; [begin, end) is non-empty valid UTF-8. Looks at most
/// one piece and the run of characters behind it ahead, so scanning a whole text takes linear time.
const char* PieceEnd(const char* begin, const char* end);

/// The reference encoder never matches the pattern against more than this at once: it cuts a text
/// every kMaxPartChars characters, and each of those parts where a run of characters that are all
/// white space or all not (in the sense of Python's str.isspace) passes kMaxRunChars.
inline constexpr std::size_t kMaxPartChars = 400'000;
inline constexpr std::size_t kMaxRunChars = 25'000;

/// str.isspace of Python for one character: White_Space and the four separators U+001C to U+001F.
inline bool IsPythonSpace(std::uint32_t code_point) {
  if (code_point < 0x80) {
    return code_point == 0x20 || (code_point >= 9 && code_point <= 13) ||
           (code_point >= 0x1C && code_point <= 0x1F);
  }
  return (unicode::ClassOf(code_point) & unicode::kSpace) != 0;
}

/// Calls fn(part) for the parts of valid UTF-8 `text` that are matched by themselves.
template <class F>
void ForEachPart(std::string_view text, F&& fn) {
  if (text.size() <= kMaxRunChars) return fn(text);  // characters are never more than bytes
  std::size_t part = 0, chars = 0, run = 0;
  bool run_is_space = false;
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Char c = utf8::DecodeValid(text.data() + at);
    const bool is_space = IsPythonSpace(c.code_point);
    bool cut = false;
    if (chars == kMaxPartChars) {
      cut = true;
      chars = run = 0;
    }
    if (run == 0 || is_space != run_is_space) {
      run = 1;
      run_is_space = is_space;
    } else if (++run > kMaxRunChars) {
      cut = true;
      run = 1;
    }
    if (cut) {
      fn(text.substr(part, at - part));
      part = at;
    }
    ++chars;
    at += c.length;
  }
  fn(text.substr(part));
}

/// Calls on_text(stretch) for every maximal stretch of valid UTF-8 and on_byte(view of one byte)
/// for every byte that is not part of one, in order.
template <class OnText, class OnByte>
void ForEachStretch(std::string_view text, OnText&& on_text, OnByte&& on_byte) {
  while (!text.empty()) {
    const std::size_t valid = utf8::ValidPrefix(text);
    if (valid > 0) on_text(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) return;
    const std::size_t bad = utf8::Decode(text).length;
    for (std::size_t i = 0; i < bad; ++i) on_byte(text.substr(i, 1));
    text.remove_prefix(bad);
  }
}

}  // namespace k3
