// CheckTensors: a checkpoint against the table of its config.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "k3/io/json.h"
#include "k3/model/matrix_form.h"
#include "k3/model/tensor_table.h"

namespace k3 {
namespace {

constexpr std::string_view kPrefix = "language_model.";
constexpr std::string_view kProbe = "model.layers.0.input_layernorm.weight";
constexpr std::int64_t kMaxScaleScan = std::int64_t{256} << 20;
constexpr std::int64_t kMaxHeadCompare = std::int64_t{256} << 20;
constexpr std::size_t kMaxUnexpectedWarnings = 20;

bool IsFloat(DType t) { return t == DType::kBF16 || t == DType::kF16 || t == DType::kF32; }

class Checker {
 public:
  Checker(const ModelConfig& config, const Checkpoint& checkpoint)
      : config_(config), checkpoint_(checkpoint) {}

  Result<TensorCheck> Run() {
    FindPrefix();
    matched_.reserve(checkpoint_.tensors().size());
    K3_TRY(ForEachTensor(config_, [this](const TensorSpec& spec) { return Check(spec); }));
    K3_TRY(CheckTiedHead());
    out_.text_tensors = static_cast<std::int64_t>(matched_.size());
    K3_TRY(CheckUnexpected());
    K3_TRY(ScanScales());
    return std::move(out_);
  }

 private:
  void FindPrefix() {
    const bool with = checkpoint_.Find(std::string(kPrefix).append(kProbe)) != nullptr;
    const bool without = checkpoint_.Find(kProbe) != nullptr;
    const bool use = with == without ? config_.nested : with;
    out_.prefix = use ? kPrefix : "";
    if (use != config_.nested) {
      out_.warnings.push_back(fmt::format("{}: config.json is {}, but the tensor names are {} {}",
                                          checkpoint_.dir(), config_.nested ? "nested" : "flat",
                                          use ? "with" : "without", kPrefix));
    }
  }

  const TensorRef* Find(const std::string& name) {
    name_.assign(out_.prefix).append(name);
    return checkpoint_.Find(name_);
  }

  Error Refuse(const std::string& name, std::string_view problem, std::string_view detail) {
    name_.assign(out_.prefix).append(name);
    const bool known = checkpoint_.Find(name_) != nullptr;
    return {known ? Code::kCorrupt : Code::kNotFound,
            fmt::format("{}: {} {}{}", known ? checkpoint_.FileOf(name_) : checkpoint_.dir(),
                        problem, name, detail)};
  }
  Error WrongShape(const std::string& name, const TensorRef& t,
                   const std::vector<std::int64_t>& expected) {
    return Refuse(
        name, "wrong shape",
        fmt::format(": found {}, expected {}", ShapeString(t.shape), ShapeString(expected)));
  }
  Error WrongDType(const std::string& name, const TensorRef& t, std::string_view expected) {
    return Refuse(name, "wrong dtype",
                  fmt::format(": found {}, expected {}", Name(t.dtype), expected));
  }

  Status Check(const TensorSpec& spec) {
    const TensorRef* t = Find(spec.name);
    const bool matrix = MayBeQuantized(spec);
    if (matrix) {
      const TensorRef* packed = Find(spec.name + "_packed");
      if (packed && t)
        return Refuse(spec.name, "ambiguous tensor", ": it is also there as _packed");
      if (packed) return CheckParts(spec, WeightFormat::kMxfp4);
      if (!t && Find(spec.name + "_scale"))
        return Refuse(spec.name + "_packed", "missing tensor", "");
      if (t && t->dtype == DType::kF8E4M3) return CheckParts(spec, WeightFormat::kFp8);
      if (t && t->dtype == DType::kI8) return CheckParts(spec, WeightFormat::kInt8);
    }
    if (!t) return Refuse(spec.name, "missing tensor", "");
    matched_.push_back(t);
    if (!IsFloat(t->dtype)) {
      return WrongDType(spec.name, *t,
                        matrix ? "BF16, F16, F32, F8_E4M3 or I8" : "BF16, F16 or F32");
    }
    if (spec.name.ends_with(".A_log")) return CheckALog(spec, *t);
    if (t->shape != spec.shape && !IsConvOfRankTwo(spec, *t)) {
      return WrongShape(spec.name, *t, spec.shape);
    }
    return spec.f32 ? CheckFinite(spec, *t, t->elements()) : Status();
  }

