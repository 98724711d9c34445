// Turns schemas into expressions of a builder. Internal to the module.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "k3/base/status.h"
#include "k3/grammar/grammar.h"
#include "k3/grammar/pattern.h"
#include "k3/grammar/schema_json_internal.h"
#include "k3/grammar/text_rules.h"

namespace k3::grammar {

/// Sets of JSON types.
using Types = std::uint32_t;
inline constexpr Types kNull = 1, kBoolean = 2, kInteger = 4, kFraction = 8, kString = 16,
                       kObject = 32, kArray = 64, kNumber = kInteger | kFraction, kAnyType = 127;

/// Checks and parses; keys keep their order.
Result<Schema> ParseSchema(std::string_view text, std::string_view where);

/// For one schema document: references are looked up in `root`. Several compilers may share a
/// builder. Call Finish when all expressions are made.
class SchemaCompiler {
 public:
  SchemaCompiler(GrammarBuilder& builder, TextRules& text, const Schema& root, bool strict,
                 std::string_view where);

  /// Values of `schema` that have one of the types in `allowed`. Strings are in `form`.
  Result<Expr> Value(const Schema& schema, const std::string& pointer, Types allowed,
                     TextForm form);
  /// The arguments of a tool call in the chat format, as elements in the order of the properties.
  /// `schema` must describe objects.
  Result<Expr> Arguments(const Schema& schema, const std::string& pointer);
  /// Compiles what is referred to.
  Status Finish();

 private:
  struct Property {
    std::string name;
    std::string pointer;
    const Schema* schema = nullptr;
    bool required = false;
  };
  struct ObjectParts {
    std::vector<Property> properties;
    const Schema* additional = nullptr;  // null: none are allowed
    std::string additional_pointer;
    std::int64_t min = 0, max = -1;  // number of properties
  };
  struct Pending {
    const Schema* schema;
    std::string pointer;
    Types allowed;
    TextForm form;
    RuleId rule;
  };

  Result<Expr> Plain(const Schema& schema, const std::string& pointer, Types allowed,
                     TextForm form);
  Result<Expr> Choices(const Schema& schema, const std::string& pointer, Types allowed,
                       TextForm form);
  Result<Expr> Enum(const Schema& schema, const std::string& pointer, Types allowed, TextForm form);
  Result<Expr> Reference(const Schema& schema, const std::string& pointer, Types allowed,
                         TextForm form);
  Result<Expr> AnyOf(Types allowed, TextForm form);
  Result<Expr> OfType(const Schema& schema, const std::string& pointer, Types type, TextForm form);
  Result<Expr> Text(const Schema& schema, const std::string& pointer, TextForm form);
  Result<Expr> Numbers(const Schema& schema, const std::string& pointer, Types types);
  Result<Expr> Object(const Schema& schema, const std::string& pointer);
  Result<Expr> Array(const Schema& schema, const std::string& pointer);
  Result<ObjectParts> Parts(const Schema& schema, const std::string& pointer);
  Result<Expr> Additional(const ObjectParts& parts);
  Result<Expr> Argument(const Schema& schema, const std::string& pointer, Expr key);

  Status CheckKeywords(const Schema& schema, const std::string& pointer) const;
  Result<Types> TypesOf(const Schema& schema, const std::string& pointer) const;
  Result<NumberRange> Bounds(const Schema& schema, const std::string& pointer, bool integers) const;
  /// A count like minLength; `fallback` when absent.
  Result<std::int64_t> Count(const Schema& schema, const std::string& pointer, const char* key,
                             std::int64_t fallback) const;
  Error Refuse(const std::string& pointer, std::string_view key, std::string_view what) const;
  Error Invalid(const std::string& pointer, std::string_view key, std::string_view what) const;

  GrammarBuilder& b_;
  TextRules& text_;
  const Schema& root_;
  bool strict_;
  std::string where_;
  SchemaMerger merger_;
  int depth_ = 0;
  std::size_t values_ = 0;
  std::deque<Schema> owned_;  // merged schemas that something points into
  std::map<std::tuple<const Schema*, Types, TextForm>, RuleId> references_;
  std::vector<Pending> pending_;
};

}  // namespace k3::grammar
