#include "k3/io/json.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "k3/base/check.h"

namespace k3 {
namespace {

using nlohmann::json;

/// Builds the document and stops the parser at the first broken rule.
class StrictBuilder : public nlohmann::json_sax<json> {
 public:
  const std::string& error() const { return error_; }
  json Take() { return std::move(root_); }

  bool null() override { return Add(nullptr); }
  bool boolean(bool v) override { return Add(v); }
  bool number_integer(number_integer_t v) override { return Add(v); }
  bool number_unsigned(number_unsigned_t v) override { return Add(v); }
  bool number_float(number_float_t v, const string_t&) override { return Add(v); }
  bool string(string_t& v) override { return Add(std::move(v)); }
  bool binary(binary_t&) override { return Fail("binary value"); }
  bool start_object(std::size_t) override { return Open(json::object()); }
  bool start_array(std::size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& k) override {
    auto& object = stack_.back()->get_ref<json::object_t&>();
    const auto [it, fresh] = object.try_emplace(std::move(k), nullptr);
    if (!fresh) return Fail(fmt::format("duplicate key \"{}\"", Printable(it->first)));
    slot_ = &it->second;
    return true;
  }

  bool parse_error(std::size_t at, const std::string&, const json::exception& e) override {
    std::string_view why = e.what();
    // Drop the library's lead: "[json.exception...] ", often "parse error at line 1, column 2: ".
    if (const auto end = why.find("] "); end != why.npos) why.remove_prefix(end + 2);
    const auto colon = why.starts_with("parse error") ? why.find(": ") : why.npos;
    if (colon != why.npos) why.remove_prefix(colon + 2);
    return Fail(fmt::format("not valid JSON at byte {}: {}", at, Printable(why)));
  }

 private:
  bool Fail(std::string message) {
    error_ = std::move(message);
    return false;
  }

  json* Place(json v) {
    if (stack_.empty()) {
      root_ = std::move(v);
      return &root_;
    }
    if (stack_.back()->is_object()) {
      *slot_ = std::move(v);
      return slot_;
    }
    stack_.back()->push_back(std::move(v));
    return &stack_.back()->back();
  }

  bool Add(json v) {
    if (++values_ > kMaxJsonValues) return Fail("too many values");
    Place(std::move(v));
    return true;
  }

  bool Open(json v) {
    if (++values_ > kMaxJsonValues) return Fail("too many values");
    if (stack_.size() >= kMaxJsonDepth) return Fail(fmt::format("nested over {}", kMaxJsonDepth));
    // A container stays where it is until it is closed: its parent gets no new element before that.
    stack_.push_back(Place(std::move(v)));
    return true;
  }

  bool Close() {
    stack_.pop_back();
    return true;
  }

