#include "k3/grammar/text_rules.h"

#include <fmt/format.h>

#include <algorithm>

#include "k3/chat/json_text.h"

namespace k3::grammar {
namespace {

constexpr std::uint32_t kLast = 0x10FFFF, kFirstSurrogate = 0xD800, kLastSurrogate = 0xDFFF;

std::string Encoded(std::uint32_t c) {
  const auto tail = [c](int shift) { return static_cast<char>(0x80u | ((c >> shift) & 0x3Fu)); };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xC0u | c >> 6), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xE0u | c >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xF0u | c >> 18), tail(12), tail(6), tail(0)};
}

/// The escape a character needs; empty: none.
std::string Escape(std::uint32_t c, TextForm form) {
  if (form == TextForm::kName) return c == '"' ? "&quot;" : c == '&' ? "&amp;" : "";
  switch (c) {
    case '"':
      return "\\\"";
    case '\\':
      return "\\\\";
    case '\b':
      return "\\b";
    case '\f':
      return "\\f";
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default:
      return c < 0x20 ? fmt::format("\\u{:04x}", c) : std::string();
  }
}

}  // namespace

CodePointSet Normalized(CodePointSet set) {
  std::sort(set.begin(), set.end());
  CodePointSet out;
  const auto add = [&out](std::uint32_t lo, std::uint32_t hi) {
    if (lo > hi) return;
    if (!out.empty() && lo <= out.back().second + 1) {
      out.back().second = std::max(out.back().second, hi);
    } else {
      out.emplace_back(lo, hi);
    }
  };
  for (const auto& [lo, hi] : set) {
    add(lo, std::min(hi, kFirstSurrogate - 1));
  }
  for (const auto& [lo, hi] : set) {
    add(std::max(lo, kLastSurrogate + 1), std::min(hi, kLast));
  }
  return out;
}

CodePointSet Complement(const CodePointSet& normalized) {
  CodePointSet out;
  std::uint32_t next = 0;
  for (const auto& [lo, hi] : normalized) {
    if (lo > next) out.emplace_back(next, lo - 1);
    next = hi + 1;
  }
  if (next <= kLast) out.emplace_back(next, kLast);
  return Normalized(std::move(out));
}

/// Cut until the bytes after the first differing one cover their whole range.
Expr TextRules::Utf8(const CodePoints& range) {
  auto [lo, hi] = range;
  for (const std::uint32_t last : {0x7Fu, 0x7FFu, 0xFFFFu}) {
    if (lo <= last && last < hi) return b_.Alt({Utf8({lo, last}), Utf8({last + 1, hi})});
  }
  const std::string a = Encoded(lo), z = Encoded(hi);
  for (std::size_t tail = a.size(); tail-- > 1;) {  // `tail` bytes that can be free
    const std::uint32_t mask = (1u << (6 * tail)) - 1;
    if ((lo & ~mask) == (hi & ~mask)) continue;
    if ((lo & mask) != 0) return b_.Alt({Utf8({lo, lo | mask}), Utf8({(lo | mask) + 1, hi})});
    if ((hi & mask) != mask) {
      return b_.Alt({Utf8({lo, (hi & ~mask) - 1}), Utf8({hi & ~mask, hi})});
    }
  }
  std::vector<Expr> bytes;
  for (std::size_t i = 0; i < a.size(); ++i) {
    bytes.push_back(b_.Range(static_cast<unsigned char>(a[i]), static_cast<unsigned char>(z[i])));
  }
  return b_.Seq(std::move(bytes));
}

Expr TextRules::CharIn(const CodePointSet& set, TextForm form) {
  std::vector<Expr> choices;
  std::vector<std::string> escapes;
  for (auto [lo, hi] : Normalized(set)) {
    if (form == TextForm::kRaw) {
      choices.push_back(Utf8({lo, hi}));
      continue;
    }
    if (form == TextForm::kName) lo = std::max(lo, 0x20u);
    while (lo <= hi) {  // up to the next character that needs an escape
      std::uint32_t end = lo;
      if (const std::string escape = Escape(lo, form); !escape.empty()) {
        escapes.push_back(escape);
      } else {
        while (end < hi && end < 0x80 && Escape(end + 1, form).empty()) ++end;
        if (end >= 0x80) end = hi;
        choices.push_back(Utf8({lo, end}));
      }
      lo = end + 1;
    }
  }
  choices.push_back(b_.OneOf(std::move(escapes)));
  return b_.Alt(std::move(choices));
}

