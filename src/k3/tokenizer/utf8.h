// UTF-8 by hand: strict decoding with the error practice of W3C and Python ("maximal subparts").
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace k3::utf8 {

enum class Kind : std::uint8_t {
  kValid,       // one character
  kBad,         // bytes that no continuation can repair
  kIncomplete,  // the start of a character, and the text ends there
};

/// The first character of a text. For kBad and kIncomplete, `length` counts the bytes that together
/// become one U+FFFD (1 to 3) and code_point is 0.
struct Char {
  Kind kind = Kind::kBad;
  std::uint8_t length = 1;
  std::uint32_t code_point = 0;
};

/// Decodes at the start of non-empty `text`. Surrogates, overlong forms and values above U+10FFFF
/// are bad.
Char Decode(std::string_view text);

/// Length of the longest prefix of `text` that is valid UTF-8.
std::size_t ValidPrefix(std::string_view text);

/// Decodes a character of text that ValidPrefix has accepted; `p` is at its first byte.
inline Char DecodeValid(const char* p) {
  const auto byte = [p](int i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(p[i]));
  };
  const std::uint32_t lead = byte(0);
  if (lead < 0x80) return {Kind::kValid, 1, lead};
  if (lead < 0xE0) return {Kind::kValid, 2, (lead & 0x1Fu) << 6 | (byte(1) & 0x3Fu)};
  if (lead < 0xF0) {
    return {Kind::kValid, 3, (lead & 0xFu) << 12 | (byte(1) & 0x3Fu) << 6 | (byte(2) & 0x3Fu)};
  }
  return {Kind::kValid, 4,
          (lead & 7u) << 18 | (byte(1) & 0x3Fu) << 12 | (byte(2) & 0x3Fu) << 6 | (byte(3) & 0x3Fu)};
}

}  // namespace k3::utf8
