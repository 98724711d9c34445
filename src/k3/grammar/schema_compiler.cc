#include "k3/grammar/schema_compiler_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "k3/chat/json_text.h"
#include "k3/grammar/schema.h"
#include "k3/io/json.h"

namespace k3::grammar {
namespace {

constexpr int kMaxDepth = 200;              // schemas inside each other, merged ones included
constexpr std::size_t kMaxValues = 50'000;  // schemas that are visited

constexpr std::array<std::string_view, 26> kKeywords{"$ref",
                                                     "allOf",
                                                     "anyOf",
                                                     "oneOf",
                                                     "type",
                                                     "nullable",
                                                     "enum",
                                                     "const",
                                                     "properties",
                                                     "required",
                                                     "additionalProperties",
                                                     "minProperties",
                                                     "maxProperties",
                                                     "items",
                                                     "prefixItems",
                                                     "minItems",
                                                     "maxItems",
                                                     "uniqueItems",
                                                     "minLength",
                                                     "maxLength",
                                                     "pattern",
                                                     "format",
                                                     "minimum",
                                                     "maximum",
                                                     "exclusiveMinimum",
                                                     "exclusiveMaximum"};

struct TypeName {
  std::string_view name;
  Types types;
};
constexpr std::array<TypeName, 7> kTypeNames{{{"null", kNull},
                                              {"boolean", kBoolean},
                                              {"integer", kInteger},
                                              {"number", kNumber},
                                              {"string", kString},
                                              {"object", kObject},
                                              {"array", kArray}}};

Types TypeOf(const Schema& value) {
  if (value.is_null()) return kNull;
  if (value.is_boolean()) return kBoolean;
  if (value.is_number_float()) {
    const auto d = value.get<double>();
    return d == static_cast<double>(static_cast<std::int64_t>(std::clamp(d, -1e15, 1e15)))
               ? kInteger
               : kFraction;
  }
  if (value.is_number()) return kInteger;
  if (value.is_string()) return kString;
  return value.is_object() ? kObject : kArray;
}

/// Without "type", the types that the other keywords speak of.
Types ImpliedTypes(const Schema& schema) {
  static constexpr std::array<std::pair<std::string_view, Types>, 16> kImplied{{
      {"properties", kObject},
      {"required", kObject},
      {"additionalProperties", kObject},
      {"minProperties", kObject},
      {"maxProperties", kObject},
      {"items", kArray},
      {"prefixItems", kArray},
      {"minItems", kArray},
      {"maxItems", kArray},
      {"minLength", kString},
      {"maxLength", kString},
      {"pattern", kString},
      {"minimum", kNumber},
      {"maximum", kNumber},
      {"exclusiveMinimum", kNumber},
      {"exclusiveMaximum", kNumber},
  }};
  Types types = 0;
  for (const auto& [key, implied] : kImplied) {
    if (schema.contains(key)) types |= implied;
  }
  if (types == 0 && schema.contains("format")) types = kString;
  return types == 0 ? kAnyType : types;
}

}  // namespace

Result<Schema> ParseSchema(std::string_view text, std::string_view where) {
  if (text.size() > kMaxSchemaBytes) {
    return Error{Code::kUnsupported, fmt::format("{}: the schema has {} bytes, at most {} are read",
                                                 where, text.size(), kMaxSchemaBytes)};
  }
  K3_TRY(ParseJson(text, where).status());
  // Again, now keeping the order of the keys; the first parse has shown that it is safe.
  return Schema::parse(text.begin(), text.end(), nullptr, false);
}

SchemaCompiler::SchemaCompiler(GrammarBuilder& builder, TextRules& text, const Schema& root,
                               bool strict, std::string_view where)
    : b_(builder), text_(text), root_(root), strict_(strict), where_(where), merger_(root, where) {}

Error SchemaCompiler::Refuse(const std::string& pointer, std::string_view key,
                             std::string_view what) const {
  return SchemaError(Code::kUnsupported, where_, Below(pointer, key), what);
}

Error SchemaCompiler::Invalid(const std::string& pointer, std::string_view key,
                              std::string_view what) const {
  return SchemaError(Code::kInvalidArgument, where_, Below(pointer, key), what);
}

Status SchemaCompiler::CheckKeywords(const Schema& schema, const std::string& pointer) const {
  for (const auto& [key, value] : schema.items()) {
    if (IsAnnotation(key)) continue;
    if (std::find(kKeywords.begin(), kKeywords.end(), key) == kKeywords.end()) {
      return Refuse(pointer, key, "this keyword is not supported");
    }
    if (key == "uniqueItems" && value != false) {
      return Refuse(pointer, key, "this keyword is not supported");
    }
  }
  return {};
}

Result<Types> SchemaCompiler::TypesOf(const Schema& schema, const std::string& pointer) const {
  const auto type = schema.find("type");
  Types types = 0;
  if (type == schema.end()) {
    types = ImpliedTypes(schema);
  } else {
    const Schema list = type->is_array() ? *type : Schema::array({*type});
    for (const Schema& t : list) {
      const auto known = std::find_if(kTypeNames.begin(), kTypeNames.end(),
                                      [&](const TypeName& n) { return t == n.name; });
      if (known == kTypeNames.end()) {
        return Invalid(pointer, "type",
                       fmt::format("found {}, expected null, boolean, integer, number, string, "
                                   "object, array or a list of them",
                                   Printable(t.dump(-1, ' ', true), 40)));
      }
      types |= known->types;
    }
  }
  const auto nullable = schema.find("nullable");
  if (nullable == schema.end()) return types;
  if (!nullable->is_boolean()) return Invalid(pointer, "nullable", "expected true or false");
  return nullable->get<bool>() ? types | kNull : types;
}

Result<std::int64_t> SchemaCompiler::Count(const Schema& schema, const std::string& pointer,
                                           const char* key, std::int64_t fallback) const {
  const auto value = schema.find(key);
  if (value == schema.end()) return fallback;
  constexpr double kLargest = INT32_MAX;
  const bool whole = value->is_number() && TypeOf(*value) == kInteger;
  const double d = value->is_number() ? value->get<double>() : -1;
  if (!whole || d < 0) return Invalid(pointer, key, "expected a whole number, 0 or more");
  if (d > kLargest) {
    return Refuse(pointer, key, fmt::format("more than {} is not supported", INT32_MAX));
  }
  return static_cast<std::int64_t>(d);
}

Result<Expr> SchemaCompiler::Value(const Schema& schema, const std::string& pointer, Types allowed,
                                   TextForm form) {
  if (schema.is_boolean()) return schema.get<bool>() ? AnyOf(allowed, form) : b_.Never();
  if (!schema.is_object()) {
    return SchemaError(Code::kInvalidArgument, where_, pointer,
                       "expected a schema: an object or a boolean");
  }
  if (++values_ > kMaxValues || depth_ >= kMaxDepth) {
    return SchemaError(Code::kUnsupported, where_, pointer,
                       "the schema is too large, nested too deep or refers to itself without end");
  }
  ++depth_;
  K3_TRY(CheckKeywords(schema, pointer));
  auto out = [&]() -> Result<Expr> {
    if (schema.contains("allOf")) {
      K3_ASSIGN(Schema flat, merger_.Flat(schema, pointer));
      owned_.push_back(std::move(flat));
      return Value(owned_.back(), pointer, allowed, form);
    }
    if (schema.contains("$ref")) return Reference(schema, pointer, allowed, form);
    if (schema.contains("anyOf") || schema.contains("oneOf")) {
      return Choices(schema, pointer, allowed, form);
    }
    if (schema.contains("enum") || schema.contains("const")) {
      return Enum(schema, pointer, allowed, form);
    }
    return Plain(schema, pointer, allowed, form);
  }();
  --depth_;
  return out;
}

Result<Expr> SchemaCompiler::Reference(const Schema& schema, const std::string& pointer,
                                       Types allowed, TextForm form) {
  for (const auto& [key, value] : schema.items()) {
    if (key == "$ref" || IsAnnotation(key)) continue;
    K3_ASSIGN(Schema flat, merger_.Flat(schema, pointer));  // it has words of its own
    owned_.push_back(std::move(flat));
    return Value(owned_.back(), pointer, allowed, form);
  }
  const Schema& ref = schema["$ref"];
  K3_ASSIGN(const Schema* target, merger_.Target(ref, pointer));
  const auto name = ref.get<std::string>();
  const auto [it, fresh] = references_.try_emplace({target, allowed, form}, 0);
  if (fresh) {
    it->second = b_.Declare(name);
    pending_.push_back({target, name, allowed, form, it->second});
  }
  return b_.Call(it->second);
}

Status SchemaCompiler::Finish() {
  while (!pending_.empty()) {
    const Pending next = pending_.back();
    pending_.pop_back();
    K3_ASSIGN(const Expr body, Value(*next.schema, next.pointer, next.allowed, next.form));
    b_.Define(next.rule, body);
  }
  return {};
}

/// What stands beside the choices must hold as well.
Result<Expr> SchemaCompiler::Choices(const Schema& schema, const std::string& pointer,
                                     Types allowed, TextForm form) {
  const char* key = schema.contains("anyOf") ? "anyOf" : "oneOf";
  const Schema& list = schema[key];
  if (!list.is_array() || list.empty()) return Invalid(pointer, key, "expected a list of schemas");
  Schema beside = Schema::object();
  for (const auto& [name, value] : schema.items()) {
    if (name != key && !IsAnnotation(name) && name != "nullable") beside[name] = value;
  }
  std::vector<Expr> choices;
  if (const auto nullable = schema.find("nullable"); nullable != schema.end()) {
    if (*nullable == true && (allowed & kNull) != 0) choices.push_back(b_.Literal("null"));
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string at = Below(Below(pointer, key), std::to_string(i));
    const Schema* branch = &list[i];
    if (!beside.empty()) {
      K3_ASSIGN(const Schema flat, merger_.Flat(*branch, at));
      K3_ASSIGN(Schema both, merger_.Merge(beside, flat, at));
      owned_.push_back(std::move(both));
      branch = &owned_.back();
    }
    K3_ASSIGN(const Expr choice, Value(*branch, at, allowed, form));
    choices.push_back(choice);
  }
  return b_.Alt(std::move(choices));
}

Result<Expr> SchemaCompiler::Enum(const Schema& schema, const std::string& pointer, Types allowed,
                                  TextForm form) {
  const char* key = schema.contains("enum") ? "enum" : "const";
  for (const auto& [name, value] : schema.items()) {
    if (name == key || name == "type" || name == "nullable" || IsAnnotation(name)) continue;
    return Refuse(pointer, name, fmt::format("this keyword beside {} is not supported", key));
  }
  const Schema list = schema.contains("enum") ? schema["enum"] : Schema::array({schema["const"]});
  if (!list.is_array()) return Invalid(pointer, key, "expected a list of values");
  K3_ASSIGN(Types types, TypesOf(schema, pointer));
  types &= allowed;
  const auto style =
      text_.spacing() == Spacing::kSpaced ? chat::JsonStyle::kSpaced : chat::JsonStyle::kCompact;
  std::vector<std::string> texts;
  for (const Schema& value : list) {
    if ((TypeOf(value) & types) == 0) continue;
    const bool raw = form == TextForm::kRaw && value.is_string();
    texts.push_back(raw ? value.get<std::string>() : chat::JsonText(value, style));
  }
  const auto nullable = schema.find("nullable");
  if (nullable != schema.end() && *nullable == true && (types & kNull) != 0) {
    texts.emplace_back("null");
  }
  return b_.OneOf(std::move(texts));
}

Result<Expr> SchemaCompiler::AnyOf(Types allowed, TextForm form) {
  if (form == TextForm::kJson && allowed == kAnyType) return text_.AnyValue();
  static const Schema kEverything = Schema::object();
  std::vector<Expr> choices;
  for (const Types type : {kNull, kBoolean, kNumber, kString, kObject, kArray}) {
    if ((allowed & type) == 0) continue;
    K3_ASSIGN(const Expr choice, OfType(kEverything, "#", allowed & type, form));
    choices.push_back(choice);
  }
  return b_.Alt(std::move(choices));
}

Result<Expr> SchemaCompiler::Plain(const Schema& schema, const std::string& pointer, Types allowed,
                                   TextForm form) {
  K3_ASSIGN(Types types, TypesOf(schema, pointer));
  types &= allowed;
  // {} and the like; with "strict" too, since there is nothing to be strict about.
  const bool empty = std::all_of(schema.items().begin(), schema.items().end(),
                                 [](const auto& item) { return IsAnnotation(item.key()); });
  if (empty) return AnyOf(types, form);
  std::vector<Expr> choices;
  for (const Types type : {kNull, kBoolean, kNumber, kString, kObject, kArray}) {
    if ((types & type) == 0) continue;
    K3_ASSIGN(const Expr choice, OfType(schema, pointer, types & type, form));
    choices.push_back(choice);
  }
  return b_.Alt(std::move(choices));
}

/// `type` is one type, or a part of kNumber.
Result<Expr> SchemaCompiler::OfType(const Schema& schema, const std::string& pointer, Types type,
                                    TextForm form) {
  switch (type) {
    case kNull:
      return b_.Literal("null");
    case kBoolean:
      return b_.OneOf({"true", "false"});
    case kString:
      return Text(schema, pointer, form);
    case kObject:
      return Object(schema, pointer);
    case kArray:
      return Array(schema, pointer);
    default:
      return Numbers(schema, pointer, type);
  }
}

}  // namespace k3::grammar
