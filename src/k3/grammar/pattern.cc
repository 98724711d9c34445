#include "k3/grammar/pattern.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "k3/io/json.h"
#include "k3/tokenizer/utf8.h"

namespace k3::grammar {
namespace {

constexpr std::int64_t kMaxBound = 1000;
constexpr int kMaxGroups = 50;
constexpr std::int64_t kNoLimit = PatternLength::kNoLimit;
constexpr std::int64_t kLong = std::int64_t{1} << 40;  // lengths do not grow beyond this

std::int64_t Times(std::int64_t a, std::int64_t b) {
  if (a == 0 || b == 0) return 0;
  if (a < 0 || b < 0) return kNoLimit;
  return a > kLong / b ? kLong : a * b;
}

std::int64_t Plus(std::int64_t a, std::int64_t b) {
  return a < 0 || b < 0 ? kNoLimit : std::min(a + b, kLong);
}

/// A part of a pattern with the lengths of what it matches.
struct Part {
  Expr expr = 0;
  PatternLength length{0, 0};
};

class Parser {
 public:
  Parser(GrammarBuilder& builder, TextRules& text, std::vector<std::uint32_t> pattern,
         TextForm form, std::string_view where)
      : b_(builder), text_(text), p_(std::move(pattern)), form_(form), where_(where) {}

  Result<Expr> Whole(PatternLength wanted);

 private:
  struct Bounds {
    std::int64_t min = 1, max = 1;
  };

  bool End() const { return at_ == p_.size(); }
  bool Next(std::uint32_t c) const { return !End() && p_[at_] == c; }
  bool Take(std::uint32_t c) {
    if (!Next(c)) return false;
    ++at_;
    return true;
  }
  Error Refuse(Code code, std::string_view what) const {
    return {code, fmt::format("{}: pattern: {} at character {}", where_, what, at_ + 1)};
  }
  Error Invalid(std::string_view what) const { return Refuse(Code::kInvalidArgument, what); }
  Error Unsupported(std::string_view what) const {
    return Refuse(Code::kUnsupported, fmt::format("{} is not supported", what));
  }

  Result<Part> Anchored();
  Result<Part> Alternatives();
  Result<Part> Sequence();
  Result<Part> Repeated();
  Result<Part> Atom();
  Result<Part> Group();
  Result<std::optional<Bounds>> Quantifier();
  Result<std::optional<std::int64_t>> Integer();
  Result<CodePointSet> Class();
  /// What follows a backslash.
  Result<CodePointSet> Escape(bool in_class);
  Result<std::uint32_t> Hex(std::size_t digits);
  Result<Expr> OneClass(const Bounds& bounds, PatternLength wanted);
  Part OneOf(const CodePointSet& set) {
    last_class_ = set;
    return {text_.CharIn(set, form_), {1, 1}};
  }

