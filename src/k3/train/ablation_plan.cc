// ReadAblationPlan.
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include <fmt/format.h>
#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>
#include <nlohmann/json.hpp>

#include "k3/io/json.h"
#include "k3/io/mapped_file.h"
#include "k3/train/ablation.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 7> kSections{"model",    "data",    "train",  "optimizer",
                                                    "schedule", "balance", "distill"};

Error Bad(const std::string& path, const std::string& what) {
  return {Code::kInvalidArgument, fmt::format("{}: {}", path, what)};
}

Result<toml::table> ParseToml(const std::string& path) {
  K3_ASSIGN(const std::string text, ReadTextFile(path, std::size_t{1} << 20));
  toml::parse_result parsed = toml::parse(text);
  if (!parsed) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: line {}: {}", path, parsed.error().source().begin.line,
                             parsed.error().description())};
  }
  return std::move(parsed).table();
}

/// The entries of `from` replace those of `into`; tables are merged.
void Merge(toml::table& into, const toml::table& from) {
  for (const auto& [key, node] : from) {
    toml::table* mine = into[key.str()].as_table();
    if (const toml::table* theirs = node.as_table(); mine && theirs) {
      Merge(*mine, *theirs);
    } else {
      into.insert_or_assign(key.str(), node);
    }
  }
}

Json ToJson(const toml::node& node) {
  if (const auto* table = node.as_table()) {
    Json j = Json::object();
    for (const auto& [key, value] : *table) j[std::string(key.str())] = ToJson(value);
    return j;
  }
  if (const auto* array = node.as_array()) {
    Json j = Json::array();
    for (const toml::node& value : *array) j.push_back(ToJson(value));
    return j;
  }
  if (const auto* v = node.as_boolean()) return v->get();
  if (const auto* v = node.as_integer()) return v->get();
  if (const auto* v = node.as_floating_point()) return v->get();
  return node.value_or(std::string());
}

/// Calls fn("a.b.c", node) for everything in `table` that is no table.
template <class F>
Status ForEachLeaf(const toml::table& table, const std::string& at, const F& fn) {
  for (const auto& [key, node] : table) {
    const std::string here = fmt::format("{}{}{}", at, at.empty() ? "" : ".", key.str());
    if (const toml::table* inner = node.as_table()) {
      K3_TRY(ForEachLeaf(*inner, here, fn));
    } else {
      K3_TRY(fn(here, node));
    }
  }
  return {};
}

/// Whether a model of this config reads the key: whoever does refuses an object there.
bool IsRead(const Json& config, const std::string& dotted) {
  std::string pointer = config.contains("text_config") ? "/text_config/" : "/";
  for (const char c : dotted) pointer += c == '.' ? "/" : std::string(1, c);
  Json probe = config;
  probe[Json::json_pointer(pointer)] = {{"read", false}};
  return !ParseModelConfig(probe.dump(), "").ok();
}

/// What an arm changes. `names` are the single arms, in order.
class Builder {
 public:
  Builder(std::string path, toml::table plan, toml::table base, fs::path base_dir, Json config)
      : path_(std::move(path)),
        plan_(std::move(plan)),
        base_(std::move(base)),
        base_dir_(std::move(base_dir)),
        config_(std::move(config)) {}

  Status Read(AblationPlan& out);

 private:
  Status ReadHead(AblationPlan& out);
  Status AddArms(AblationPlan& out);
  Status CheckArm(const std::string& name, const toml::node& node) const;
  Status CheckRead(const std::string& name, const Json& config) const;
  Status CheckTogether(const std::vector<std::string>& parts) const;
  Result<std::vector<std::string>> Pair(const toml::node& node) const;
  Result<AblationArm> Arm(const std::string& name, const std::vector<std::string>& parts,
                          const std::string& out) const;

  std::string path_;
  toml::table plan_, base_;
  fs::path base_dir_;
  Json config_;
  std::vector<std::string> names_;
};

Status Builder::ReadHead(AblationPlan& out) {
  static const std::set<std::string_view> kKnown{"base",  "out",    "question", "seeds",
                                                 "pairs", "all_on", "arms",     "threshold"};
  for (const auto& [key, node] : plan_) {
    if (!kKnown.contains(key.str())) return Bad(path_, fmt::format("unknown key {}", key.str()));
  }
  if (const auto node = plan_["question"]; node && !node.is_string()) {
    return Bad(path_, "bad value question, expected a string");
  }
  if (const auto node = plan_["all_on"]; node && !node.is_boolean()) {
    return Bad(path_, "bad value all_on, expected true or false");
  }
  out.question = plan_["question"].value_or(std::string());
  const auto folder = plan_["out"].value<std::string>();
  if (!folder) return Bad(path_, "missing key out, expected a folder");
  out.out = (fs::path(path_).parent_path() / *folder).lexically_normal().string();
  if (const auto node = plan_["threshold"]) {
    const auto v = node.value<double>();
    if (!v || !(*v >= 0 && *v <= 100)) return Bad(path_, "bad value threshold, expected 0 to 100");
    out.threshold = *v;
  }
  const toml::array* seeds = plan_["seeds"].as_array();
  if (!seeds || seeds->empty()) return Bad(path_, "missing key seeds, expected a list of integers");
  std::set<std::int64_t> seen;
  for (const toml::node& node : *seeds) {
    const auto seed = node.value_exact<std::int64_t>();
    if (!seed || *seed < 0 || !seen.insert(*seed).second) {
      return Bad(path_, "bad value seeds, expected different integers from 0");
    }
    out.seeds.push_back(*seed);
  }
  return {};
}

