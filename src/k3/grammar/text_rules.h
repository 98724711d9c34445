// The parts of JSON text as expressions: characters, strings, numbers, values of any shape.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "k3/grammar/grammar.h"

namespace k3::grammar {

/// How strings are written.
enum class TextForm : std::uint8_t {
  kJson,  // between quotes, with escapes
  kRaw,   // as they are: the text of a string argument in a tool call
  kName,  // as an attribute of the chat format: " and & as entities, no control characters
};

/// What stands between the parts of a JSON value. Nothing else is ever white space.
enum class Spacing : std::uint8_t {
  kCompact,  // {"a":1,"b":[2,3]}
  kSpaced,   // {"a": 1, "b": [2, 3]}
};

/// Code points from..to, both included.
using CodePoints = std::pair<std::uint32_t, std::uint32_t>;
using CodePointSet = std::vector<CodePoints>;

/// Sorted, without overlaps and surrogates, nothing beyond U+10FFFF.
CodePointSet Normalized(CodePointSet set);
CodePointSet Complement(const CodePointSet& normalized);

/// Bounds of a number, both included unless said otherwise.
struct NumberRange {
  std::optional<std::int64_t> min, max;
  bool exclusive_min = false, exclusive_max = false;
};

/// Integers have at most this many digits, and so has the fraction of a number. Exponents have two,
/// so that every number fits into a double.
inline constexpr int kMaxDigits = 18;

/// Expressions of one builder, which it outlives not. Shared parts are made once.
class TextRules {
 public:
  TextRules(GrammarBuilder& builder, Spacing spacing) : b_(builder), spacing_(spacing) {}

  /// One character of the set in its shortest form: itself, or the escape it needs.
  Expr CharIn(const CodePointSet& set, TextForm form);
  /// One character in any form: in JSON with all escapes but those of single surrogates. Valid
  /// UTF-8. Not for kName.
  Expr AnyChar(TextForm form);
  RuleId AnyCharRule(TextForm form);
  /// `min` to `max` characters (-1: any number); in JSON with the quotes.
  Expr String(TextForm form, std::int64_t min, std::int64_t max);
  /// Quotes around the text in JSON.
  Expr Quoted(Expr text, TextForm form);
  /// A JSON key that is none of `names` (UTF-8), in its shortest form, with the quotes.
  Expr KeyExcept(std::vector<std::string> names);
  /// The same as an attribute's value, without quotes and not empty.
  Expr NameExcept(std::vector<std::string> names);

  Expr Integer();
  Expr IntegerIn(const NumberRange& range);
  Expr Number();
  /// Without exponent.
  Expr NumberIn(const NumberRange& range);

  Expr Comma() { return b_.Literal(spacing_ == Spacing::kSpaced ? ", " : ","); }
  Expr Colon() { return b_.Literal(spacing_ == Spacing::kSpaced ? ": " : ":"); }
  Spacing spacing() const { return spacing_; }

  /// Any JSON value, object or array; keys may repeat.
  Expr AnyValue();
  Expr AnyObject();
  Expr AnyArray();

 private:
  Expr Digits(std::int64_t min, std::int64_t max) {
    return b_.Unrolled(b_.Range('0', '9'), min, max);
  }
  Expr Magnitude(std::int64_t lo, std::int64_t hi);
  Expr SameLength(std::string_view lo, std::string_view hi);
  Expr Utf8(const CodePoints& range);
  /// One that needs an escape or is not ASCII.
  Expr SpecialChar(TextForm form);
  Expr KeyTail(TextForm form);
  Expr KeyExceptFrom(std::span<const std::string> sorted, std::size_t depth, TextForm form);
  void DefineAny();

  GrammarBuilder& b_;
  Spacing spacing_;
  std::map<std::string, RuleId> rules_;
};

}  // namespace k3::grammar