Expr TextRules::SpecialChar(TextForm form) {
  const auto [it, fresh] =
      rules_.try_emplace(form == TextForm::kJson ? "special" : "special in a name", 0);
  if (fresh) {
    CodePointSet special{{0x80, kLast}};
    for (std::uint32_t c = 0; c < 0x80; ++c) {
      if (!Escape(c, form).empty()) special.emplace_back(c, c);
    }
    it->second = b_.Declare("a character");
    b_.Define(it->second, CharIn(special, form));
  }
  return b_.Call(it->second);
}

Expr TextRules::AnyChar(TextForm form) {
  if (form == TextForm::kRaw) return CharIn({{0, kLast}}, form);
  const Expr digit = b_.Range('0', '9');
  const Expr hex = b_.Alt({digit, b_.Range('a', 'f'), b_.Range('A', 'F')});
  const auto either = [this](std::string_view chars) {
    std::vector<std::string> all;
    for (const char c : chars) all.emplace_back(1, c);
    return b_.OneOf(std::move(all));
  };
  const Expr d = either("dD");
  const Expr high = b_.Seq({d, either("89abAB"), hex, hex});
  const Expr low =
      b_.Seq({b_.Literal("\\u"), d, b_.Alt({b_.Range('c', 'f'), b_.Range('C', 'F')}), hex, hex});
  const Expr not_d = b_.Alt({digit, either("abcefABCEF")});
  const Expr single =
      b_.Alt({b_.Seq({not_d, hex, hex, hex}), b_.Seq({d, b_.Range('0', '7'), hex, hex})});
  const Expr escape =
      b_.Seq({b_.Literal("\\"),
              b_.Alt({either("\"\\/bfnrt"),
                      b_.Seq({b_.Literal("u"), b_.Alt({single, b_.Seq({high, low})})})})});
  return b_.Alt({CharIn({{0x20, '"' - 1}, {'"' + 1, '\\' - 1}, {'\\' + 1, kLast}}, form), escape});
}

RuleId TextRules::AnyCharRule(TextForm form) {
  const auto [it, fresh] = rules_.try_emplace(form == TextForm::kRaw ? "raw char" : "char", 0);
  if (fresh) {
    it->second = b_.Declare("a character");
    b_.Define(it->second, AnyChar(form));
  }
  return it->second;
}

Expr TextRules::Quoted(Expr text, TextForm form) {
  if (form == TextForm::kRaw) return text;
  return b_.Seq({b_.Literal("\""), text, b_.Literal("\"")});
}

Expr TextRules::String(TextForm form, std::int64_t min, std::int64_t max) {
  const std::string name = fmt::format("string {} {} {}", form == TextForm::kRaw, min, max);
  const auto [it, fresh] = rules_.try_emplace(name, 0);
  if (fresh) {
    const bool bounded = min > 0 || max >= 0;
    const Expr text = bounded ? b_.Counted(AnyCharRule(form), min, max) : b_.Star(AnyChar(form));
    it->second = b_.Declare("a string");
    b_.Define(it->second, Quoted(text, form));
  }
  return b_.Call(it->second);
}

/// The rest of a key that differs from all names already.
Expr TextRules::KeyTail(TextForm form) {
  const bool json = form == TextForm::kJson;
  const auto [it, fresh] = rules_.try_emplace(json ? "key tail" : "name tail", 0);
  if (fresh) {
    it->second = b_.Declare("a key");
    b_.Define(it->second,
              b_.Seq({b_.Star(CharIn({{0, kLast}}, form)), json ? b_.Literal("\"") : b_.Empty()}));
  }
  return b_.Call(it->second);
}

