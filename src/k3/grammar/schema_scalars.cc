// Strings and numbers of a schema.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "k3/grammar/schema_compiler_internal.h"
#include "k3/io/json.h"

namespace k3::grammar {

Result<Expr> SchemaCompiler::Text(const Schema& schema, const std::string& pointer, TextForm form) {
  K3_ASSIGN(const std::int64_t min, Count(schema, pointer, "minLength", 0));
  K3_ASSIGN(const std::int64_t max, Count(schema, pointer, "maxLength", -1));
  const auto pattern = schema.find("pattern");
  const auto format = schema.find("format");
  if (pattern == schema.end() && format == schema.end()) return text_.String(form, min, max);
  if (pattern != schema.end() && format != schema.end()) {
    return Refuse(pointer, "format", "pattern and format together are not supported");
  }
  const char* key = pattern != schema.end() ? "pattern" : "format";
  const Schema& value = schema[key];
  if (!value.is_string()) return Invalid(pointer, key, "expected a string");
  auto expression = value.get<std::string>();
  if (format != schema.end()) {
    const std::string_view known = FormatPattern(expression);
    if (known.empty()) {
      return Refuse(
          pointer, "format",
          fmt::format("found \"{}\", supported are {}", Printable(expression, 40), kFormatNames));
    }
    expression = known;
  }
  const std::string where = fmt::format("{}: {}", where_, Printable(pointer));
  K3_ASSIGN(const Expr text, CompilePattern(b_, text_, expression, form, {min, max}, where));
  return text_.Quoted(text, form);
}

/// Bounds of integers are rounded inwards; those of other numbers must be whole.
Result<NumberRange> SchemaCompiler::Bounds(const Schema& schema, const std::string& pointer,
                                           bool integers) const {
  struct Bound {
    const char* key;
    bool lower, exclusive;
  };
  static constexpr std::array<Bound, 4> kBounds{{{"minimum", true, false},
                                                 {"exclusiveMinimum", true, true},
                                                 {"maximum", false, false},
                                                 {"exclusiveMaximum", false, true}}};
  constexpr double kFar = 2e18;  // beyond all numbers that are generated
  NumberRange range;
  for (const Bound& bound : kBounds) {
    const auto value = schema.find(bound.key);
    if (value == schema.end()) continue;
    if (!value->is_number()) return Invalid(pointer, bound.key, "expected a number");
    const double d = std::clamp(value->get<double>(), -kFar, kFar);
    const bool whole = d == std::floor(d);
    if (!whole && !integers) {
      return Refuse(pointer, bound.key, "a bound of numbers that is not whole is not supported");
    }
    std::int64_t n = 0;
    if (value->is_number_integer() && std::abs(d) < 1e18) {
      n = value->get<std::int64_t>();
    } else {
      n = static_cast<std::int64_t>(bound.lower ? std::ceil(d) : std::floor(d));
    }
    const bool exclusive = bound.exclusive && whole;
    auto& end = bound.lower ? range.min : range.max;
    auto& open = bound.lower ? range.exclusive_min : range.exclusive_max;
    if (end.has_value() && *end == n) {
      open = open || exclusive;
    } else if (!end.has_value() || (bound.lower ? n > *end : n < *end)) {
      end = n;
      open = exclusive;
    }
  }
  return range;
}

Result<Expr> SchemaCompiler::Numbers(const Schema& schema, const std::string& pointer,
                                     Types types) {
  const bool integers = (types & kFraction) == 0;
  K3_ASSIGN(NumberRange range, Bounds(schema, pointer, integers));
  if (const auto format = schema.find("format"); format != schema.end()) {
    // The names of OpenAPI; those of strings say nothing about numbers.
    if (*format == "int32" && integers) {
      range.min = std::max<std::int64_t>(range.min.value_or(INT32_MIN), INT32_MIN);
      range.max = std::min<std::int64_t>(range.max.value_or(INT32_MAX), INT32_MAX);
    } else if (!format->is_string()) {
      return Invalid(pointer, "format", "expected a string");
    } else if (*format != "int64" && *format != "float" && *format != "double" &&
               FormatPattern(format->get<std::string>()).empty()) {
      return Refuse(pointer, "format",
                    fmt::format("found \"{}\", supported for numbers are int32 (integers), int64, "
                                "float, double",
                                Printable(format->get<std::string>(), 40)));
    }
  }
  const bool free = !range.min.has_value() && !range.max.has_value();
  if ((types & kInteger) == 0) return b_.Never();  // numbers that are not whole are not asked for
  if (integers) return free ? text_.Integer() : text_.IntegerIn(range);
  return free ? text_.Number() : text_.NumberIn(range);
}

}  // namespace k3::grammar