Status Builder::CheckArm(const std::string& name, const toml::node& node) const {
  const bool plain = !name.empty() && name != "base" && name != "all" && name.size() <= 64 &&
                     name.find_first_not_of(
                         "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                         "0123456789_-") == std::string::npos;
  if (!plain) {
    return Bad(path_, fmt::format("bad name of an arm: '{}', expected letters, digits, - and _, "
                                  "and neither base nor all",
                                  name));
  }
  const toml::table* arm = node.as_table();
  if (!arm || arm->empty()) {
    return Bad(path_, fmt::format("arms.{}: expected a table of changes", name));
  }
  for (const auto& [key, value] : *arm) {
    const bool section =
        std::find(kSections.begin(), kSections.end(), key.str()) != kSections.end();
    if (key.str() == "remove" ? value.is_array()
                              : (section || key.str() == "config") && value.is_table()) {
      continue;
    }
    return Bad(path_, fmt::format("unknown key arms.{}.{}", name, key.str()));
  }
  for (const char* key : {"out", "seed"}) {
    if ((*arm)["train"][key]) {
      return Bad(path_, fmt::format("arms.{}.train.{}: the plan decides this", name, key));
    }
  }
  return ForEachLeaf(*arm, "", [&](const std::string& key, const toml::node& leaf) -> Status {
    const auto* real = leaf.as_floating_point();
    if (real == nullptr || std::isfinite(real->get())) return {};
    return Bad(path_,
               fmt::format("arms.{}.{} is {}, expected a finite number", name, key, real->get()));
  });
}

/// An arm with a misspelt key would be a second base, and reported as "no difference".
Status Builder::CheckRead(const std::string& name, const Json& config) const {
  const toml::table* change = plan_["arms"][name]["config"].as_table();
  if (change == nullptr || !ParseModelConfig(config.dump(), "").ok()) return {};
  return ForEachLeaf(*change, "", [&](const std::string& key, const toml::node&) -> Status {
    if (IsRead(config, key)) return {};
    return Bad(path_,
               fmt::format("arms.{}.config.{} is not read by a model of this config", name, key));
  });
}

/// Of two arms that set one key, only the second would be on.
Status Builder::CheckTogether(const std::vector<std::string>& parts) const {
  std::map<std::string, std::string> owner;
  for (const std::string& part : parts) {
    K3_TRY(ForEachLeaf(*plan_["arms"][part].as_table(), "",
                       [&](const std::string& key, const toml::node&) -> Status {
                         const auto [it, fresh] = owner.emplace(key, part);
                         if (fresh || key == "remove") return {};
                         return Bad(path_, fmt::format("{} and {} cannot be on together: both "
                                                       "change {}",
                                                       it->second, part, key));
                       }));
  }
  return {};
}

Result<std::vector<std::string>> Builder::Pair(const toml::node& node) const {
  std::vector<std::string> parts;
  const toml::array* list = node.as_array();
  for (std::size_t i = 0; list && i < list->size(); ++i) {
    const auto name = list->get(i)->value_exact<std::string>();
    if (!name || std::find(names_.begin(), names_.end(), *name) == names_.end()) {
      return Bad(path_, fmt::format("pairs: {} is no arm", name.value_or("an entry")));
    }
    if (std::find(parts.begin(), parts.end(), *name) != parts.end()) {
      return Bad(path_, fmt::format("pairs: {} stands twice in one entry", *name));
    }
    parts.push_back(*name);
  }
  if (parts.size() < 2) return Bad(path_, "bad value pairs, expected lists of at least two arms");
  return parts;
}

Result<AblationArm> Builder::Arm(const std::string& name, const std::vector<std::string>& parts,
                                 const std::string& out) const {
  AblationArm arm{name, parts, {}, {}};
  toml::table run = base_;
  Json config = config_;
  Json& text = config.contains("text_config") ? config["text_config"] : config;
  for (const std::string& part : parts) {
    const toml::table& change = *plan_["arms"][part].as_table();
    for (const auto& [key, node] : change) {
      if (key.str() == "config") {
        if (run["model"]["init_from"]) {
          return Bad(path_, fmt::format("arms.{}.config: the base continues a model, whose config "
                                        "cannot change",
                                        part));
        }
        text.merge_patch(ToJson(node));
      } else if (key.str() == "remove") {
        for (const toml::node& entry : *node.as_array()) {
          const auto name_of = entry.value_exact<std::string>();
          if (!name_of || text.erase(*name_of) == 0) {
            return Bad(path_, fmt::format("arms.{}.remove: {} is no key of the model's config",
                                          part, name_of.value_or("an entry")));
          }
        }
      } else {
        toml::table section;
        section.insert(key.str(), node);
        Merge(run, section);
      }
    }
  }
  if (parts.size() == 1) K3_TRY(CheckRead(parts[0], config));
  const fs::path dir = fs::path(out) / name / "seed";
  auto relative = [&](const char* section, const char* key) {
    if (const auto v = run[section][key].value<std::string>()) {
      const fs::path to = fs::absolute(base_dir_ / *v).lexically_normal();
      run[section].as_table()->insert_or_assign(
          key, to.lexically_relative(fs::absolute(dir).lexically_normal()).string());
    }
  };
  relative("data", "dir"), relative("model", "init_from"), relative("distill", "teacher");
  if (!run["model"].is_table()) run.insert_or_assign("model", toml::table{});
  if (!run["train"].is_table()) run.insert_or_assign("train", toml::table{});
  if (!run["model"]["init_from"])
    run["model"].as_table()->insert_or_assign("config", "config.json");
  run["train"].as_table()->insert_or_assign("out", ".");
  run["train"].as_table()->insert_or_assign("seed", "{seed}");
  std::ostringstream toml;
  toml << run << "\n";
  arm.toml = toml.str();
  if (const auto at = arm.toml.find("{seed}"); at != std::string::npos && at > 0) {
    arm.toml.replace(at - 1, 8, "{seed}");  // a number, without the quotes
  }
  arm.config_json = config.dump(1) + "\n";
  return arm;
}

Status Builder::AddArms(AblationPlan& out) {
  const toml::table* arms = plan_["arms"].as_table();
  if (!arms || arms->empty()) return Bad(path_, "missing table arms");
  K3_ASSIGN(AblationArm base, Arm("base", {}, out.out));
  out.arms.push_back(std::move(base));
  std::vector<std::pair<std::uint32_t, std::string>> order;  // as they stand in the file
  for (const auto& [key, node] : *arms) {
    K3_TRY(CheckArm(std::string(key.str()), node));
    order.emplace_back(key.source().begin.line, key.str());
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [line, name] : order) names_.push_back(name);
  std::vector<std::vector<std::string>> sets;
  for (const std::string& name : names_) sets.push_back({name});
  if (const auto node = plan_["pairs"]) {
    if (!node.is_array()) return Bad(path_, "bad value pairs, expected a list of lists");
    for (const toml::node& entry : *node.as_array()) {
      K3_ASSIGN(std::vector<std::string> parts, Pair(entry));
      sets.push_back(std::move(parts));
    }
  }
  if (plan_["all_on"].value_or(false)) sets.push_back(names_);
  std::set<std::string> seen;
  for (std::size_t i = 0; i < sets.size(); ++i) {
    const bool all = i + 1 == sets.size() && plan_["all_on"].value_or(false);
    std::string name = all ? "all" : fmt::format("{}", fmt::join(sets[i], "+"));
    if (!seen.insert(name).second) return Bad(path_, fmt::format("pairs: {} stands twice", name));
    K3_TRY(CheckTogether(sets[i]));
    K3_ASSIGN(AblationArm arm, Arm(name, sets[i], out.out));
    out.arms.push_back(std::move(arm));
  }
  return {};
}

Status Builder::Read(AblationPlan& out) {
  K3_TRY(ReadHead(out));
  return AddArms(out);
}

}  // namespace

