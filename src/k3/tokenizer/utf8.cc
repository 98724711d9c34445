#include "k3/tokenizer/utf8.h"

#include <cstring>

namespace k3::utf8 {
namespace {

/// What a lead byte promises: its length, and the range of the second byte (narrower for the leads
/// that could begin an overlong form, a surrogate or a value above U+10FFFF).
struct Lead {
  std::uint8_t length, low, high;
};

Lead LeadOf(unsigned char byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2 || byte > 0xF4) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {4, 0x80, 0xBF};
}

}  // namespace

Char Decode(std::string_view text) {
  const Lead lead = LeadOf(static_cast<unsigned char>(text[0]));
  if (lead.length == 0) return {Kind::kBad, 1, 0};
  for (std::uint8_t i = 1; i < lead.length; ++i) {
    if (i == text.size()) return {Kind::kIncomplete, i, 0};
    const auto byte = static_cast<unsigned char>(text[i]);
    const unsigned char low = i == 1 ? lead.low : 0x80;
    const unsigned char high = i == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) return {Kind::kBad, i, 0};
  }
  return DecodeValid(text.data());
}

std::size_t ValidPrefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    if (text.size() - at >= 8) {
      std::uint64_t word;
      std::memcpy(&word, text.data() + at, 8);
      if ((word & 0x8080808080808080ull) == 0) {
        at += 8;
        continue;
      }
    }
    const Char c = Decode(text.substr(at));
    if (c.kind != Kind::kValid) break;
    at += c.length;
  }
  return at;
}

}  // namespace k3::utf8
