#include "k3/grammar/schema_json_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "k3/io/json.h"

namespace k3::grammar {
namespace {

constexpr int kMaxMergeDepth = 64;
constexpr std::size_t kMaxMergeWork = 1'000'000;  // values copied

std::size_t CountValues(const Schema& value) {
  std::size_t n = 1;
  if (value.is_structured()) {
    for (const Schema& inner : value) n += CountValues(inner);
  }
  return n;
}

std::vector<std::string> TypeList(const Schema& type) {
  std::vector<std::string> out;
  if (type.is_string()) out.push_back(type.get<std::string>());
  if (type.is_array()) {
    for (const Schema& t : type) {
      if (t.is_string()) out.push_back(t.get<std::string>());
    }
  }
  return out;
}

/// The types in both lists; an integer is a number.
Schema CommonTypes(const Schema& a, const Schema& b) {
  const auto has = [](const std::vector<std::string>& list, std::string_view type) {
    return std::find(list.begin(), list.end(), type) != list.end();
  };
  const auto as = TypeList(a), bs = TypeList(b);
  Schema out = Schema::array();
  for (const std::string& type : as) {
    if (has(bs, type) || (type == "integer" && has(bs, "number"))) out.push_back(type);
  }
  for (const std::string& type : bs) {
    if (type == "integer" && has(as, "number") && !has(as, "integer")) out.push_back(type);
  }
  return out;
}

bool IsChoice(std::string_view key) { return key == "anyOf" || key == "oneOf"; }

bool IsObjectPart(std::string_view key) {
  return key == "properties" || key == "additionalProperties";
}

}  // namespace

bool IsAnnotation(std::string_view keyword) {
  static constexpr std::array<std::string_view, 17> kNames{
      "title",    "description", "default",  "examples",    "example",         "$schema",
      "$id",      "id",          "$comment", "$anchor",     "$vocabulary",     "deprecated",
      "readOnly", "writeOnly",   "$defs",    "definitions", "contentMediaType"};
  return std::find(kNames.begin(), kNames.end(), keyword) != kNames.end();
}

std::string Below(std::string_view pointer, std::string_view key) {
  std::string out(pointer);
  out += '/';
  for (const char c : key) {
    if (c == '~') {
      out += "~0";
    } else if (c == '/') {
      out += "~1";
    } else {
      out += c;
    }
  }
  return out;
}

Error SchemaError(Code code, std::string_view where, std::string_view pointer,
                  std::string_view what) {
  return {code, fmt::format("{}: {}: {}", where, Printable(pointer), what)};
}

Result<const Schema*> SchemaMerger::Target(const Schema& ref, std::string_view pointer) const {
  const std::string at = Below(pointer, "$ref");
  if (!ref.is_string()) {
    return SchemaError(Code::kInvalidArgument, where_, at, "expected a string");
  }
  const auto text = ref.get<std::string>();
  if (text.empty() || text[0] != '#' || (text.size() > 1 && text[1] != '/')) {
    return SchemaError(Code::kUnsupported, where_, at,
                       fmt::format("found \"{}\", only pointers into this schema (#/...) are "
                                   "supported",
                                   Printable(text, 60)));
  }
  const Schema* target = &root_;
  for (std::size_t i = 2; i <= text.size() && text.size() > 1;) {
    const std::size_t end = std::min(text.find('/', i), text.size());
    std::string key;
    for (std::size_t j = i; j < end; ++j) {
      const bool escape =
          text[j] == '~' && j + 1 < end && (text[j + 1] == '0' || text[j + 1] == '1');
      key += escape ? (text[++j] == '0' ? '~' : '/') : text[j];
    }
    const Schema* next = nullptr;
    if (target->is_object()) {
      const auto it = target->find(key);
      if (it != target->end()) next = &*it;
    } else if (target->is_array() && !key.empty() && key.size() <= 6 &&
               key.find_first_not_of("0123456789") == key.npos) {
      const auto index = static_cast<std::size_t>(std::stoul(key));
      if (index < target->size()) next = &(*target)[index];
    }
    if (next == nullptr) {
      return SchemaError(Code::kInvalidArgument, where_, at,
                         fmt::format("\"{}\" is not in the schema", Printable(text, 60)));
    }
    target = next;
    i = end + 1;
  }
  return target;
}

Status SchemaMerger::Charge(const Schema& schema, std::string_view pointer) {
  work_ += CountValues(schema);
  if (work_ <= kMaxMergeWork) return {};
  return SchemaError(Code::kUnsupported, where_, pointer,
                     "merging what is required at once takes too long");
}

Result<Schema> SchemaMerger::Flat(const Schema& schema, std::string_view pointer, int depth) {
  if (depth > kMaxMergeDepth) {
    return SchemaError(Code::kInvalidArgument, where_, pointer,
                       "the schema refers to itself without anything in between, or combines "
                       "schemas too deep");
  }
  K3_TRY(Charge(schema, pointer));
  if (!schema.is_object()) return schema;
  const auto ref = schema.find("$ref");
  const auto all = schema.find("allOf");
  if (ref == schema.end() && all == schema.end()) return schema;
  Schema own = schema;
  own.erase("$ref");
  own.erase("allOf");
  Result<Schema> out = own;
  if (ref != schema.end()) {
    K3_ASSIGN(const Schema* target, Target(*ref, pointer));
    K3_ASSIGN(const Schema flat, Flat(*target, ref->get<std::string>(), depth + 1));
    out = Merge(flat, *out, pointer, depth + 1);
    K3_TRY(out.status());
  }
  if (all == schema.end()) return out;
  const std::string at = Below(pointer, "allOf");
  if (!all->is_array() || all->empty()) {
    return SchemaError(Code::kInvalidArgument, where_, at, "expected a list of schemas");
  }
  for (std::size_t i = 0; i < all->size(); ++i) {
    const std::string inner = Below(at, std::to_string(i));
    K3_ASSIGN(const Schema flat, Flat((*all)[i], inner, depth + 1));
    out = Merge(*out, flat, inner, depth + 1);
    K3_TRY(out.status());
  }
  return out;
}

/// Properties that only one side names must satisfy what the other side says of additional ones.
Status SchemaMerger::MergeObjectParts(const Schema& a, const Schema& b, Schema& out,
                                      std::string_view pointer, int depth) {
  const auto part = [](const Schema& s, const char* key) {
    const auto it = s.find(key);
    return it == s.end() ? nullptr : &*it;
  };
  const Schema* more[2] = {part(a, "additionalProperties"), part(b, "additionalProperties")};
  const Schema* props[2] = {part(a, "properties"), part(b, "properties")};
  for (const Schema* p : props) {
    if (p != nullptr && !p->is_object()) {
      return SchemaError(Code::kInvalidArgument, where_, Below(pointer, "properties"),
                         "expected an object");
    }
  }
  if (props[0] != nullptr || props[1] != nullptr) {
    Schema merged = Schema::object();
    for (std::size_t side = 0; side < 2; ++side) {
      if (props[side] == nullptr) continue;
      const Schema* other = props[1 - side];
      for (const auto& [name, schema] : props[side]->items()) {
        const bool shared = other != nullptr && other->contains(name);
        if (shared && side == 1) continue;  // done
        const Schema* with = shared ? &(*other)[name] : more[1 - side];
        if (with == nullptr) {
          K3_TRY(Charge(schema, pointer));
          merged[name] = schema;
          continue;
        }
        const std::string at = Below(Below(pointer, "properties"), name);
        // Both may be references; a merge needs what they stand for.
        K3_ASSIGN(const Schema left, Flat(schema, at, depth + 1));
        K3_ASSIGN(const Schema right, Flat(*with, at, depth + 1));
        K3_ASSIGN(merged[name], Merge(left, right, at, depth + 1));
      }
    }
    out["properties"] = std::move(merged);
  }
  if (more[0] == nullptr && more[1] == nullptr) return {};
  if (more[0] == nullptr || more[1] == nullptr) {
    out["additionalProperties"] = more[0] != nullptr ? *more[0] : *more[1];
    return {};
  }
  const std::string at = Below(pointer, "additionalProperties");
  K3_ASSIGN(const Schema left, Flat(*more[0], at, depth + 1));
  K3_ASSIGN(const Schema right, Flat(*more[1], at, depth + 1));
  K3_ASSIGN(out["additionalProperties"], Merge(left, right, at, depth + 1));
  return {};
}

Status SchemaMerger::MergeChoices(Schema& into, const Schema& choices, std::string_view pointer,
                                  int depth) {
  const auto mine = into.find("anyOf");
  if (mine == into.end()) {
    into["anyOf"] = choices;
    return {};
  }
  if (!mine->is_array() || !choices.is_array()) {
    return SchemaError(Code::kInvalidArgument, where_, Below(pointer, "anyOf"),
                       "expected a list of schemas");
  }
  Schema product = Schema::array();
  for (const Schema& a : *mine) {
    for (const Schema& b : choices) {
      K3_ASSIGN(const Schema left, Flat(a, pointer, depth + 1));
      K3_ASSIGN(const Schema right, Flat(b, pointer, depth + 1));
      K3_ASSIGN(Schema both, Merge(left, right, pointer, depth + 1));
      product.push_back(std::move(both));
    }
  }
  into["anyOf"] = std::move(product);
  return {};
}

/// `into` has the keyword already.
Status SchemaMerger::MergeKeyword(Schema& into, const std::string& key, const Schema& value,
                                  std::string_view pointer, int depth) {
  Schema& mine = into[key];
  if (mine == value || IsAnnotation(key)) return {};
  const std::string at = Below(pointer, key);
  const auto starts = [&key](std::string_view s) { return key.starts_with(s); };
  if (key == "type") {
    mine = CommonTypes(mine, value);
    return {};
  }
  if (key == "required" && mine.is_array() && value.is_array()) {
    for (const Schema& name : value) {
      if (std::find(mine.begin(), mine.end(), name) == mine.end()) mine.push_back(name);
    }
    return {};
  }
  if (key == "enum" && mine.is_array() && value.is_array()) {
    Schema common = Schema::array();
    for (const Schema& v : mine) {
      if (std::find(value.begin(), value.end(), v) != value.end()) common.push_back(v);
    }
    mine = std::move(common);
    return {};
  }
  if (key == "items") {
    K3_ASSIGN(const Schema left, Flat(mine, at, depth + 1));
    K3_ASSIGN(const Schema right, Flat(value, at, depth + 1));
    K3_ASSIGN(mine, Merge(left, right, at, depth + 1));
    return {};
  }
  const bool bound = starts("min") || starts("max") || starts("exclusive");
  if (bound && mine.is_number() && value.is_number()) {
    const bool lower = starts("min") || starts("exclusiveMin");
    if (lower == (value.get<double>() > mine.get<double>())) mine = value;
    return {};
  }
  return SchemaError(Code::kUnsupported, where_, at,
                     "different values that must hold at once are not supported");
}

Result<Schema> SchemaMerger::Merge(const Schema& a, const Schema& b, std::string_view pointer,
                                   int depth) {
  if (depth > kMaxMergeDepth) {
    return SchemaError(Code::kUnsupported, where_, pointer, "schemas are combined too deep");
  }
  for (const Schema* s : {&a, &b}) {
    if (!s->is_object() && !s->is_boolean()) {
      return SchemaError(Code::kInvalidArgument, where_, pointer,
                         "expected a schema: an object or a boolean");
    }
  }
  if (a.is_boolean()) return a.get<bool>() ? b : a;
  if (b.is_boolean()) return b.get<bool>() ? a : b;
  K3_TRY(Charge(a, pointer));
  K3_TRY(Charge(b, pointer));
  Schema out = Schema::object();
  for (const Schema* side : {&a, &b}) {
    for (const auto& [key, value] : side->items()) {
      if (IsObjectPart(key) || key == "$defs" || key == "definitions") continue;
      if (IsChoice(key)) {
        K3_TRY(MergeChoices(out, value, pointer, depth));
      } else if (key == "const") {
        const Schema list = Schema::array({value});
        if (out.contains("enum")) {
          K3_TRY(MergeKeyword(out, "enum", list, pointer, depth));
        } else {
          out["enum"] = list;
        }
      } else if (out.contains(key)) {
        K3_TRY(MergeKeyword(out, key, value, pointer, depth));
      } else {
        out[key] = value;
      }
    }
  }
  K3_TRY(MergeObjectParts(a, b, out, pointer, depth));
  return out;
}

}  // namespace k3::grammar
