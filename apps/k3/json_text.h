// Printing JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace k3::app {

using Json = nlohmann::ordered_json;

/// The value and a line end. Strings that are not UTF-8 (file names, half characters) get U+FFFD.
inline std::string JsonText(const Json& value, int indent = -1) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace k3::app
