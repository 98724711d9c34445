// JSON Schemas as data: references, and several schemas that hold at once made one.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "k3/base/status.h"

namespace k3::grammar {

using Schema = nlohmann::ordered_json;  // keys in the order of the text

/// Words without effect on what is valid.
bool IsAnnotation(std::string_view keyword);

/// `key` below `pointer`, with ~ and / escaped.
std::string Below(std::string_view pointer, std::string_view key);

/// An error at a keyword: "WHERE: POINTER: WHAT".
Error SchemaError(Code code, std::string_view where, std::string_view pointer,
                  std::string_view what);

/// Looks up references and merges. The work is bounded: what needs more is refused.
class SchemaMerger {
 public:
  SchemaMerger(const Schema& root, std::string_view where) : root_(root), where_(where) {}

  /// The target of a reference like "#", "#/$defs/NAME" or any other JSON pointer into the schema.
  Result<const Schema*> Target(const Schema& ref, std::string_view pointer) const;
  /// An equivalent schema that has neither $ref nor allOf itself (what is inside it may). `pointer`
  /// is its place, for messages.
  Result<Schema> Flat(const Schema& schema, std::string_view pointer, int depth = 0);
  /// What satisfies both. Boolean schemas are true and false; a contradiction may come out as
  /// false.
  Result<Schema> Merge(const Schema& a, const Schema& b, std::string_view pointer, int depth = 0);

 private:
  Status Charge(const Schema& schema, std::string_view pointer);
  Status MergeKeyword(Schema& into, const std::string& key, const Schema& value,
                      std::string_view pointer, int depth);
  Status MergeObjectParts(const Schema& a, const Schema& b, Schema& out, std::string_view pointer,
                          int depth);
  Status MergeChoices(Schema& into, const Schema& choices, std::string_view pointer, int depth);

  const Schema& root_;
  std::string where_;
  std::size_t work_ = 0;
};

}  // namespace k3::grammar
