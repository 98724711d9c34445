#include "k3/tokenizer/pre_tokenizer.h"

#include <array>
#include <cstdint>
#include <vector>

#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

using unicode::kHan;
using unicode::kLetter;
using unicode::kLower;
using unicode::kNewline;
using unicode::kNumber;
using unicode::kSpace;
using unicode::kUpper;

constexpr std::array<std::uint8_t, 128> MakeAscii() {
  std::array<std::uint8_t, 128> t{};
  for (std::size_t c = 'A'; c <= 'Z'; ++c) t[c] = kLetter | kUpper;
  for (std::size_t c = 'a'; c <= 'z'; ++c) t[c] = kLetter | kLower;
  for (std::size_t c = '0'; c <= '9'; ++c) t[c] = kNumber;
  for (std::size_t c = 9; c <= 13; ++c) t[c] = kSpace;
  t['\n'] = t['\r'] = kSpace | kNewline;
  t[' '] = kSpace;
  return t;
}
constexpr std::array<std::uint8_t, 128> kAscii = MakeAscii();

struct Seen {
  std::uint8_t flags;  // 0x80 stands for the end of the text: no class has it
  std::uint8_t length;
};
constexpr std::uint8_t kEnd = 0x80;

class Scanner {
 public:
  Scanner(const char* begin, const char* end) : begin_(begin), end_(end) {}

  const char* Piece() const {
    const Seen first = At(begin_);
    if ((first.flags & kHan) != 0) return Run(begin_, kHan);                       // rule 1
    if (const char* word = Word(first); word != nullptr) return word;              // rules 2 and 3
    if ((first.flags & kNumber) != 0) return Digits();                             // rule 4
    if (const char* symbols = Symbols(first); symbols != nullptr) return symbols;  // rule 5
    return Spaces();                                                               // rules 6 to 8
  }

 private:
  Seen At(const char* p) const {
    if (p == end_) return {kEnd, 0};
    const auto byte = static_cast<unsigned char>(*p);
    if (byte < 0x80) return {kAscii[byte], 1};
    const utf8::Char c = utf8::DecodeValid(p);
    return {unicode::ClassOf(c.code_point), c.length};
  }

  /// End of the run of characters that have one of `flags`.
  const char* Run(const char* p, std::uint8_t flags) const {
    for (Seen c = At(p); (c.flags & flags) != 0; c = At(p)) p += c.length;
    return p;
  }

  /// Rules 2 and 3: an optional lead, then upper* lower+ or else upper+ lower*.
  /// A failing "upper* lower+" gives characters back until one it gave back can be the lower+; that
  /// is the last character of the upper run that is in both classes.
  const char* Word(Seen first) const {
    const bool lead_allowed = (first.flags & (kLetter | kNumber | kNewline)) == 0;
    const char* start = lead_allowed ? begin_ + first.length : begin_;
    const char* last_both = nullptr;  // end of the last such character
    const char* p = start;
    Seen c = At(p);
    for (; (c.flags & kUpper) != 0; c = At(p)) {
      p += c.length;
      if ((c.flags & kLower) != 0) last_both = p;
    }
    if ((c.flags & kLower) != 0) return Contraction(Run(p, kLower));
    if (last_both != nullptr) return Contraction(last_both);
    // The same without the lead: only a mark can be both a lead and a word by itself.
    if (lead_allowed && (first.flags & kLower) != 0) return Contraction(start);
    if (p != start) return Contraction(p);
    return nullptr;
  }

  /// Rules 2 and 3 end in an optional 's 't 're 've 'm 'll 'd of any case. Besides the ASCII
  /// letters only U+017F, the long s, folds to one of these.
  const char* Contraction(const char* p) const {
    if (end_ - p < 2 || *p != '\'') return p;
    const auto lower = [](char c) {
      return c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
    };
    const char a = lower(p[1]);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 2;
    if (end_ - p < 3) return p;
    const char b = lower(p[2]);
    if ((b == 'e' && (a == 'r' || a == 'v')) || (b == 'l' && a == 'l')) return p + 3;
    if (p[1] == '\xC5' && p[2] == '\xBF') return p + 3;
    return p;
  }

  const char* Digits() const {
    const char* p = begin_;
    for (int i = 0; i < 3; ++i) {
      const Seen c = At(p);
      if ((c.flags & kNumber) == 0) break;
      p += c.length;
    }
    return p;
  }

  /// Rule 5: an optional U+0020, one or more symbols, then any line ends.
  const char* Symbols(Seen first) const {
    const char* start = *begin_ == ' ' ? begin_ + first.length : begin_;
    const char* p = start;
    constexpr std::uint8_t kNot = kSpace | kLetter | kNumber | kEnd;
    for (Seen c = At(p); (c.flags & kNot) == 0; c = At(p)) p += c.length;
    return p == start ? nullptr : Run(p, kNewline);
  }

  /// Rules 6 to 8: up to the last line end of the run; else the run, less its last character when
  /// something follows that it could be the lead of.
  const char* Spaces() const {
    const char* p = begin_;
    const char* last = begin_;
    const char* line_end = nullptr;
    for (Seen c = At(p); (c.flags & kSpace) != 0; c = At(p)) {
      last = p;
      p += c.length;
      if ((c.flags & kNewline) != 0) line_end = p;
    }
    if (line_end != nullptr) return line_end;
    return p == end_ || last == begin_ ? p : last;
  }

  const char* begin_;
  const char* end_;
};

}  // namespace

const char* PieceEnd(const char* begin, const char* end) { return Scanner(begin, end).Piece(); }

std::vector<std::string_view> SplitPieces(std::string_view text) {
  std::vector<std::string_view> pieces;
  const auto on_text = [&pieces](std::string_view stretch) {
    const char* end = stretch.data() + stretch.size();
    for (const char* p = stretch.data(); p != end;) {
      const char* q = PieceEnd(p, end);
      pieces.emplace_back(p, static_cast<std::size_t>(q - p));
      p = q;
    }
  };
  ForEachStretch(text, on_text, [&pieces](std::string_view byte) { pieces.push_back(byte); });
  return pieces;
}

}  // namespace k3
