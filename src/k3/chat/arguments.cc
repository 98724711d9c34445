#include "k3/chat/arguments_internal.h"

#include <nlohmann/json.hpp>

#include "k3/io/json.h"

namespace k3::chat {
namespace {

using nlohmann::json;

/// `utf8` as it stands between the quotes of a JSON string.
std::string Quoted(std::string_view utf8) {
  const std::string text = json(utf8).dump();
  return text.substr(1, text.size() - 2);
}

bool HasType(const json& value, std::string_view type) {
  if (type == "number") return value.is_number();
  if (type == "boolean") return value.is_boolean();
  if (type == "null") return value.is_null();
  if (type == "object") return value.is_object();
  return type == "array" && value.is_array();
}

}  // namespace

std::string ArgumentWriter::BeginArgument(std::string_view key, std::string_view type) {
  std::string out = EndArgument();
  if (raw_ || !keys_.emplace(key).second) {
    mode_ = Mode::kDropped;
    return out;
  }
  out += has_arguments_ ? ", \"" : "{\"";
  out += Quoted(key);
  out += "\": ";
  has_arguments_ = true;
  type_ = type;
  const bool checked = type == "number" || type == "boolean" || type == "null" ||
                       type == "object" || type == "array";
  mode_ = checked ? Mode::kBuffered : Mode::kString;
  if (!checked) out += '"';
  return out;
}

std::string ArgumentWriter::Text(std::string_view utf8) {
  if (mode_ == Mode::kString) return Quoted(utf8);
  if (mode_ == Mode::kBuffered) buffer_ += utf8;
  return {};
}

std::string ArgumentWriter::EndArgument() {
  std::string out;
  if (mode_ == Mode::kString) out = '"';
  if (mode_ == Mode::kBuffered) {
    const auto value = ParseJson(buffer_, "argument");
    out = value.ok() && HasType(*value, type_) ? buffer_ : json(buffer_).dump();
    buffer_.clear();
  }
  mode_ = Mode::kNone;
  return out;
}

void ArgumentWriter::BeginRaw() {
  raw_twice_ = raw_;
  raw_ = !has_arguments_;
}

std::string ArgumentWriter::RawText(std::string_view utf8) {
  if (has_arguments_ || raw_twice_) return {};
  raw_has_text_ = raw_has_text_ || !utf8.empty();
  return std::string(utf8);
}

std::string ArgumentWriter::End() {
  std::string out = EndArgument();
  if (raw_) return raw_has_text_ ? out : "{}";
  out += has_arguments_ ? "}" : "{}";
  return out;
}

}  // namespace k3::chat