/// Keys that agree with all of `sorted` in their first `depth` bytes and are none of them.
/// Recursion is as deep as the longest name.
Expr TextRules::KeyExceptFrom(std::span<const std::string> sorted, std::size_t depth,
                              TextForm form) {
  const bool json = form == TextForm::kJson;
  std::vector<Expr> choices;
  if (!sorted.empty() && sorted[0].size() == depth) {
    sorted = sorted.subspan(1);
  } else if (json || depth > 0) {
    choices.push_back(json ? b_.Literal("\"") : b_.Empty());
  }
  CodePointSet taken;
  bool special_taken = false;
  while (!sorted.empty()) {
    const auto lead = static_cast<unsigned char>(sorted[0][depth]);
    const std::size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    const std::string bytes = sorted[0].substr(depth, length);
    std::uint32_t c = length == 1 ? lead : lead & (0x7Fu >> length);
    for (std::size_t i = 1; i < bytes.size(); ++i) {
      c = c << 6 | (static_cast<unsigned char>(bytes[i]) & 0x3Fu);
    }
    std::size_t n = 1;
    while (n < sorted.size() && sorted[n].compare(depth, length, bytes) == 0) ++n;
    taken.emplace_back(c, c);
    special_taken = special_taken || c >= 0x80 || !Escape(c, form).empty();
    choices.push_back(b_.Seq(
        {CharIn({{c, c}}, form), KeyExceptFrom(sorted.first(n), depth + bytes.size(), form)}));
    sorted = sorted.subspan(n);
  }
  const CodePointSet free = Complement(Normalized(std::move(taken)));
  if (special_taken) {
    choices.push_back(b_.Seq({CharIn(free, form), KeyTail(form)}));
    return b_.Alt(std::move(choices));
  }
  // Almost always: what is not plain ASCII is free and becomes one call instead of 80 states.
  CodePointSet plain;
  for (const auto& [lo, hi] : free) {
    for (std::uint32_t c = std::max(lo, 0x20u); c <= std::min(hi, 0x7Fu); ++c) {
      if (Escape(c, form).empty()) plain.emplace_back(c, c);
    }
  }
  const Expr other = b_.Alt({CharIn(plain, form), SpecialChar(form)});
  choices.push_back(b_.Seq({other, KeyTail(form)}));
  return b_.Alt(std::move(choices));
}

Expr TextRules::KeyExcept(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return b_.Seq({b_.Literal("\""), KeyExceptFrom(names, 0, TextForm::kJson)});
}

Expr TextRules::NameExcept(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  std::erase(names, std::string());
  return KeyExceptFrom(names, 0, TextForm::kName);
}

void TextRules::DefineAny() {
  const RuleId value = rules_["value"] = b_.Declare("a value");
  const RuleId object = rules_["object"] = b_.Declare("an object", true);
  const RuleId array = rules_["array"] = b_.Declare("an array", true);
  const Expr any = b_.Call(value);
  const Expr member = b_.Seq({String(TextForm::kJson, 0, -1), Colon(), any});
  const auto list = [&](std::string_view open, Expr item, std::string_view close) {
    return b_.Seq({b_.Literal(open), b_.Optional(b_.Seq({item, b_.Star(b_.Seq({Comma(), item}))})),
                   b_.Literal(close)});
  };
  b_.Define(object, list("{", member, "}"));
  b_.Define(array, list("[", any, "]"));
  b_.Define(value, b_.Alt({b_.Call(object), b_.Call(array), String(TextForm::kJson, 0, -1),
                           Number(), b_.OneOf({"true", "false", "null"})}));
}

Expr TextRules::AnyValue() {
  if (!rules_.contains("value")) DefineAny();
  return b_.Call(rules_["value"]);
}

Expr TextRules::AnyObject() {
  if (!rules_.contains("value")) DefineAny();
  return b_.Call(rules_["object"]);
}

Expr TextRules::AnyArray() {
  if (!rules_.contains("value")) DefineAny();
  return b_.Call(rules_["array"]);
}

}  // namespace k3::grammar
