// From JSON Schema to a grammar of the JSON texts that satisfy it (docs/structured-output.md).
#pragma once

#include <memory>
#include <string_view>

#include "k3/base/status.h"
#include "k3/grammar/grammar.h"
#include "k3/grammar/text_rules.h"

namespace k3::grammar {

inline constexpr std::size_t kMaxSchemaBytes = std::size_t{1} << 20;

struct SchemaOptions {
  /// Objects that do not say additionalProperties have no others than the named ones.
  bool strict = true;
  Spacing spacing = Spacing::kCompact;
};

/// The texts that satisfy `schema` (JSON text of an object or a boolean), written in one way: no
/// white space but that of `spacing`, keys in the order of `properties`, integers without fraction.
/// So some valid texts are left out, and no invalid one is let in.
///
/// Errors start with `where` and name the JSON pointer and the keyword. kInvalidArgument: no
/// schema, one that refers to itself without anything in between, or one that nothing satisfies.
/// kUnsupported: keywords that are not understood (none is ignored, except annotations), and what
/// is too large. kCorrupt: not JSON. Takes well under a second whatever it is given.
Result<std::shared_ptr<const Grammar>> CompileJsonSchema(std::string_view schema,
                                                         const SchemaOptions& options,
                                                         std::string_view where);

/// Any JSON object.
Result<std::shared_ptr<const Grammar>> CompileJsonObject(Spacing spacing);

}  // namespace k3::grammar