  /// The small vectors that steer gates and routing: a NaN there need not reach the scores.
  Status CheckFinite(const TensorSpec& spec, const TensorRef& t, std::int64_t n) {
    std::vector<float> values;
    ToFloats(t, values);
    for (std::int64_t i = 0; i < n; ++i) {
      const float value = values[static_cast<std::size_t>(i)];
      if (std::isfinite(value)) continue;
      return Refuse(spec.name, "bad value in",
                    fmt::format(": value {} is {}, expected a finite number", i, value));
    }
    return {};
  }

  static bool IsConvOfRankTwo(const TensorSpec& spec, const TensorRef& t) {
    return spec.shape.size() == 3 && t.shape.size() == 2 && t.shape[0] == spec.shape[0] &&
           t.shape[1] == spec.shape[2];
  }

  /// Codes with their scales.
  Status CheckParts(const TensorSpec& spec, WeightFormat format) {
    const std::int64_t cols = spec.shape[1];
    const auto parts = PartsOf(format, spec.shape[0], cols);
    const bool mxfp4 = format == WeightFormat::kMxfp4;
    if (format != WeightFormat::kFp8 && cols % 32 != 0) {
      return Refuse(spec.name + std::string(parts[0].suffix), "wrong shape",
                    fmt::format(": rows of {} cannot be {} in groups of 32", cols,
                                mxfp4 ? "packed" : "scaled"));
    }
    for (const MatrixPart& part : parts) {
      const std::string name = spec.name + std::string(part.suffix);
      const TensorRef* t = Find(name);
      if (!t) return Refuse(name, "missing tensor", "");
      const bool e8m0 = mxfp4 && part.suffix == "_scale";
      if (t->dtype != part.dtype && !(e8m0 && t->dtype == DType::kF8E8M0)) {
        return WrongDType(name, *t, e8m0 ? "U8 or F8_E8M0" : Name(part.dtype));
      }
      if (t->shape != part.shape) return WrongShape(name, *t, part.shape);
      matched_.push_back(t);
      if (part.suffix == parts.back().suffix) {
        scales_.push_back(t);
        out_.scale_bytes += t->bytes();
      } else if (format == WeightFormat::kFp8) {
        codes_.push_back(t);
        out_.e4m3_bytes += t->bytes();
      }
    }
    out_.packed_experts += mxfp4 && spec.role == TensorRole::kRoutedExpert ? 1 : 0;
    return {};
  }

  /// The release pads A_log with zeros past the heads; anything else there is no padding.
  Status CheckALog(const TensorSpec& spec, const TensorRef& t) {
    const std::int64_t heads = spec.shape[0];
    if (t.elements() < heads || t.elements() > (std::int64_t{1} << 20)) {
      return WrongShape(spec.name, t, spec.shape);
    }
    std::vector<float> values;
    ToFloats(t, values);
    for (std::size_t i = static_cast<std::size_t>(heads); i < values.size(); ++i) {
      if (values[i] == 0.f) continue;
      return Refuse(
          spec.name, "wrong shape",
          fmt::format(": found {} values for {} heads, and value {} past them is {}, not zero",
                      values.size(), heads, i, values[i]));
    }
    return CheckFinite(spec, t, heads);
  }

  /// With tied embeddings lm_head may be absent; present, it is used.
  Status CheckTiedHead() {
    if (!config_.tied_embeddings) return {};
    TensorSpec spec;
    spec.name = "lm_head.weight";
    spec.shape = {config_.vocab, config_.hidden};
    spec.role = TensorRole::kHead;
    const TensorRef* head = Find(spec.name);
    out_.has_head = head != nullptr || Find(spec.name + "_packed") != nullptr;
    if (!out_.has_head) return {};
    K3_TRY(Check(spec));
    const TensorRef* embedding = Find("model.embed_tokens.weight");
    const bool same =
        head && embedding && embedding->dtype == head->dtype && IsFloat(head->dtype) &&
        head->bytes() <= kMaxHeadCompare &&
        std::memcmp(head->data, embedding->data, static_cast<std::size_t>(head->bytes())) == 0;
    if (!same) {
      out_.warnings.push_back(
          fmt::format("{}: tie_word_embeddings is true, but lm_head.weight is there with its own "
                      "values; it is used",
                      checkpoint_.FileOf(out_.prefix + spec.name)));
    }
    return {};
  }

  bool IsVision(std::string_view name) const {
    return name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
  }