  GrammarBuilder& b_;
  TextRules& text_;
  std::vector<std::uint32_t> p_;
  TextForm form_;
  std::string_view where_;
  std::size_t at_ = 0;
  int depth_ = 0;
  CodePointSet last_class_;
  // The whole pattern is ^, one class with these bounds, $.
  std::optional<Bounds> single_;
};

const CodePointSet kDigit{{'0', '9'}};
const CodePointSet kWord{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const CodePointSet kSpace{{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                          {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                          {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
const CodePointSet kLineEnds{{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

Result<Expr> Parser::Whole(PatternLength wanted) {
  std::vector<Part> parts;
  do {
    K3_ASSIGN(const Part part, Anchored());
    parts.push_back(part);
  } while (Take('|'));
  if (!End()) return Invalid("an unexpected )");
  PatternLength length = parts[0].length;
  std::vector<Expr> choices;
  for (const Part& part : parts) {
    choices.push_back(part.expr);
    length.min = std::min(length.min, part.length.min);
    length.max =
        length.max < 0 || part.length.max < 0 ? kNoLimit : std::max(length.max, part.length.max);
  }
  const bool implied =
      length.min >= wanted.min && (wanted.max < 0 || (length.max >= 0 && length.max <= wanted.max));
  if (implied) return b_.Alt(std::move(choices));
  if (parts.size() == 1 && single_.has_value()) return OneClass(*single_, wanted);
  return Error{Code::kUnsupported,
               fmt::format("{}: pattern together with minLength or maxLength is not supported "
                           "unless the pattern itself bounds the length",
                           where_)};
}

Result<Expr> Parser::OneClass(const Bounds& bounds, PatternLength wanted) {
  const RuleId rule = b_.Declare("a character");
  b_.Define(rule, text_.CharIn(last_class_, form_));
  const std::int64_t max = bounds.max < 0   ? wanted.max
                           : wanted.max < 0 ? bounds.max
                                            : std::min(bounds.max, wanted.max);
  return b_.Counted(rule, std::max(bounds.min, wanted.min), max);
}

/// One alternative of the whole pattern.
Result<Part> Parser::Anchored() {
  const bool from_start = Take('^');
  const std::size_t first = at_;
  single_.reset();
  std::vector<Part> parts;
  while (!End() && !Next('|') && !Next(')') &&
         !(Next('$') && (at_ + 1 == p_.size() || p_[at_ + 1] == '|'))) {
    const std::size_t start = at_;
    K3_ASSIGN(const Part part, Repeated());
    parts.push_back(part);
    if (start != first) single_.reset();
  }
  const bool to_end = Take('$');
  if (!from_start || !to_end) single_.reset();
  Part all;
  std::vector<Expr> exprs;
  const Expr free = b_.Star(text_.AnyChar(form_));
  if (!from_start) exprs.push_back(free);
  for (const Part& part : parts) {
    exprs.push_back(part.expr);
    all.length.min = Plus(all.length.min, part.length.min);
    all.length.max = Plus(all.length.max, part.length.max);
  }
  if (!to_end) exprs.push_back(free);
  if (!from_start || !to_end) all.length.max = kNoLimit;
  all.expr = b_.Seq(std::move(exprs));
  return all;
}

/// Inside a group.
Result<Part> Parser::Alternatives() {
  std::vector<Expr> choices;
  std::optional<PatternLength> length;
  do {
    K3_ASSIGN(const Part part, Sequence());
    choices.push_back(part.expr);
    if (!length.has_value()) {
      length = part.length;
      continue;
    }
    length->min = std::min(length->min, part.length.min);
    length->max =
        length->max < 0 || part.length.max < 0 ? kNoLimit : std::max(length->max, part.length.max);
  } while (Take('|'));
  return Part{b_.Alt(std::move(choices)), *length};
}

Result<Part> Parser::Sequence() {
  Part all;
  std::vector<Expr> exprs;
  while (!End() && !Next('|') && !Next(')')) {
    K3_ASSIGN(const Part part, Repeated());
    exprs.push_back(part.expr);
    all.length.min = Plus(all.length.min, part.length.min);
    all.length.max = Plus(all.length.max, part.length.max);
  }
  all.expr = b_.Seq(std::move(exprs));
  return all;
}

Result<Part> Parser::Repeated() {
  const bool group = Next('(');
  K3_ASSIGN(Part part, Atom());
  K3_ASSIGN(const auto bounds, Quantifier());
  single_ = group ? std::nullopt : std::optional(bounds.value_or(Bounds()));
  if (!bounds.has_value()) return part;
  if (b_.over_limit()) return Unsupported("a pattern of this size");
  part.expr = b_.Unrolled(part.expr, bounds->min, bounds->max);
  part.length.min = Times(part.length.min, bounds->min);
  part.length.max = Times(part.length.max, bounds->max);
  return part;
}

Result<std::optional<std::int64_t>> Parser::Integer() {
  if (End() || p_[at_] < '0' || p_[at_] > '9') return std::optional<std::int64_t>();
  std::int64_t n = 0;
  for (; !End() && p_[at_] >= '0' && p_[at_] <= '9'; ++at_) {
    n = std::min<std::int64_t>(n * 10 + (p_[at_] - '0'), kMaxBound + 1);
  }
  if (n > kMaxBound) return Unsupported(fmt::format("a bound over {}", kMaxBound));
  return std::optional(n);
}

Result<std::optional<Parser::Bounds>> Parser::Quantifier() {
  Bounds bounds;
  if (Take('*')) {
    bounds = {0, -1};
  } else if (Take('+')) {
    bounds = {1, -1};
  } else if (Take('?')) {
    bounds = {0, 1};
  } else if (Take('{')) {
    K3_ASSIGN(const auto min, Integer());
    if (!min.has_value()) return Invalid("{ without a number (write \\{ for the character)");
    bounds = {*min, *min};
    if (Take(',')) {
      K3_ASSIGN(const auto max, Integer());
      bounds.max = max.value_or(-1);
    }
    if (!Take('}')) return Invalid("a bound without }");
    if (bounds.max >= 0 && bounds.max < bounds.min) return Invalid("bounds in the wrong order");
  } else {
    return std::optional<Bounds>();
  }
  Take('?');  // lazy
  if (Next('*') || Next('+') || Next('?') || Next('{')) return Invalid("nothing to repeat");
  return std::optional(bounds);
}

Result<Part> Parser::Atom() {
  const std::uint32_t c = p_[at_];
  switch (c) {
    case '(':
      return Group();
    case '[': {
      K3_ASSIGN(const CodePointSet set, Class());
      return OneOf(set);
    }
    case '\\': {
      ++at_;
      K3_ASSIGN(const CodePointSet set, Escape(false));
      return OneOf(set);
    }
    case '.':
      ++at_;
      return OneOf(Complement(kLineEnds));
    case '^':
    case '$':
      return Unsupported("an anchor inside the pattern");
    case '*':
    case '+':
    case '?':
    case '{':
      return Invalid("nothing to repeat");
    default:
      ++at_;
      return OneOf({{c, c}});
  }
}

Result<Part> Parser::Group() {
  ++at_;
  if (++depth_ > kMaxGroups) return Unsupported("a group this deep");
  if (Take('?')) {
    if (Take('<')) {
      if (Next('=') || Next('!')) return Unsupported("look-behind");
      while (!End() && !Next('>')) ++at_;
      if (!Take('>')) return Invalid("a group name without >");
    } else if (!Take(':')) {
      if (Next('=') || Next('!')) return Unsupported("look-ahead");
      return Unsupported("this kind of group");
    }
  }
  K3_ASSIGN(const Part part, Alternatives());
  if (!Take(')')) return Invalid("a group without )");
  --depth_;
  return part;
}

Result<std::uint32_t> Parser::Hex(std::size_t digits) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < digits; ++i, ++at_) {
    const std::uint32_t c = End() ? 0 : p_[at_];
    const std::uint32_t lower = c | 0x20u;
    if (c >= '0' && c <= '9') {
      value = value << 4 | (c - '0');
    } else if (lower >= 'a' && lower <= 'f') {
      value = value << 4 | (lower - 'a' + 10);
    } else {
      return Invalid("an escape without its hexadecimal digits");
    }
  }
  return value;
}

Result<CodePointSet> Parser::Escape(bool in_class) {
  if (End()) return Invalid("a backslash at the end");
  const std::uint32_t c = p_[at_++];
  const auto one = [](std::uint32_t v) { return CodePointSet{{v, v}}; };
  switch (c) {
    case 'd':
      return kDigit;
    case 'w':
      return kWord;
    case 's':
      return kSpace;
    case 'D':
      return Complement(kDigit);
    case 'W':
      return Complement(kWord);
    case 'S':
      return Complement(kSpace);
    case 't':
      return one('\t');
    case 'n':
      return one('\n');
    case 'v':
      return one('\v');
    case 'f':
      return one('\f');
    case 'r':
      return one('\r');
    case 'x': {
      K3_ASSIGN(const std::uint32_t v, Hex(2));
      return one(v);
    }
    case 'u': {
      if (!Take('{')) {
        K3_ASSIGN(const std::uint32_t v, Hex(4));
        if (v >= 0xD800 && v <= 0xDFFF) return Unsupported("a surrogate");
        return one(v);
      }
      std::size_t digits = 0;
      while (at_ + digits < p_.size() && p_[at_ + digits] != '}') ++digits;
      if (digits == 0 || digits > 6) return Invalid("a code point of 1 to 6 digits expected");
      K3_ASSIGN(const std::uint32_t v, Hex(digits));
      if (!Take('}')) return Invalid("\\u{ without }");
      if (v > 0x10FFFF || (v >= 0xD800 && v <= 0xDFFF)) return Invalid("no code point");
      return one(v);
    }
    default:
      break;
  }
  const bool digit = c >= '0' && c <= '9';
  const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  if (c == '0' && (End() || p_[at_] < '0' || p_[at_] > '9')) return one(0);
  if (in_class && c == 'b') return one('\b');
  if (digit || letter) {
    --at_;
    return Unsupported(fmt::format("\\{}", static_cast<char>(c)));
  }
  return one(c);
}

Result<CodePointSet> Parser::Class() {
  ++at_;
  const bool negated = Take('^');
  CodePointSet set;
  while (!Next(']')) {
    if (End()) return Invalid("a class without ]");
    const auto item = [this]() -> Result<CodePointSet> {
      const std::uint32_t c = p_[at_++];
      if (c == '\\') return Escape(true);
      return CodePointSet{{c, c}};
    };
    K3_ASSIGN(const CodePointSet lo, item());
    const bool range = Next('-') && at_ + 1 < p_.size() && p_[at_ + 1] != ']';
    if (!range) {
      set.insert(set.end(), lo.begin(), lo.end());
      continue;
    }
    ++at_;
    K3_ASSIGN(const CodePointSet hi, item());
    const auto single = [](const CodePointSet& s) {
      return s.size() == 1 && s[0].first == s[0].second;
    };
    if (!single(lo) || !single(hi)) return Invalid("a range between classes");
    if (lo[0].first > hi[0].first) return Invalid("a range in the wrong order");
    set.emplace_back(lo[0].first, hi[0].first);
  }
  ++at_;
  set = Normalized(std::move(set));
  return negated ? Complement(set) : set;
}

}  // namespace

Result<Expr> CompilePattern(GrammarBuilder& builder, TextRules& text, std::string_view pattern,
                            TextForm form, PatternLength length, std::string_view where) {
  std::vector<std::uint32_t> code_points;
  while (!pattern.empty()) {
    const utf8::Char c = utf8::Decode(pattern);
    if (c.kind != utf8::Kind::kValid) {
      return Error{Code::kInvalidArgument, fmt::format("{}: pattern: not UTF-8", where)};
    }
    code_points.push_back(c.code_point);
    pattern.remove_prefix(c.length);
  }
  return Parser(builder, text, std::move(code_points), form, where).Whole(length);
}

}  // namespace k3::grammar
