// Objects and arrays of a schema, as JSON and as the arguments of a tool call.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "k3/chat/attribute.h"
#include "k3/chat/json_text.h"
#include "k3/grammar/schema_compiler_internal.h"
#include "k3/io/json.h"

namespace k3::grammar {
namespace {

constexpr std::size_t kMaxName = 1000;
constexpr std::int64_t kMaxPrefix = 1000;
const Schema kTrue = true;
const Schema kFalse = false;

Expr Control(GrammarBuilder& b, Symbol symbol) { return b.Range(symbol, symbol); }

}  // namespace

Result<SchemaCompiler::ObjectParts> SchemaCompiler::Parts(const Schema& schema,
                                                          const std::string& pointer) {
  ObjectParts parts;
  K3_ASSIGN(parts.min, Count(schema, pointer, "minProperties", 0));
  K3_ASSIGN(parts.max, Count(schema, pointer, "maxProperties", -1));
  const auto more = schema.find("additionalProperties");
  parts.additional_pointer = Below(pointer, "additionalProperties");
  parts.additional = more != schema.end()                       ? &*more
                     : strict_ && schema.contains("properties") ? &kFalse
                                                                : &kTrue;
  if (*parts.additional == false) parts.additional = nullptr;
  std::set<std::string> required;
  if (const auto list = schema.find("required"); list != schema.end()) {
    if (!list->is_array()) return Invalid(pointer, "required", "expected a list of names");
    for (const Schema& name : *list) {
      if (!name.is_string()) return Invalid(pointer, "required", "expected a list of names");
      required.insert(name.get<std::string>());
    }
  }
  const auto properties = schema.find("properties");
  if (properties != schema.end()) {
    if (!properties->is_object()) return Invalid(pointer, "properties", "expected an object");
    for (const auto& [name, value] : properties->items()) {
      parts.properties.push_back(
          {name, Below(Below(pointer, "properties"), name), &value, required.erase(name) == 1});
    }
  }
  for (const std::string& name : required) {  // named nowhere else
    const Schema* value = parts.additional == nullptr ? &kFalse : parts.additional;
    parts.properties.push_back({name, parts.additional_pointer, value, true});
  }
  for (const Property& p : parts.properties) {
    if (p.name.size() > kMaxName) {
      return Refuse(pointer, "properties",
                    fmt::format("a name of more than {} bytes is not supported", kMaxName));
    }
  }
  const auto n = static_cast<std::int64_t>(parts.properties.size());
  const auto n_required = std::count_if(parts.properties.begin(), parts.properties.end(),
                                        [](const Property& p) { return p.required; });
  const bool bounded = parts.max >= 0 && (parts.additional != nullptr || n > parts.max);
  if (n > 0 && (parts.min > n_required || bounded)) {
    return Refuse(pointer, parts.min > n_required ? "minProperties" : "maxProperties",
                  "a bound that the named properties do not imply is not supported");
  }
  return parts;
}

Result<Expr> SchemaCompiler::Additional(const ObjectParts& parts) {
  std::vector<std::string> names;
  for (const Property& p : parts.properties) names.push_back(p.name);
  K3_ASSIGN(const Expr value,
            Value(*parts.additional, parts.additional_pointer, kAnyType, TextForm::kJson));
  if (value == b_.Never()) return value;
  const Expr key = names.empty() ? text_.String(TextForm::kJson, 0, -1) : text_.KeyExcept(names);
  const RuleId rule = b_.Declare(parts.additional_pointer);
  b_.Define(rule, b_.Seq({key, text_.Colon(), value}));
  return b_.Call(rule);
}

Result<Expr> SchemaCompiler::Object(const Schema& schema, const std::string& pointer) {
  K3_ASSIGN(const ObjectParts parts, Parts(schema, pointer));
  const bool any = parts.properties.empty() && parts.additional != nullptr &&
                   *parts.additional == true && parts.min == 0 && parts.max < 0;
  if (any) return text_.AnyObject();
  const RuleId rule = b_.Declare(pointer, true);
  std::vector<GrammarBuilder::ListItem> items;
  for (const Property& p : parts.properties) {
    K3_ASSIGN(const Expr value, Value(*p.schema, p.pointer, kAnyType, TextForm::kJson));
    const Expr key = b_.Literal(chat::JsonText(Schema(p.name), chat::JsonStyle::kCompact));
    const Expr member = b_.Seq({key, text_.Colon(), value});
    items.push_back({member, b_.Seq({text_.Comma(), member}), !p.required});
  }
  if (parts.additional != nullptr && parts.max != 0) {
    K3_ASSIGN(const Expr member, Additional(parts));
    const RuleId next = b_.Declare(parts.additional_pointer);
    b_.Define(next, b_.Seq({text_.Comma(), member}));
    // Bounds other than 0 and none come with no named properties only.
    const bool named = !parts.properties.empty();
    const std::int64_t min = named ? 0 : std::max<std::int64_t>(parts.min - 1, 0);
    const std::int64_t max = named || parts.max < 0 ? -1 : parts.max - 1;
    items.push_back({member == b_.Never() ? member : b_.Seq({member, b_.Counted(next, min, max)}),
                     b_.Counted(next, 1, -1), named || parts.min == 0});
  } else if (parts.min > static_cast<std::int64_t>(parts.properties.size())) {
    items.push_back({b_.Never(), b_.Never(), false});
  }
  b_.Define(rule, b_.Seq({b_.Literal("{"), b_.List(items), b_.Literal("}")}));
  return b_.Call(rule);
}

Result<Expr> SchemaCompiler::Array(const Schema& schema, const std::string& pointer) {
  K3_ASSIGN(const std::int64_t min, Count(schema, pointer, "minItems", 0));
  K3_ASSIGN(const std::int64_t max, Count(schema, pointer, "maxItems", -1));
  const auto items = schema.find("items");
  const auto prefix = schema.find("prefixItems");
  if (items != schema.end() && items->is_array()) {
    return Refuse(pointer, "items", "a list of schemas is not supported here (use prefixItems)");
  }
  if (prefix != schema.end() && (!prefix->is_array() || prefix->empty())) {
    return Invalid(pointer, "prefixItems", "expected a list of schemas");
  }
  const auto n_prefix = prefix == schema.end() ? 0 : static_cast<std::int64_t>(prefix->size());
  if (n_prefix > kMaxPrefix) {
    return Refuse(pointer, "prefixItems",
                  fmt::format("more than {} are not supported", kMaxPrefix));
  }
  if (min == 0 && max < 0 && n_prefix == 0 && (items == schema.end() || *items == true)) {
    return text_.AnyArray();
  }
  if (max >= 0 && min > max) return b_.Never();
  const RuleId rule = b_.Declare(pointer, true);
  const Schema& item_schema = items == schema.end() ? kTrue : *items;
  K3_ASSIGN(const Expr item,
            Value(item_schema, Below(pointer, "items"), kAnyType, TextForm::kJson));
  const auto separated = [&](std::int64_t i, Expr e) {
    return i == 0 ? e : b_.Seq({text_.Comma(), e});
  };
  // From the back: what may follow the first n_prefix items, then each of those.
  Expr rest = b_.Empty();
  if (max < 0 || max > n_prefix) {
    const RuleId next = b_.Declare(Below(pointer, "items"));
    b_.Define(next, b_.Seq({text_.Comma(), item}));
    const std::int64_t more_min = std::max<std::int64_t>(min - n_prefix, 0);
    const std::int64_t more_max = max < 0 ? -1 : max - n_prefix;
    if (n_prefix > 0) {
      rest = b_.Counted(next, more_min, more_max);
    } else {
      rest = b_.Seq({item, b_.Counted(next, std::max<std::int64_t>(more_min - 1, 0),
                                      more_max < 0 ? -1 : more_max - 1)});
      if (min == 0) rest = b_.Optional(rest);
    }
  }
  const std::int64_t last = max < 0 ? n_prefix : std::min(max, n_prefix);
  for (std::int64_t i = last; i-- > 0;) {
    const auto index = static_cast<std::size_t>(i);
    K3_ASSIGN(const Expr e,
              Value((*prefix)[index], Below(Below(pointer, "prefixItems"), std::to_string(i)),
                    kAnyType, TextForm::kJson));
    rest = b_.Seq({separated(i, e), rest});
    if (i >= min) rest = b_.Optional(rest);
  }
  b_.Define(rule, b_.Seq({b_.Literal("["), rest, b_.Literal("]")}));
  return b_.Call(rule);
}

/// Elements of all types the schema allows: the format writes the type beside the value.
Result<Expr> SchemaCompiler::Argument(const Schema& schema, const std::string& pointer, Expr key) {
  struct Kind {
    std::string_view name;
    Types types;
    TextForm form;
  };
  static constexpr std::array<Kind, 6> kKinds{{{"string", kString, TextForm::kRaw},
                                               {"number", kNumber, TextForm::kJson},
                                               {"boolean", kBoolean, TextForm::kJson},
                                               {"object", kObject, TextForm::kJson},
                                               {"array", kArray, TextForm::kJson},
                                               {"null", kNull, TextForm::kJson}}};
  std::vector<Expr> choices;
  for (const Kind& kind : kKinds) {
    K3_ASSIGN(const Expr value, Value(schema, pointer, kind.types, kind.form));
    choices.push_back(b_.Seq(
        {b_.Literal(fmt::format("\" type=\"{}\"", kind.name)), Control(b_, kControlSep), value}));
  }
  return b_.Seq({Control(b_, kControlOpen), b_.Literal("argument key=\""), key,
                 b_.Alt(std::move(choices)), Control(b_, kControlClose), b_.Literal("argument"),
                 Control(b_, kControlSep)});
}

Result<Expr> SchemaCompiler::Arguments(const Schema& schema, const std::string& pointer) {
  K3_ASSIGN(Schema flat, merger_.Flat(schema, pointer));
  if (flat == true) flat = Schema::object();
  if (flat == false) return b_.Never();
  owned_.push_back(std::move(flat));
  const Schema& s = owned_.back();
  if (!s.is_object()) {
    return SchemaError(Code::kInvalidArgument, where_, pointer,
                       "expected a schema: an object or a boolean");
  }
  K3_TRY(CheckKeywords(s, pointer));
  for (const char* key : {"enum", "const", "anyOf", "oneOf"}) {
    if (s.contains(key)) {
      return Refuse(pointer, key, "this keyword is not supported for all parameters at once");
    }
  }
  K3_ASSIGN(const Types types, TypesOf(s, pointer));
  if ((types & kObject) == 0) {
    return Invalid(pointer, "type", "the parameters of a tool are an object");
  }
  K3_ASSIGN(const ObjectParts parts, Parts(s, pointer));
  std::vector<Expr> elements;
  for (const Property& p : parts.properties) {
    K3_ASSIGN(const Expr element,
              Argument(*p.schema, p.pointer, b_.Literal(chat::EscapedAttribute(p.name))));
    elements.push_back(p.required ? element : b_.Optional(element));
  }
  if (parts.additional != nullptr) {
    std::vector<std::string> names;
    for (const Property& p : parts.properties) names.push_back(p.name);
    K3_ASSIGN(const Expr element,
              Argument(*parts.additional, parts.additional_pointer, text_.NameExcept(names)));
    const RuleId rule = b_.Declare(parts.additional_pointer);
    b_.Define(rule, element);
    elements.push_back(b_.Counted(rule, parts.properties.empty() ? parts.min : 0,
                                  parts.properties.empty() ? parts.max : -1));
  }
  return b_.Seq(std::move(elements));
}

}  // namespace k3::grammar
