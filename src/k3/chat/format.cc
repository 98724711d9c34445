#include "k3/chat/format.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <nlohmann/json.hpp>

#include "k3/io/json.h"
#include "k3/io/mapped_file.h"

namespace k3::chat {
namespace {

bool Absent(const std::string& path) {
  struct stat info = {};
  return stat(path.c_str(), &info) != 0 && errno == ENOENT;
}

std::size_t Holes(std::string_view text) {
  std::size_t n = 0;
  for (auto at = text.find("{}"); at != text.npos; at = text.find("{}", at + 2)) ++n;
  return n;
}

Result<std::string> ReadBody(const JsonReader& reader, std::string_view key, std::size_t holes) {
  K3_ASSIGN(std::string text, reader.String(key));
  if (text.empty() || Holes(text) != holes) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: {} is {} bytes with \"{{}}\" in {} places, expected a text with "
                             "it in {}",
                             reader.where(), key, text.size(), Holes(text), holes)};
  }
  return text;
}

}  // namespace

std::optional<Markup> FindMarkup(const Tokenizer& tokenizer) {
  const auto open = tokenizer.SpecialId(kOpen), close = tokenizer.SpecialId(kClose);
  const auto sep = tokenizer.SpecialId(kSep), end = tokenizer.SpecialId(kEnd);
  if (!open || !close || !sep || !end) return std::nullopt;
  return Markup{*open, *close, *sep, *end};
}

Result<Bodies> ParseBodies(std::string_view text, std::string_view where) {
  K3_ASSIGN(const nlohmann::json json, ParseJson(text, where));
  if (!json.is_object()) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: found {}, expected a JSON object", where, PrintableValue(json))};
  }
  const JsonReader reader(json, where);
  Bodies b;
  K3_ASSIGN(b.tool_declare, ReadBody(reader, "tool_declare", 1));
  K3_ASSIGN(b.tool_declare_dynamic, ReadBody(reader, "tool_declare_dynamic", 1));
  K3_ASSIGN(b.thinking_effort, ReadBody(reader, "thinking_effort", 1));
  K3_ASSIGN(b.tool_choice_required, ReadBody(reader, "tool_choice_required", 0));
  K3_ASSIGN(b.tool_choice_none, ReadBody(reader, "tool_choice_none", 0));
  K3_ASSIGN(b.json_object, ReadBody(reader, "json_object", 0));
  K3_ASSIGN(b.json_schema, ReadBody(reader, "json_schema", 1));
  return b;
}

Result<std::optional<Bodies>> LoadBodies(const std::string& dir) {
  const std::string path = fmt::format("{}/{}", dir, kBodiesFile);
  if (Absent(path)) return std::optional<Bodies>();
  K3_ASSIGN(const std::string text, ReadTextFile(path));
  K3_ASSIGN(Bodies bodies, ParseBodies(text, path));
  return std::optional<Bodies>(std::move(bodies));
}

Result<bool> SpeaksChat(const Tokenizer& tokenizer, const std::string& dir) {
  const std::string path = dir + "/tokenizer_config.json";
  std::optional<std::string> said;
  if (!Absent(path)) {
    K3_ASSIGN(const std::string text, ReadTextFile(path));
    K3_ASSIGN(const nlohmann::json json, ParseJson(text, path));
    if (json.is_object()) {
      K3_ASSIGN(said, JsonReader(json, path).OptString("chat_format"));
    }
  }
  const bool has_markup = FindMarkup(tokenizer).has_value();
  if (!said.has_value()) return has_markup && !tokenizer.add_bos();
  if (*said == "none") return false;
  if (*said != "xtml") {
    return Error{Code::kUnsupported, fmt::format("{}: chat_format is \"{}\", expected xtml or none",
                                                 path, Printable(*said))};
  }
  if (!has_markup) {
    return Error{
        Code::kCorrupt,
        fmt::format("{}: chat_format is xtml, but the tokens {} {} {} {} are not all there", path,
                    kOpen, kClose, kSep, kEnd)};
  }
  return true;
}

}  // namespace k3::chat