std::string RunToml(const AblationArm& arm, std::int64_t seed) {
  std::string text = arm.toml;
  if (const auto at = text.find("{seed}"); at != std::string::npos) {
    text.replace(at, 6, std::to_string(seed));
  }
  return text;
}

Result<AblationPlan> ReadAblationPlan(const std::string& path) {
  AblationPlan plan;
  plan.path = path;
  K3_ASSIGN(toml::table root, ParseToml(path));
  const auto base = root["base"].value<std::string>();
  if (!base) return Bad(path, "missing key base, expected the TOML file of a run");
  const fs::path base_path = fs::path(path).parent_path() / *base;
  K3_ASSIGN(const TrainConfig train, ReadTrainConfig(base_path.string()));
  K3_ASSIGN(toml::table run, ParseToml(base_path.string()));
  const std::string model =
      train.init_from.empty() ? train.model_config : train.init_from + "/config.json";
  K3_ASSIGN(const std::string text, ReadTextFile(model));
  Json config = Json::parse(text, nullptr, false);
  if (!config.is_object()) return Error{Code::kCorrupt, model + ": no JSON object"};
  K3_TRY(Builder(path, std::move(root), std::move(run), base_path.parent_path(), std::move(config))
             .Read(plan));
  for (const AblationArm& arm : plan.arms) {
    const std::string where = fmt::format("{}: arm {}", path, arm.name);
    K3_TRY(ParseModelConfig(arm.config_json, where).status());
    K3_TRY(ParseTrainConfig(RunToml(arm, plan.seeds.front()), where).status());
  }
  return plan;
}

}  // namespace k3
