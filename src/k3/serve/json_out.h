// Writing JSON for clients.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

namespace k3::serve {

using Json = nlohmann::ordered_json;

/// One line; bytes that are not UTF-8 become U+FFFD, numbers that are not finite null.
inline std::string Dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// One server-sent event.
inline std::string Event(const Json& value) { return "data: " + Dump(value) + "\n\n"; }

/// A log-probability as clients can read it: minus infinity has no JSON.
inline Json LogprobJson(double value) { return std::isfinite(value) ? value : -9999.0; }

}  // namespace k3::serve
