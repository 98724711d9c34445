// The character classes the pre-tokenizer asks about, from one pinned Unicode version.
#pragma once

#include <cstdint>

namespace k3::unicode {

/// Unicode version of the tables: that of the pinned tiktoken (docs/tokenizer.md).
inline constexpr const char* kVersion = "16.0.0";

/// Flags of a code point. "Upper" and "lower" are the two word classes of the Kimi pattern: both
/// hold caseless letters and marks, neither holds Han.
enum CharClass : std::uint8_t {
  kHan = 1,       // property Script = Han, exactly
  kLetter = 2,    // \p{L}
  kNumber = 4,    // \p{N}
  kUpper = 8,     // Lu, Lt, Lm, Lo, M without Han
  kLower = 16,    // Ll, Lm, Lo, M without Han
  kSpace = 32,    // property White_Space
  kNewline = 64,  // CR and LF
};

/// CharClass flags of any value below 0x110000; 0 for symbols, controls and unassigned code points.
std::uint8_t ClassOf(std::uint32_t code_point);

}  // namespace k3::unicode
