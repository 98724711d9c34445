#include "k3/chat/json_text.h"

#include <charconv>
#include <nlohmann/json.hpp>

namespace k3::chat {
namespace {

template <class Json>
void Write(const Json& value, std::string_view comma, std::string_view colon, std::string& out) {
  if (value.is_number_float()) {
    out += DoubleText(value.template get<double>());
  } else if (value.is_object()) {
    out += '{';
    std::string_view before;
    for (const auto& [key, member] : value.items()) {
      out += before;
      out += Json(key).dump();
      out += colon;
      Write(member, comma, colon, out);
      before = comma;
    }
    out += '}';
  } else if (value.is_array()) {
    out += '[';
    std::string_view before;
    for (const auto& element : value) {
      out += before;
      Write(element, comma, colon, out);
      before = comma;
    }
    out += ']';
  } else {
    out += value.dump();
  }
}

template <class Json>
std::string Dump(const Json& value, JsonStyle style) {
  std::string out;
  const bool compact = style == JsonStyle::kCompact;
  Write(value, compact ? "," : ", ", compact ? ":" : ": ", out);
  return out;
}

}  // namespace

std::string JsonText(const nlohmann::ordered_json& value, JsonStyle style) {
  return Dump(value, style);
}

std::string JsonText(const nlohmann::json& value, JsonStyle style) { return Dump(value, style); }

std::string DoubleText(double value) {
  char buffer[400];
  const auto format = [&](std::chars_format form) {
    const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, form).ptr;
    return std::string(buffer, end);
  };
  const std::string scientific = format(std::chars_format::scientific);
  const int exponent = std::stoi(scientific.substr(scientific.find('e') + 1));
  if (exponent < -4 || exponent >= 16) return scientific;
  std::string fixed = format(std::chars_format::fixed);
  if (fixed.find('.') == fixed.npos) fixed += ".0";
  return fixed;
}

}  // namespace k3::chat