  json root_;
  std::vector<json*> stack_;
  json* slot_ = nullptr;
  std::size_t values_ = 0;
  std::string error_;
};

/// An integer literal as int64, or nullopt (too large, or not an integer).
std::optional<std::int64_t> AsInt(const json& v) {
  if (v.is_number_unsigned()) {
    const auto u = v.get<std::uint64_t>();
    if (u > static_cast<std::uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<std::int64_t>(u);
  }
  if (v.is_number_integer()) return v.get<std::int64_t>();
  return std::nullopt;
}

}  // namespace

Result<json> ParseJson(std::string_view text, std::string_view where) {
  // The library takes a NUL byte for the end of the text.
  if (const auto nul = text.find('\0'); nul != text.npos) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: not valid JSON at byte {}: a NUL byte", where, nul)};
  }
  StrictBuilder builder;
  if (!json::sax_parse(text.begin(), text.end(), &builder)) {
    return Error{Code::kCorrupt, fmt::format("{}: {}", where, builder.error())};
  }
  return builder.Take();
}

Result<nlohmann::ordered_json> ParseOrderedJson(std::string_view text, std::string_view where) {
  constexpr std::size_t kLimit = std::size_t{1} << 20;
  if (text.size() > kLimit) {
    return Error{Code::kUnsupported,
                 fmt::format("{}: {} bytes, expected at most {} in a file to be "
                             "changed",
                             where, text.size(), kLimit)};
  }
  K3_TRY(ParseJson(text, where).status());  // refuses what must be refused
  return nlohmann::ordered_json::parse(text, nullptr, false);
}

std::string Printable(std::string_view text, std::size_t limit) {
  std::string out(text.substr(0, limit));
  for (char& c : out) {
    if (c < 0x20 || c > 0x7E) c = '?';
  }
  if (text.size() > limit) out += "...";
  return out;
}

std::string PrintableValue(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  if (value.is_string()) {
    return fmt::format("\"{}\"", Printable(value.get_ref<const std::string&>(), 60));
  }
  return value.dump();
}

JsonReader::JsonReader(const json& object, std::string_view where, std::string_view path)
    : object_(&object), where_(where), path_(path) {
  K3_CHECK(object.is_object(), "JsonReader reads objects");
}

const json* JsonReader::Find(std::string_view key) const {
  const auto it = object_->find(key);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

std::string JsonReader::Path(std::string_view key) const {
  return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
}

Error JsonReader::Missing(std::string_view key) const {
  return {Code::kCorrupt, fmt::format("{}: key {} is missing", where_, Path(key))};
}

Error JsonReader::Bad(std::string_view key, const json& value, std::string_view expected) const {
  return {Code::kCorrupt, fmt::format("{}: {} is {}, expected {}", where_, Path(key),
                                      PrintableValue(value), expected)};
}

Result<std::optional<JsonReader>> JsonReader::Object(std::string_view key) const {
  const json* v = Find(key);
  if (!v) return std::optional<JsonReader>();
  if (!v->is_object()) return Bad(key, *v, "an object");
  return std::optional(JsonReader(*v, where_, Path(key)));
}

Result<std::optional<std::int64_t>> JsonReader::OptInt(std::string_view key, std::int64_t lo,
                                                       std::int64_t hi) const {
  const json* v = Find(key);
  if (!v) return std::optional<std::int64_t>();
  const auto n = AsInt(*v);
  if (!n || *n < lo || *n > hi) {
    return Bad(key, *v, fmt::format("an integer from {} to {}", lo, hi));
  }
  return n;
}

Result<std::int64_t> JsonReader::Int(std::string_view key, std::int64_t lo, std::int64_t hi) const {
  K3_ASSIGN(const auto v, OptInt(key, lo, hi));
  if (!v) return Missing(key);
  return *v;
}

Result<std::int64_t> JsonReader::Int(std::string_view key, std::int64_t lo, std::int64_t hi,
                                     std::int64_t fallback) const {
  K3_ASSIGN(const auto v, OptInt(key, lo, hi));
  return v.value_or(fallback);
}

Result<std::optional<double>> JsonReader::OptNumber(std::string_view key, double lo,
                                                    double hi) const {
  const json* v = Find(key);
  if (!v) return std::optional<double>();
  if (v->is_number()) {
    const double d = v->get<double>();
    if (std::isfinite(d) && d >= lo && d <= hi) return std::optional(d);
  }
  return Bad(key, *v, fmt::format("a number from {} to {}", lo, hi));
}

Result<double> JsonReader::Number(std::string_view key, double lo, double hi) const {
  K3_ASSIGN(const auto v, OptNumber(key, lo, hi));
  if (!v) return Missing(key);
  return *v;
}

Result<std::optional<bool>> JsonReader::OptBool(std::string_view key) const {
  const json* v = Find(key);
  if (!v) return std::optional<bool>();
  if (!v->is_boolean()) return Bad(key, *v, "true or false");
  return std::optional(v->get<bool>());
}

Result<bool> JsonReader::Bool(std::string_view key, bool fallback) const {
  K3_ASSIGN(const auto v, OptBool(key));
  return v.value_or(fallback);
}

Result<std::optional<std::string>> JsonReader::OptString(std::string_view key) const {
  const json* v = Find(key);
  if (!v) return std::optional<std::string>();
  if (!v->is_string()) return Bad(key, *v, "a string");
  return std::optional(v->get<std::string>());
}

Result<std::string> JsonReader::String(std::string_view key) const {
  K3_ASSIGN(auto v, OptString(key));
  if (!v) return Missing(key);
  return std::move(*v);
}

Result<std::optional<std::vector<std::int64_t>>> JsonReader::OptIntList(std::string_view key,
                                                                        std::int64_t lo,
                                                                        std::int64_t hi,
                                                                        bool scalar_too) const {
  const json* v = Find(key);
  if (!v) return std::optional<std::vector<std::int64_t>>();
  const auto element = fmt::format("an integer from {} to {}", lo, hi);
  std::vector<std::int64_t> out;
  if (!v->is_array()) {
    const auto n = AsInt(*v);
    if (!scalar_too || !n || *n < lo || *n > hi) {
      return Bad(key, *v, scalar_too ? element + " or a list of them" : "a list of integers");
    }
    out.push_back(*n);
    return std::optional(std::move(out));
  }
  out.reserve(v->size());
  for (const json& e : *v) {
    const auto n = AsInt(e);
    if (!n || *n < lo || *n > hi) {
      return Bad(fmt::format("{}[{}]", key, out.size()), e, element);
    }
    out.push_back(*n);
  }
  return std::optional(std::move(out));
}

}  // namespace k3
