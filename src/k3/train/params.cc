#include "k3/train/params.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include "k3/base/check.h"
#include "k3/base/rng.h"
#include "k3/io/checkpoint.h"
#include "k3/model/matrix_form.h"
#include "k3/quant/decode_row.h"
#include "k3/quant/encode.h"
#include "k3/quant/mxfp4.h"

namespace k3 {
namespace {

/// FNV-1a: names a stream of random numbers.
std::uint64_t HashName(std::string_view name) {
  std::uint64_t h = 0xCBF29CE484222325ull;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
  return h;
}

double Normal(Rng& rng) {
  const double u = 1.0 - rng.Uniform(), v = rng.Uniform();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

/// dt_bias: softplus(dt_bias) = dt, with dt log-uniform in [1e-3, 1e-1] and at least 1e-4. A
/// decay of zeros would forget within a token.
double InitialStep(Rng& rng) {
  const double lo = std::log(1e-3), hi = std::log(1e-1);
  const double dt = std::max(1e-4, std::exp(lo + (hi - lo) * rng.Uniform()));
  return dt + std::log(-std::expm1(-dt));
}

float StartValue(const ModelConfig& c, const TensorSpec& spec, double std, Rng& rng) {
  const std::string_view n = spec.name;
  if (n.ends_with(".dt_bias")) return static_cast<float>(InitialStep(rng));
  // Bounded: exp(0) z, the decay of the recipe. Unbounded: rates spread over 1 to 16.
  if (n.ends_with(".A_log")) {
    return c.kda.lower_bound ? 0.f : static_cast<float>(std::log(1.0 + 15.0 * rng.Uniform()));
  }
  if (n.ends_with("e_score_correction_bias")) return 0.f;
  if (n.ends_with("_res_proj.weight")) return 0.f;  // depth queries: a uniform mean at the start
  if (n.ends_with("_res_gate.weight") || n.ends_with("_res_gate.bias")) return 0.f;
  if (n.ends_with("_gamma")) return 1.f;
  if (n.ends_with("_alpha")) return static_cast<float>(c.residual.alpha_init);
  if (spec.shape.size() == 1) return 1.f;  // what is left of the vectors are norms
  return static_cast<float>(std * Normal(rng));
}

}  // namespace

bool IsRoundedInBf16(const TensorSpec& spec) {
  if (spec.shape.size() != 2 || spec.f32) return false;
  switch (spec.role) {
    case TensorRole::kNorm:
    case TensorRole::kRouter:
      return false;
    case TensorRole::kResidual:
      return spec.name.ends_with("_res_gate.weight");  // depth queries are weights of a mix
    default:
      return true;
  }
}

bool PacksAsMxfp4(const TensorSpec& spec) {
  return spec.role == TensorRole::kRoutedExpert && spec.shape.back() % kMxBlock == 0;
}

namespace {

bool IsCopied(const TensorSpec& spec, const ComputeOptions& compute) {
  return (compute.bf16 && IsRoundedInBf16(spec)) || (compute.mxfp4 && PacksAsMxfp4(spec));
}

/// What reading the exported codes gives.
void RoundMxfp4(const Parameter& p, std::vector<std::uint8_t>& bytes) {
  const auto n = static_cast<std::size_t>(p.size());
  bytes.resize(n / 2 + n / kMxBlock);
  const WeightRef w{WeightFormat::kMxfp4, p.rows(), p.cols(), bytes.data(), bytes.data() + n / 2};
  PackMxfp4({p.value, n}, MxScaleRule::kNoSaturation, bytes.data(), bytes.data() + n / 2);
  for (std::int64_t r = 0; r < w.rows; ++r) DecodeRow(w, r, p.used + r * w.cols);
}

}  // namespace

std::int64_t Parameters::CopiedFloats(const ModelConfig& config, const ComputeOptions& compute) {
  std::int64_t n = 0;
  for (const TensorSpec& s : ExpectedTensors(config)) n += IsCopied(s, compute) ? s.elements() : 0;
  return n;
}

void Parameters::Refresh() {
  std::vector<std::uint8_t> bytes;
  for (const Parameter& p : list_) {
    if (p.used == p.value) continue;
    if (rounds_experts_ && PacksAsMxfp4(p.spec)) {
      RoundMxfp4(p, bytes);
    } else {
      const bool bf16 = compute_.bf16;
      std::transform(p.value, p.value + p.size(), p.used,
                     [bf16](float v) { return bf16 ? RoundToBF16(v) : v; });
    }
  }
  model_->RefreshWeights();
}

void Parameters::RoundExperts(bool on) {
  K3_CHECK(!on || compute_.mxfp4, "the copies exist");
  if (on == rounds_experts_) return;
  rounds_experts_ = on;
  Refresh();
}

Result<std::unique_ptr<Parameters>> Parameters::Create(const ModelConfig& config,
                                                       const ComputeOptions& compute) {
  std::unique_ptr<Parameters> p(new Parameters(config, compute));
  const std::vector<TensorSpec> specs = ExpectedTensors(config);
  std::int64_t total = 0;
  for (const TensorSpec& s : specs) total += s.elements();
  p->values_.assign(static_cast<std::size_t>(total), 0.f);
  p->grads_.assign(static_cast<std::size_t>(total), 0.f);
  p->rounded_.assign(static_cast<std::size_t>(CopiedFloats(config, compute)), 0.f);
  TensorMap tensors;
  std::int64_t at = 0, copy = 0;
  for (const TensorSpec& s : specs) {
    float* value = p->values_.data() + at;
    float* used = IsCopied(s, compute) ? p->rounded_.data() + copy : value;
    p->list_.push_back({s, value, p->grads_.data() + at, used});
    tensors[s.name] = {DType::kF32, s.shape, reinterpret_cast<const std::byte*>(used)};
    at += s.elements();
    copy += used == value ? 0 : s.elements();
  }
  K3_ASSIGN(p->model_, Model::FromTensors(config, tensors));
  for (const auto& product : p->model_->weights().products) {
    p->product_grads_.emplace_back(static_cast<std::size_t>(product.n));
  }
  return p;
}

Result<std::unique_ptr<Parameters>> Parameters::Load(const std::string& dir,
                                                     const ComputeOptions& compute) {
  K3_ASSIGN(const ModelConfig config, ReadModelConfig(dir));
  K3_ASSIGN(const Checkpoint files, Checkpoint::Open(dir));
  K3_ASSIGN(const TensorCheck check, CheckTensors(config, files));
  K3_ASSIGN(auto p, Create(config, compute));
  for (Parameter& q : p->list_) {
    const std::string name = check.prefix + q.spec.name;
    const auto format = FormatOf(files.tensors(), name);
    if (format && HasScales(*format)) {
      const WeightRef w = MatrixOf(files.tensors(), name);
      const std::string scales = name + std::string(PartsOf(*format, w.rows, w.cols)[1].suffix);
      K3_TRY(CheckScales(*files.Find(scales), scales, files.FileOf(scales)));
      for (std::int64_t r = 0; r < w.rows; ++r) DecodeRow(w, r, q.value + r * w.cols);
      continue;
    }
    std::vector<float> values;
    const TensorRef* t = files.Find(name);
    K3_CHECK(t != nullptr && ToFloats(*t, values), "CheckTensors found it");
    std::copy_n(values.data(), q.size(), q.value);  // A_log may be stored with padding
  }
  p->Refresh();
  return p;
}

void Parameters::Initialise(const InitOptions& options) {
  for (Parameter& p : list_) {
    Rng rng(options.seed ^ HashName(p.spec.name));
    for (std::int64_t i = 0; i < p.size(); ++i) {
      p.value[i] = StartValue(config_, p.spec, options.std, rng);
    }
  }
  Refresh();
}

Parameter* Parameters::Find(std::string_view name) {
  for (Parameter& p : list_) {
    if (p.spec.name == name) return &p;
  }
  return nullptr;
}

void Parameters::ZeroGrads() {
  std::fill(grads_.begin(), grads_.end(), 0.f);
  for (auto& g : product_grads_) std::fill(g.begin(), g.end(), 0.f);
}

void Parameters::Register(ShadowMap& shadows) {
  for (Parameter& p : list_) {
    if (!p.is_router_bias()) shadows.AddParameter(p.used, p.size(), p.grad);
  }
  const auto& products = model_->weights().products;
  for (std::size_t i = 0; i < products.size(); ++i) {
    shadows.AddParameter(products[i].product, products[i].n, product_grads_[i].data());
  }
}

void Parameters::SplitProducts() {
  const auto& products = model_->weights().products;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const ModelWeights::Product& p = products[i];
    float* dnorm = grads_.data() + (p.norm - values_.data());
    float* dproj = grads_.data() + (p.proj - values_.data());
    for (std::int64_t d = 0; d < p.n; ++d) {
      float& g = product_grads_[i][static_cast<std::size_t>(d)];
      dnorm[d] += g * p.proj[d];
      dproj[d] += g * p.norm[d];
      g = 0.f;
    }
  }
}

}  // namespace k3
