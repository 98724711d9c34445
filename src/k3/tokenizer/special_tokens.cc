#include "k3/tokenizer/special_tokens.h"

#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_set>

namespace k3 {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxDepth = 64;

Error BadConfig(std::string_view where, const std::string& what) {
  return Error{Code::kCorrupt, fmt::format("{}: {}", where, what)};
}

/// A name from the file as a JSON string: one line, ASCII, shortened.
std::string Shown(const std::string& s) {
  const std::string text = Json(s).dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() <= 80 ? text : text.substr(0, 76) + "...\"";
}

/// Walks a document without building it. nlohmann-json keeps the last of two equal keys and accepts
/// any depth; this refuses both.
class Guard : public nlohmann::json_sax<Json> {
 public:
  std::string problem;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return Open(); }
  bool end_object() override { return Close(); }
  bool start_array(std::size_t) override { return Open(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    if (keys_.back().insert(name).second) return true;
    problem = fmt::format("key {} appears twice in one object", Shown(name));
    return false;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    problem = fmt::format("not valid JSON at byte {}", position);
    return false;
  }

 private:
  bool Open() {
    if (keys_.size() == kMaxDepth) {
      problem = fmt::format("nested deeper than {}", kMaxDepth);
      return false;
    }
    keys_.emplace_back();
    return true;
  }
  bool Close() {
    keys_.pop_back();
    return true;
  }
  std::vector<std::set<std::string>> keys_;  // one set for each open object or array
};

Result<Json> ParseJson(std::string_view text, std::string_view where) {
  Guard guard;
  // The library takes a NUL byte for the end of the text.
  if (text.find('\0') != text.npos) return BadConfig(where, "not valid JSON: a NUL byte");
  if (!Json::sax_parse(text, &guard)) return BadConfig(where, guard.problem);
  Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) {
    return BadConfig(where,
                     fmt::format("found {} at the top, expected an object", json.type_name()));
  }
  return json;
}

Status ReadName(const std::string& key, const Json& entry, std::size_t n_ranks,
                std::string_view where, SpecialTokens& out) {
  const std::string at = fmt::format("added_tokens_decoder {}", Shown(key));
  std::size_t id = 0;
  const char* end = key.data() + key.size();
  const auto [stop, error] = std::from_chars(key.data(), end, id);
  if (error != std::errc() || stop != end || (key.size() > 1 && key[0] == '0')) {
    return BadConfig(where, at + " is not a token id");
  }
  if (id < n_ranks || id - n_ranks >= kSpecialTokens) {
    return BadConfig(where, fmt::format("{} is outside the control tokens {}..{} behind the ranks",
                                        at, n_ranks, n_ranks + kSpecialTokens - 1));
  }
  const auto content = entry.is_object() ? entry.find("content") : entry.end();
  if (content == entry.end() || !content->is_string()) {
    return BadConfig(where, at + " has no text \"content\"");
  }
  const auto& name = content->get_ref<const std::string&>();
  if (name.empty()) return BadConfig(where, at + " has an empty \"content\"");
  out.names[id - n_ranks] = name;
  return {};
}

}  // namespace

Result<SpecialTokens> ParseSpecialTokens(std::string_view config, std::size_t n_ranks,
                                         std::string_view where) {
  SpecialTokens out;
  out.names.resize(kSpecialTokens);
  if (!config.empty()) {
    K3_ASSIGN(const Json json, ParseJson(config, where));
    if (const auto it = json.find("added_tokens_decoder"); it != json.end() && !it->is_null()) {
      if (!it->is_object()) return BadConfig(where, "added_tokens_decoder is not an object");
      for (const auto& [key, entry] : it->items()) {
        K3_TRY(ReadName(key, entry, n_ranks, where, out));
      }
    }
    if (const auto it = json.find("add_bos_token"); it != json.end() && !it->is_null()) {
      if (!it->is_boolean()) return BadConfig(where, "add_bos_token is not true or false");
      out.add_bos = it->get<bool>();
    }
  }
  std::unordered_set<std::string_view> seen;
  for (std::size_t i = 0; i < kSpecialTokens; ++i) {
    std::string& name = out.names[i];
    if (name.empty()) name = fmt::format("<|reserved_token_{}|>", n_ranks + i);
    if (!seen.insert(name).second) {
      return BadConfig(where, fmt::format("two control tokens are named {}", Shown(name)));
    }
  }
  return out;
}

}  // namespace k3
