// JSON as Python's json.dumps(ensure_ascii=False) writes it: the chat format was defined with it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace k3::chat {

enum class JsonStyle {
  kCompact,  // {"a":1,"b":[2]}
  kSpaced,   // {"a": 1, "b": [2]}
};

/// Keys in the order the value has them. An integer beyond 64 bits has already become a double and
/// is written as one. Values may be nested as deep as ParseJson allows.
std::string JsonText(const nlohmann::ordered_json& value, JsonStyle style);
std::string JsonText(const nlohmann::json& value, JsonStyle style);  // sorted keys

/// A finite double as Python's repr: shortest digits, plain from 1e-4 to below 1e16.
std::string DoubleText(double value);

}  // namespace k3::chat
