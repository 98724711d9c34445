// quantization_config of a converted checkpoint, in the words other readers know.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "k3/io/json.h"
#include "k3/model/quantize.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

/// NAME of NAME.weight, with prefix: what readers match their patterns against.
std::string ModuleOf(const std::string& prefix, const std::string& name) {
  constexpr std::string_view kSuffix = ".weight";
  return prefix + name.substr(0, name.size() - kSuffix.size());
}

/// A regular expression for the module and those that differ in numbers only.
std::string PatternOf(std::string_view module) {
  std::string out = "re:^";
  while (!module.empty()) {
    const std::size_t dot = std::min(module.find('.'), module.size());
    const std::string_view part = module.substr(0, dot);
    const bool number =
        !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    out += number ? "\\d+" : part;
    if (dot < module.size()) out += "\\.";
    module.remove_prefix(std::min(dot + 1, module.size()));
  }
  return out + "$";
}

/// Formats of all matrices of a pattern: one when they agree.
using Formats = std::map<std::string, std::set<WeightFormat>>;

/// What stands for the matrices of `format`: patterns where those hold no other matrix, else names.
std::vector<std::string> TargetsOf(WeightFormat format, const Formats& formats,
                                   const std::string& prefix,
                                   const std::vector<QuantizedMatrix>& matrices) {
  std::set<std::string> targets;
  for (const QuantizedMatrix& m : matrices) {
    if (m.to != format) continue;
    const std::string module = ModuleOf(prefix, m.name), pattern = PatternOf(module);
    targets.insert(formats.at(pattern).size() == 1 ? pattern : module);
  }
  return {targets.begin(), targets.end()};
}

Json WeightsOf(WeightFormat f) {
  if (f == WeightFormat::kMxfp4) {
    return {{"num_bits", 4},
            {"type", "float"},
            {"group_size", 32},
            {"strategy", "group"},
            {"symmetric", true},
            {"dynamic", false},
            {"scale_dtype", "torch.uint8"}};
  }
  if (f == WeightFormat::kInt8) {
    return {{"num_bits", 8},
            {"type", "int"},
            {"group_size", 32},
            {"strategy", "group"},
            {"symmetric", true},
            {"dynamic", false},
            {"scale_dtype", "torch.bfloat16"}};
  }
  return {{"num_bits", 8},       {"type", "float"},
          {"strategy", "block"}, {"block_structure", {kFp8Block, kFp8Block}},
          {"symmetric", true},   {"dynamic", false}};
}

const char* FormatWord(WeightFormat f) {
  return f == WeightFormat::kMxfp4  ? "mxfp4-pack-quantized"
         : f == WeightFormat::kInt8 ? "int-quantized"
                                    : "float-quantized";
}

Json Section(const std::string& prefix, const std::vector<QuantizedMatrix>& matrices) {
  Formats formats;
  std::set<WeightFormat> used;
  for (const QuantizedMatrix& m : matrices) {
    formats[PatternOf(ModuleOf(prefix, m.name))].insert(m.to);
    if (HasScales(m.to)) used.insert(m.to);
  }
  std::vector<std::string> dense;
  for (const WeightFormat f : {WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kF16}) {
    const auto more = TargetsOf(f, formats, prefix, matrices);
    dense.insert(dense.end(), more.begin(), more.end());
  }
  if (used.size() == 1 && *used.begin() == WeightFormat::kFp8) {
    return {{"quant_method", "fp8"},
            {"fmt", "e4m3"},
            {"activation_scheme", "dynamic"},
            {"weight_block_size", {kFp8Block, kFp8Block}},
            {"modules_to_not_convert", dense}};
  }
  Json groups = Json::object();
  for (const WeightFormat f : used) {
    groups[fmt::format("group_{}", groups.size())] = {
        {"format", FormatWord(f)},
        {"targets", TargetsOf(f, formats, prefix, matrices)},
        {"weights", WeightsOf(f)}};
  }
  return {{"quant_method", "compressed-tensors"},
          {"format", used.size() == 1 ? FormatWord(*used.begin()) : "mixed-precision"},
          {"quantization_status", "compressed"},
          {"ignore", dense},
          {"config_groups", groups}};
}

}  // namespace

Result<std::string> QuantizedConfigText(const std::string& text, const std::string& where,
                                        const std::string& prefix,
                                        const std::vector<QuantizedMatrix>& matrices) {
  const bool same = std::none_of(matrices.begin(), matrices.end(), [](const QuantizedMatrix& m) {
    return m.changes() && (HasScales(m.from) || HasScales(m.to));
  });
  if (same) return text;
  K3_ASSIGN(Json root, ParseOrderedJson(text, where));
  if (!root.is_object()) return Error{Code::kCorrupt, where + ": not a JSON object"};
  root.erase("quantization_config");
  Json* at = &root;
  if (const auto nested = root.find("text_config"); nested != root.end() && nested->is_object()) {
    at = &*nested;
    at->erase("quantization_config");
  }
  const bool any = std::any_of(matrices.begin(), matrices.end(),
                               [](const QuantizedMatrix& m) { return HasScales(m.to); });
  if (any) (*at)["quantization_config"] = Section(prefix, matrices);
  return root.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace k3
