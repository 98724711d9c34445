// k3 info: what this build and this machine can do.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "k3/base/memory.h"
#include "k3/base/threads.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/kernels/devices.h"
#include "k3/kernels/op_probe.h"
#include "output.h"

namespace k3::app {
namespace {

constexpr const char* kInfoHelp =
    "The table of ops is made by running a small case of each op on each backend and comparing it\n"
    "with the reference: the figure is the relative difference. The environment variable K3_ISA\n"
    "makes every command use the kernels of a lesser instruction set.\n"
    "\nExamples:\n"
    "  k3 info\n"
    "  k3 info --json";

std::vector<std::string> MachineIsas() {
  std::vector<std::string> found;
#if defined(__x86_64__)
  const auto add = [&found](bool has, const char* name) {
    if (has) found.emplace_back(name);
  };
  add(__builtin_cpu_supports("avx2"), "avx2");
  add(__builtin_cpu_supports("fma"), "fma");
  add(__builtin_cpu_supports("avx512f"), "avx512f");
  add(__builtin_cpu_supports("avx512bw"), "avx512bw");
  add(__builtin_cpu_supports("avx512vnni"), "avx512vnni");
  add(__builtin_cpu_supports("avx512bf16"), "avx512bf16");
#endif
  for (const cpu::SimdTable* table : cpu::SupportedTables()) {
    const std::string_view name = table->name;
    if (name != "scalar" && std::find(found.begin(), found.end(), name) == found.end()) {
      found.emplace_back(name);
    }
  }
  return found;
}

/// What K3_ISA may name here, slowest first.
std::vector<std::string> IsaChoices() {
  std::vector<std::string> names;
  for (const cpu::SimdTable* table : cpu::SupportedTables()) names.emplace_back(table->name);
  return names;
}

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const std::size_t colon = line.find(": ");
    return colon == std::string::npos ? line : line.substr(colon + 2);
  }
  return "unknown";
}

Json Collect() {
  Json j{{"version", K3_VERSION},
         {"compiler", __VERSION__},
         {"build_type", K3_BUILD_TYPE},
         {"sanitizers", K3_SANITIZERS},
         {"cpu", CpuName()},
         {"instruction_sets", MachineIsas()},
         {"instruction_set_in_use", cpu::ActiveIsaName()},
         {"instruction_set_choices", IsaChoices()},
         {"usable_cpus", UsableCpus()},
         {"usable_memory_bytes", UsableMemory().bytes},
         {"usable_memory_source", UsableMemory().source},
         {"built_with_cuda", BuiltWithCuda()},
         {"gpus", Json::array()}};
  for (const GpuDevice& gpu : ListGpuDevices()) {
    j["gpus"].push_back(
        {{"name", gpu.name},
         {"memory_bytes", gpu.memory_bytes},
         {"compute_capability", fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor)}});
  }
  j["ops"] = Json::array();
  for (const OpProbeRow& row : ProbeOps()) {
    Json one{{"op", row.op}, {"backends", Json::object()}};
    for (const OpProbeCell& cell : row.cells) {
      Json state{{"state", Name(cell.state)}};
      const bool ran = cell.state == ProbeState::kAgrees || cell.state == ProbeState::kDiffers;
      if (ran) state["rel_l2"] = cell.rel_l2;
      one["backends"][cell.backend] = std::move(state);
    }
    j["ops"].push_back(std::move(one));
  }
  const auto demo = FindDemoModel();
  j["demo_model"] = nullptr;
  if (demo.ok()) j["demo_model"] = *demo;
  return j;
}

std::string GpuText(const Json& info) {
  if (info["gpus"].empty()) {
    return info["built_with_cuda"].get<bool>() ? "none found" : "none (built without CUDA)";
  }
  std::string out;
  for (const Json& gpu : info["gpus"]) {
    out += fmt::format("{}{} ({:.1f} GiB)", out.empty() ? "" : ", ", gpu["name"].get<std::string>(),
                       gpu["memory_bytes"].get<double>() / (1 << 30));
  }
  return out;
}

/// Ops by backend; a figure means it ran here and agrees with the reference to that.
std::string OpsText(const Json& info) {
  std::string out;
  for (const Json& row : info["ops"]) {
    if (out.empty()) {
      out = fmt::format("\n{:<14}", "op");
      for (const auto& [backend, unused] : row["backends"].items()) {
        out += fmt::format("{:>11}", backend);
      }
      out += "\n";
    }
    out += fmt::format("{:<14}", row["op"].get<std::string>());
    for (const auto& [backend, cell] : row["backends"].items()) {
      const auto state = cell["state"].get<std::string>();
      const std::string text = state == "agrees"
                                   ? fmt::format("{:.0e}", cell["rel_l2"].get<double>())
                               : state == "differs"             ? "WRONG"
                               : state == "not on this machine" ? "not here"
                                                                : state;
      out += fmt::format("{:>11}", text);
    }
    out += "\n";
  }
  return out;
}

std::string Text(const Json& info) {
  const auto text = [&info](const char* key) { return info[key].get<std::string>(); };
  const std::string build =
      text("build_type") + (text("sanitizers").empty() ? "" : " with " + text("sanitizers"));
  return fmt::format(
             "version           {}\ncompiler          {}\nbuild             {}\nprocessor         "
             "{}\n"
             "instruction sets  {}\nin use            {} (K3_ISA may be {})\nusable CPUs       {}\n"
             "usable memory     {:.1f} GiB\nGPUs              {}\ndemo model        {}\n",
             text("version"), text("compiler"), build, text("cpu"),
             fmt::join(info["instruction_sets"].get<std::vector<std::string>>(), " "),
             text("instruction_set_in_use"),
             fmt::join(info["instruction_set_choices"].get<std::vector<std::string>>(), ", "),
             info["usable_cpus"].get<int>(), info["usable_memory_bytes"].get<double>() / (1 << 30),
             GpuText(info), info["demo_model"].is_null() ? "not found" : text("demo_model")) +
         OpsText(info);
}

}  // namespace

void AddInfo(CLI::App& root, Action& action) {
  auto json = std::make_shared<bool>(false);
  CLI::App* app = root.add_subcommand("info", "What this build and this machine can do");
  app->footer(std::string(kInfoHelp) + kExitCodesHelp);
  app->add_flag("--json", *json, "Print a JSON object");
  app->callback([json, &action] {
    action = [json] {
      if (const auto table = cpu::ChooseTable(); !table.ok()) return Fail(table.error());
      const Json info = Collect();
      const Status s = WriteOut(*json ? JsonText(info, 2) : Text(info));
      return s.ok() ? kExitOk : Fail(s.error());
    };
  });
}

}  // namespace k3::app
