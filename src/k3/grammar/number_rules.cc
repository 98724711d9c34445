// Numbers as digits: an interval of integers is a handful of digit patterns.
#include <algorithm>
#include <string>

#include "k3/grammar/text_rules.h"

namespace k3::grammar {
namespace {

constexpr std::int64_t kLargest = 999'999'999'999'999'999;  // kMaxDigits nines

}  // namespace

/// Digit strings of one length between lo and hi.
Expr TextRules::SameLength(std::string_view lo, std::string_view hi) {
  const auto rest = static_cast<std::int64_t>(lo.size()) - 1;
  if (lo.empty()) return b_.Empty();
  if (lo.find_first_not_of('0') == lo.npos && hi.find_first_not_of('9') == hi.npos) {
    return Digits(rest + 1, rest + 1);
  }
  if (lo[0] == hi[0]) {
    return b_.Seq({b_.Range(lo[0], lo[0]), SameLength(lo.substr(1), hi.substr(1))});
  }
  const std::string nines(lo.size() - 1, '9'), zeros(lo.size() - 1, '0');
  std::vector<Expr> choices{b_.Seq({b_.Range(lo[0], lo[0]), SameLength(lo.substr(1), nines)}),
                            b_.Seq({b_.Range(hi[0], hi[0]), SameLength(zeros, hi.substr(1))})};
  if (hi[0] - lo[0] > 1) {
    choices.push_back(b_.Seq({b_.Range(lo[0] + 1, hi[0] - 1), Digits(rest, rest)}));
  }
  return b_.Alt(std::move(choices));
}

/// Integers lo..hi without sign and leading zeros; 0 <= lo.
Expr TextRules::Magnitude(std::int64_t lo, std::int64_t hi) {
  hi = std::min(hi, kLargest);
  std::vector<Expr> choices;
  std::int64_t first = 0, last = 9;  // of the integers with as many digits
  for (int digits = 1; digits <= kMaxDigits; ++digits) {
    const std::int64_t a = std::max(lo, first), z = std::min(hi, last);
    if (a <= z) choices.push_back(SameLength(std::to_string(a), std::to_string(z)));
    first = last + 1;
    last = digits == kMaxDigits ? kLargest : last * 10 + 9;
  }
  return b_.Alt(std::move(choices));
}

Expr TextRules::IntegerIn(const NumberRange& range) {
  std::int64_t lo = std::clamp(range.min.value_or(-kLargest), -kLargest - 1, kLargest + 1);
  std::int64_t hi = std::clamp(range.max.value_or(kLargest), -kLargest - 1, kLargest + 1);
  if (range.exclusive_min && range.min.has_value()) ++lo;
  if (range.exclusive_max && range.max.has_value()) --hi;
  std::vector<Expr> choices;
  if (hi >= 0) choices.push_back(Magnitude(std::max<std::int64_t>(lo, 0), hi));
  if (lo < 0) {
    choices.push_back(b_.Seq({b_.Literal("-"), Magnitude(std::max<std::int64_t>(-hi, 1), -lo)}));
  }
  return b_.Alt(std::move(choices));
}

Expr TextRules::NumberIn(const NumberRange& range) {
  // The value is between the integers lo and hi, or equal to one of them.
  const std::int64_t lo = std::clamp(range.min.value_or(-kLargest), -kLargest, kLargest);
  const std::int64_t hi = std::clamp(range.max.value_or(kLargest), -kLargest, kLargest);
  const bool open_lo = range.exclusive_min && range.min.has_value();
  const bool open_hi = range.exclusive_max && range.max.has_value();
  if (range.min.value_or(0) > kLargest || range.max.value_or(0) < -kLargest) return b_.Never();
  const Expr point = b_.Literal(".");
  const Expr fraction = b_.Optional(b_.Seq({point, Digits(1, kMaxDigits)}));
  const Expr zeros = b_.Optional(b_.Seq({point, b_.Unrolled(b_.Literal("0"), 1, kMaxDigits)}));
  const Expr positive_fraction =
      b_.Seq({point, b_.Unrolled(b_.Literal("0"), 0, kMaxDigits - 2), b_.Range('1', '9'),
              b_.Unrolled(b_.Range('0', '9'), 0, 1)});
  // Magnitudes from `a` (itself only if closed) to `z` (itself only if closed), 0 <= a <= z.
  const auto between = [&](std::int64_t a, bool open_a, std::int64_t z, bool open_z) {
    std::vector<Expr> choices;
    if (a < z) {
      choices.push_back(b_.Seq({Magnitude(a, a), open_a ? positive_fraction : fraction}));
      if (a + 1 < z) choices.push_back(b_.Seq({Magnitude(a + 1, z - 1), fraction}));
    }
    if (!open_z && (a < z || !open_a)) choices.push_back(b_.Seq({Magnitude(z, z), zeros}));
    return b_.Alt(std::move(choices));
  };
  std::vector<Expr> choices;
  const bool order = lo <= hi;
  if (order && hi >= 0) {
    choices.push_back(between(std::max<std::int64_t>(lo, 0), lo >= 0 && open_lo, hi, open_hi));
  }
  if (order && lo < 0) {
    const std::int64_t smallest = std::max<std::int64_t>(-hi, 0);
    choices.push_back(
        b_.Seq({b_.Literal("-"), between(smallest, hi <= 0 && open_hi, -lo, open_lo)}));
  }
  return b_.Alt(std::move(choices));
}

Expr TextRules::Integer() {
  const auto [it, fresh] = rules_.try_emplace("integer", 0);
  if (fresh) {
    it->second = b_.Declare("an integer");
    b_.Define(it->second, IntegerIn({}));
  }
  return b_.Call(it->second);
}

Expr TextRules::Number() {
  const auto [it, fresh] = rules_.try_emplace("number", 0);
  if (fresh) {
    it->second = b_.Declare("a number");
    const Expr whole =
        b_.Alt({b_.Literal("0"), b_.Seq({b_.Range('1', '9'), Digits(0, kMaxDigits - 1)})});
    const Expr exponent =
        b_.Seq({b_.OneOf({"e", "E"}), b_.Optional(b_.OneOf({"+", "-"})), Digits(1, 2)});
    b_.Define(it->second, b_.Seq({b_.Optional(b_.Literal("-")), whole,
                                  b_.Optional(b_.Seq({b_.Literal("."), Digits(1, kMaxDigits)})),
                                  b_.Optional(exponent)}));
  }
  return b_.Call(it->second);
}

}  // namespace k3::grammar
