// JSON for hostile input: nlohmann's parser behind stricter rules, and typed, range-checked access.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"

namespace k3 {

inline constexpr int kMaxJsonDepth = 64;
inline constexpr std::size_t kMaxJsonValues = std::size_t{1} << 23;  // bounds the memory of a parse

/// Parses one JSON document. Refuses duplicate keys at any level, nesting deeper than
/// kMaxJsonDepth, more than kMaxJsonValues values, invalid UTF-8, numbers no double can hold and
/// trailing text. `where` starts every message.
Result<nlohmann::json> ParseJson(std::string_view text, std::string_view where);

/// The same with keys in the order they stand in, for a file that is changed and written again.
/// Slow for objects of many keys: refuses texts of more than 1 MiB.
Result<nlohmann::ordered_json> ParseOrderedJson(std::string_view text, std::string_view where);

/// Text from a file, fit for a one-line message: control and non-ASCII bytes become '?', and what
/// is longer than `limit` is cut.
std::string Printable(std::string_view text, std::size_t limit = 160);

/// A value as it stands in the file, cut to a readable length.
std::string PrintableValue(const nlohmann::json& value);

/// Typed access to one JSON object. Holds a reference to it. A null value counts as an absent key.
/// Messages read "WHERE: KEY is VALUE, expected ..." with KEY a dotted path; a missing required key
/// is "WHERE: key KEY is missing". Integers must be written as integers (64.0 is refused).
class JsonReader {
 public:
  /// `object` must be a JSON object; `path` is the dotted path of the object, empty at the root.
  JsonReader(const nlohmann::json& object, std::string_view where, std::string_view path = "");

  bool Has(std::string_view key) const { return Find(key) != nullptr; }
  /// nullptr when the key is absent or null.
  const nlohmann::json* Find(std::string_view key) const;
  /// The reader of a nested object; nullopt when absent; an error when it is not an object.
  Result<std::optional<JsonReader>> Object(std::string_view key) const;

  Result<std::int64_t> Int(std::string_view key, std::int64_t lo, std::int64_t hi) const;
  Result<std::int64_t> Int(std::string_view key, std::int64_t lo, std::int64_t hi,
                           std::int64_t fallback) const;
  Result<std::optional<std::int64_t>> OptInt(std::string_view key, std::int64_t lo,
                                             std::int64_t hi) const;
  /// Finite numbers in [lo, hi]; an integer literal is a number too.
  Result<double> Number(std::string_view key, double lo, double hi) const;
  Result<std::optional<double>> OptNumber(std::string_view key, double lo, double hi) const;
  Result<std::optional<bool>> OptBool(std::string_view key) const;
  Result<bool> Bool(std::string_view key, bool fallback) const;
  Result<std::string> String(std::string_view key) const;
  Result<std::optional<std::string>> OptString(std::string_view key) const;
  /// A list of integers in [lo, hi]; `scalar_too` accepts a single integer as a list of one.
  Result<std::optional<std::vector<std::int64_t>>> OptIntList(std::string_view key, std::int64_t lo,
                                                              std::int64_t hi,
                                                              bool scalar_too = false) const;

  const nlohmann::json& object() const { return *object_; }
  const std::string& where() const { return where_; }
  std::string Path(std::string_view key) const;
  Error Missing(std::string_view key) const;
  /// "WHERE: KEY is VALUE, expected EXPECTED"
  Error Bad(std::string_view key, const nlohmann::json& value, std::string_view expected) const;

 private:
  const nlohmann::json* object_;
  std::string where_;
  std::string path_;
};

}  // namespace k3