  Status CheckUnexpected() {
    std::sort(matched_.begin(), matched_.end());
    for (const auto& [name, t] : checkpoint_.tensors()) {
      if (std::binary_search(matched_.begin(), matched_.end(), &t)) continue;
      if (IsVision(name)) {
        out_.vision_tensors += 1;
        out_.vision_bytes += t.bytes();
        continue;
      }
      out_.unexpected.push_back(name);
    }
    for (std::size_t i = 0; i < out_.unexpected.size(); ++i) {
      std::string_view name = out_.unexpected[i];
      const bool text = name.starts_with(out_.prefix);
      if (text) name.remove_prefix(out_.prefix.size());
      if (config_.has_variant && text &&
          (name.starts_with("model.") || name.starts_with("lm_head"))) {
        return Error{Code::kCorrupt,
                     fmt::format("{}: unexpected tensor {}", checkpoint_.FileOf(out_.unexpected[i]),
                                 Printable(name))};
      }
      if (i < kMaxUnexpectedWarnings) {
        out_.warnings.push_back(fmt::format("{}: unexpected tensor {} is not used",
                                            checkpoint_.FileOf(out_.unexpected[i]),
                                            Printable(name)));
      }
    }
    if (out_.unexpected.size() > kMaxUnexpectedWarnings) {
      out_.warnings.push_back(fmt::format("{}: {} more unexpected tensors", checkpoint_.dir(),
                                          out_.unexpected.size() - kMaxUnexpectedWarnings));
    }
    return {};
  }

  /// Only small models: the scales of the released one are 90 GB of scattered reads.
  Status ScanScales() {
    out_.scales_checked = out_.scale_bytes <= kMaxScaleScan;
    out_.codes_checked = out_.e4m3_bytes <= kMaxScaleScan;
    if (out_.scales_checked) K3_TRY(Scan(scales_, CheckScales));
    if (out_.codes_checked) K3_TRY(Scan(codes_, CheckE4m3));
    return {};
  }

  template <class F>
  Status Scan(const std::vector<const TensorRef*>& list, F check) const {
    for (const TensorRef* bad : list) {
      if (check(*bad, "", "").ok()) continue;
      for (const auto& [name, t] : checkpoint_.tensors()) {
        if (&t == bad) return check(t, name, checkpoint_.FileOf(name));
      }
    }
    return {};
  }

  const ModelConfig& config_;
  const Checkpoint& checkpoint_;
  TensorCheck out_;
  std::string name_;                       // of the last lookup, reused
  std::vector<const TensorRef*> matched_;  // nodes of the checkpoint's map; sorted in the end
  std::vector<const TensorRef*> scales_, codes_;
};

}  // namespace

Result<TensorCheck> CheckTensors(const ModelConfig& config, const Checkpoint& checkpoint) {
  return Checker(config, checkpoint).Run();
}

Status CheckScales(const TensorRef& scales, std::string_view name, std::string_view where) {
  if (scales.dtype == DType::kF32 || scales.dtype == DType::kBF16) {
    std::vector<float> values;
    ToFloats(scales, values);
    const auto bad = std::find_if(values.begin(), values.end(),
                                  [](float s) { return !(s > 0 && s <= 0x1p120f); });
    if (bad == values.end()) return {};
    return Error{Code::kCorrupt,
                 fmt::format("{}: scale {} of tensor {} is {}, expected a positive number up to "
                             "2^120",
                             where, bad - values.begin(), Printable(name), *bad)};
  }
  const auto bytes = static_cast<std::size_t>(scales.bytes());
  const void* bad = bytes > 0 ? std::memchr(scales.data, 255, bytes) : nullptr;
  if (!bad) return {};
  return Error{Code::kCorrupt,
               fmt::format("{}: scale {} of tensor {} is 255, the NaN of E8M0", where,
                           static_cast<const std::byte*>(bad) - scales.data, Printable(name))};
}

Status CheckE4m3(const TensorRef& codes, std::string_view name, std::string_view where) {
  const std::byte* end = codes.data + codes.bytes();
  const std::byte* bad = std::find_if(
      codes.data, end, [](std::byte b) { return (b & std::byte{0x7F}) == std::byte{0x7F}; });
  if (bad == end) return {};
  return Error{Code::kCorrupt,
               fmt::format("{}: code {} of tensor {} is 0x{:02X}, the NaN of e4m3", where,
                           bad - codes.data, Printable(name), std::to_integer<unsigned>(*bad))};
}

}  // namespace k3
