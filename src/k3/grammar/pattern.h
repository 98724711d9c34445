// Regular expressions of JSON Schema's "pattern", a safe subset, as expressions of a grammar.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "k3/base/status.h"
#include "k3/grammar/text_rules.h"

namespace k3::grammar {

/// Lengths are in characters; kNoLimit: any.
struct PatternLength {
  static constexpr std::int64_t kNoLimit = -1;
  std::int64_t min = 0, max = kNoLimit;
};

/// The text (without quotes) of strings that `pattern` matches and whose length is within `length`.
///
/// Understood, as ECMA-262 with the flag u does: literals, `.`, classes with ranges and negation,
/// \d \w \s \D \W \S, the escapes \t \n \v \f \r \0 \xHH \uHHHH \u{H}, groups (named or not, they
/// capture nothing), alternatives, * + ? {n} {n,} {n,m} (lazy ones match the same), ^ at the
/// beginning and $ at the end of a whole alternative. A pattern may match anywhere, so without
/// anchors there is free text on that side.
///
/// Refused (kUnsupported), with the position: look-around, back-references, \b \B, \p, anchors
/// elsewhere, bounds over 1,000, groups over 50 deep; and `length` where the pattern's own length
/// does not imply it, except for one repeated character or class between ^ and $. What is no
/// regular expression is kInvalidArgument. `where` starts every message.
Result<Expr> CompilePattern(GrammarBuilder& builder, TextRules& text, std::string_view pattern,
                            TextForm form, PatternLength length, std::string_view where);

/// The pattern of a string format ("date", "uuid", ...); empty: not supported.
std::string_view FormatPattern(std::string_view format);
inline constexpr std::string_view kFormatNames =
    "date, date-time, duration, email, hostname, ipv4, ipv6, time, uri, uuid";

}  // namespace k3::grammar
