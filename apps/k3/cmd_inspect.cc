// k3 inspect: what a model folder holds, and what its shapes prove.
#include <fmt/format.h>

#include <algorithm>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "k3/base/memory.h"
#include "k3/model/findings.h"
#include "k3/model/inventory.h"
#include "output.h"

namespace k3::app {
namespace {

constexpr const char* kInspectHelp =
    "Reads config.json, the index and the headers of the shards; no weights. A folder with only\n"
    "config.json and the index works too, and so does a config file alone.\n"
    "Active parameters are those one token uses: all but the embedding table and the experts that\n"
    "were not chosen. A folder the engine would refuse is listed with its problems, exit status "
    "1.\n"
    "\nExamples:\n"
    "  k3 inspect\n"
    "  k3 inspect MODEL --json\n"
    "  k3 inspect MODEL --diff OTHER\n"
    "  k3 inspect MODEL --tensors";

struct InspectOptions {
  std::string model, other;
  bool json = false, tensors = false;
};

std::string ShapeText(const TensorGroup& g) {
  return g.dtype == "?" ? "shape unknown" : fmt::format("{} {}", g.dtype, ShapeString(g.shape));
}

Json GroupJson(const TensorGroup& g) {
  Json j{{"pattern", g.pattern}, {"role", g.role},   {"dtype", g.dtype},
         {"shape", g.shape},     {"count", g.count}, {"parameters", g.parameters},
         {"bytes", g.bytes},     {"file", nullptr},  {"example", g.example}};
  if (!g.file.empty()) j["file"] = g.file;
  return j;
}

Json ReportJson(const Inventory& i) {
  Json j{{"model", i.path},
         {"source", Name(i.source)},
         {"prefix", i.prefix},
         {"tensors", i.tensors},
         {"bytes", i.bytes},
         {"parameters", i.parameters},
         {"active_parameters", i.active_parameters},
         {"layers", i.config.n_layers},
         {"hidden_size", i.config.hidden},
         {"vocab_size", i.config.vocab},
         {"context", i.config.max_positions},
         {"roles", Json::array()},
         {"findings", Json::array()},
         {"cannot_be_known", CannotBeKnown(i)},
         {"shards", Json::array()},
         {"groups", Json::array()},
         {"vision", {{"tensors", i.vision_tensors}, {"bytes", i.vision_bytes}}},
         {"unexpected", {{"tensors", i.unexpected_tensors}, {"bytes", i.unexpected_bytes}}},
         {"experts",
          {{"count", i.experts},
           {"in_one_piece", i.contiguous_experts},
           {"bytes_each", i.bytes_per_expert}}},
         {"problems", i.problems},
         {"warnings", i.warnings}};
  for (const RoleTotal& r : i.roles) {
    j["roles"].push_back({{"role", r.role},
                          {"tensors", r.tensors},
                          {"parameters", r.parameters},
                          {"bytes", r.bytes}});
  }
  for (const Finding& f : FindFacts(i)) {
    j["findings"].push_back(
        {{"topic", f.topic}, {"text", f.text}, {"basis", Name(f.basis)}, {"evidence", f.evidence}});
  }
  for (const ShardInfo& s : i.shards) {
    j["shards"].push_back(
        {{"file", s.file}, {"tensors", s.tensors}, {"bytes", s.bytes}, {"read", s.read}});
  }
  for (const TensorGroup& g : i.groups) j["groups"].push_back(GroupJson(g));
  return j;
}

std::string ShardText(const Inventory& i) {
  if (i.shards.empty()) return "no shards";
  std::int64_t read = 0, least = i.shards[0].tensors, most = 0;
  for (const ShardInfo& s : i.shards) {
    read += s.read ? 1 : 0;
    least = std::min(least, s.tensors);
    most = std::max(most, s.tensors);
  }
  return fmt::format("{} shards, {} here, {} to {} tensors each", i.shards.size(), read, least,
                     most);
}

std::string Text(const Inventory& i, bool all_tensors) {
  std::string out = fmt::format(
      "{}\n  {}\n  {} layers, hidden {}, vocabulary {}, context {}\n  {} tensors, {} ({}), {}\n",
      i.path, Name(i.source), i.config.n_layers, i.config.hidden, i.config.vocab,
      i.config.max_positions, i.tensors, BytesText(i.bytes), i.bytes, ShardText(i));
  out += fmt::format("  {:.6g}e9 parameters, {:.6g}e9 active for a token\n",
                     static_cast<double>(i.parameters) / 1e9,
                     static_cast<double>(i.active_parameters) / 1e9);
  out += fmt::format("\n{:<16}{:>10}{:>18}{:>14}\n", "role", "tensors", "parameters", "stored");
  for (const RoleTotal& r : i.roles) {
    out += fmt::format("{:<16}{:>10}{:>18}{:>14}\n", r.role, r.tensors, r.parameters,
                       BytesText(r.bytes));
  }
  if (i.vision_tensors > 0) {
    out += fmt::format("{:<16}{:>10}{:>18}{:>14}\n", "vision, not used", i.vision_tensors, "",
                       BytesText(i.vision_bytes));
  }
  out += "\nwhat it shows\n";
  for (const Finding& f : FindFacts(i)) {
    out += fmt::format("  {}: {}\n      from the {}: {}\n", f.topic, f.text, Name(f.basis),
                       f.evidence);
  }
  out += "\nwhat weights cannot show\n";
  for (const std::string& line : CannotBeKnown(i)) out += fmt::format("  {}\n", line);
  if (all_tensors) {
    out += "\ntensors\n";
    for (const TensorGroup& g : i.groups) {
      out += fmt::format("  {:<14} {} x{}  {}\n", g.role, ShapeText(g), g.count, g.pattern);
    }
  }
  if (!i.problems.empty()) out += "\nproblems\n";
  for (const std::string& p : i.problems) out += fmt::format("  {}\n", p);
  return out;
}

Result<Inventory> Take(const std::string& model) {
  K3_ASSIGN(const std::string path, ResolveModel(model));
  return TakeInventory(path);
}

int Diff(const InspectOptions& o, const Inventory& a) {
  const auto b = TakeInventory(o.other);
  if (!b.ok()) return Fail(b.error());
  const auto lines = DiffInventories(a, *b);
  std::string out;
  if (o.json) {
    out = JsonText(Json{{"a", a.path}, {"b", b->path}, {"lines", lines}}, 2);
  } else if (lines.empty()) {
    out = "no difference\n";
  } else {
    out = fmt::format("- {}\n+ {}\n", a.path, b->path);
    for (const std::string& line : lines) out += line + "\n";
  }
  const Status s = WriteOut(out);
  return s.ok() ? kExitOk : Fail(s.error());
}

int Inspect(const InspectOptions& o) {
  const auto inventory = Take(o.model);
  if (!inventory.ok()) return Fail(inventory.error());
  if (!o.other.empty()) return Diff(o, *inventory);
  for (const std::string& warning : inventory->warnings) Warn(warning);
  const Status s =
      WriteOut(o.json ? JsonText(ReportJson(*inventory), 2) : Text(*inventory, o.tensors));
  if (!s.ok()) return Fail(s.error());
  if (inventory->problems.empty()) return kExitOk;
  Complain(fmt::format("{}: {} problems, the first: {}", inventory->path,
                       inventory->problems.size(), inventory->problems[0]));
  return kExitFailed;
}

}  // namespace

void AddInspect(CLI::App& root, Action& action) {
  auto o = std::make_shared<InspectOptions>();
  CLI::App* app = root.add_subcommand("inspect", "What a model folder holds and proves");
  app->footer(std::string(kInspectHelp) + kExitCodesHelp);
  AddModel(*app, o->model);
  auto* json = app->add_flag("--json", o->json, "Print a JSON object");
  app->add_option("--diff", o->other, "Show only how OTHER differs: config, findings, tensors")
      ->type_name("OTHER");
  app->add_flag("--tensors", o->tensors, "List every kind of tensor too")->excludes(json);
  app->callback([o, &action] { action = [o] { return Inspect(*o); }; });
}

}  // namespace k3::app
