// DiffInventories.
#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "k3/io/json.h"
#include "k3/model/findings.h"
#include "k3/tensor/tensor_ref.h"

namespace k3 {
namespace {

using Lines = std::map<std::string, std::string>;  // what is compared -> how it stands there

void Flatten(const nlohmann::json& value, const std::string& path, Lines& out) {
  if (!value.is_object()) {
    out[path] = Printable(value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace), 120);
    return;
  }
  for (const auto& [key, inner] : value.items()) {
    // The text keys mean the same nested or flat.
    const bool text = path.empty() && key == "text_config";
    const std::string name = Printable(key, 80);
    Flatten(inner, text ? "" : path.empty() ? name : path + "." + name, out);
  }
}

Lines ConfigLines(const Inventory& i) {
  Lines out;
  const auto parsed = ParseJson(i.config_text, i.path);  // it was parsed before
  if (parsed.ok()) Flatten(*parsed, "", out);
  return out;
}

Lines GroupLines(const Inventory& i) {
  Lines out;
  for (const TensorGroup& g : i.groups) {
    std::string& line = out[g.pattern];
    line += fmt::format("{}{} {} x{}", line.empty() ? "" : "; ", g.dtype, ShapeString(g.shape),
                        g.count);
  }
  return out;
}

Lines TotalLines(const Inventory& i) {
  Lines out;
  out["parameters"] = fmt::format("{}", i.parameters);
  out["active parameters"] = fmt::format("{}", i.active_parameters);
  out["bytes"] = fmt::format("{}", i.bytes);
  out["tensors"] = fmt::format("{}", i.tensors);
  out["shards"] = fmt::format("{}", i.shards.size());
  return out;
}

Lines FactLines(const Inventory& i) {
  Lines out;
  for (const Finding& f : FindFacts(i)) out[f.topic] = f.text;
  return out;
}

void Compare(const char* heading, const Lines& a, const Lines& b, std::vector<std::string>& out) {
  std::set<std::string> keys;
  for (const auto& [key, unused] : a) keys.insert(key);
  for (const auto& [key, unused] : b) keys.insert(key);
  bool first = true;
  for (const std::string& key : keys) {
    const auto in_a = a.find(key), in_b = b.find(key);
    if (in_a != a.end() && in_b != b.end() && in_a->second == in_b->second) continue;
    if (first) out.push_back(heading);
    first = false;
    if (in_a != a.end()) out.push_back(fmt::format("- {}: {}", key, in_a->second));
    if (in_b != b.end()) out.push_back(fmt::format("+ {}: {}", key, in_b->second));
  }
}

}  // namespace

std::vector<std::string> DiffInventories(const Inventory& a, const Inventory& b) {
  std::vector<std::string> out;
  Compare("config", ConfigLines(a), ConfigLines(b), out);
  Compare("findings", FactLines(a), FactLines(b), out);
  Compare("totals", TotalLines(a), TotalLines(b), out);
  Compare("tensors", GroupLines(a), GroupLines(b), out);
  return out;
}

}  // namespace k3
