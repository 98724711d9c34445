#include "k3/train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

namespace k3 {
namespace {

std::size_t U(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Heads that a projection's rows belong to; 1 when it is one matrix.
std::int64_t Heads(const ModelConfig& c, const TensorSpec& s) {
  if (s.role != TensorRole::kAttention || s.layer < 0) return 1;
  const auto dot = s.name.rfind(".self_attn.");
  if (dot == std::string::npos) return 1;
  const std::string part = s.name.substr(dot + 11);
  switch (c.attention[U(s.layer)]) {
    case AttentionKind::kKda:
      return part == "q_proj.weight" || part == "k_proj.weight" || part == "v_proj.weight"
                 ? c.kda.n_heads
                 : 1;
    case AttentionKind::kMla:
      return part == "q_proj.weight" || part == "q_b_proj.weight" || part == "kv_b_proj.weight"
                 ? c.n_heads
                 : 1;
    case AttentionKind::kGqa:
      if (part == "q_proj.weight") return c.n_heads;
      return part == "k_proj.weight" || part == "v_proj.weight" ? c.gqa.n_kv_heads : 1;
  }
  return 1;
}

}  // namespace

double Schedule::At(std::int64_t step) const {
  if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
  const double left = static_cast<double>(std::max<std::int64_t>(1, total - warmup));
  switch (kind) {
    case ScheduleKind::kConstant:
      return 1.0;
    case ScheduleKind::kCosine: {
      const double done = std::min(1.0, static_cast<double>(step - warmup) / left);
      return floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * done));
    }
    case ScheduleKind::kWarmupStableDecay: {
      if (decay <= 0 || step < total - decay) return 1.0;
      const double done =
          std::min(1.0, static_cast<double>(step - (total - decay)) / static_cast<double>(decay));
      return 1.0 - (1 - floor) * done;
    }
  }
  return 1.0;
}

Status Schedule::Check() const {
  if (warmup < 0 || decay < 0 || total < 0 || warmup + decay > total) {
    return Error{Code::kInvalidArgument,
                 fmt::format("schedule: {} warm-up and {} decay steps do not fit into {} steps",
                             warmup, decay, total)};
  }
  if (!(floor >= 0 && floor <= 1)) {
    return Error{Code::kInvalidArgument,
                 fmt::format("schedule.floor is {}, expected 0 to 1", floor)};
  }
  return {};
}

void NewtonSchulz(const grad::Context& ctx, float* u, std::int64_t rows, std::int64_t cols) {
  // Works on the wide orientation: the products are then rows x rows.
  const bool tall = rows > cols;
  const std::int64_t r = std::min(rows, cols), c = std::max(rows, cols);
  std::vector<float> x(U(r * c)), next(x.size()), a(U(r * r)), b(a.size());
  double square = 0;
  for (std::int64_t i = 0; i < rows * cols; ++i) square += static_cast<double>(u[i]) * u[i];
  const auto scale = static_cast<float>(1.0 / (std::sqrt(square) + 1e-7));
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      x[U(tall ? j * rows + i : i * cols + j)] = u[i * cols + j] * scale;
    }
  }
  constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;
  for (int step = 0; step < 5; ++step) {
    ctx.MulTransposed(r, c, r, x.data(), c, x.data(), a.data(), r);  // A = X X^T
    for (std::size_t i = 0; i < a.size(); ++i) b[i] = kB * a[i], a[i] *= kC;
    std::vector<float> unscaled(a);
    for (float& v : unscaled) v /= kC;
    ctx.MulAdd(r, r, r, grad::Strided<float>{a.data(), r, 1}, unscaled.data(), r, b.data(), r);
    for (std::size_t i = 0; i < x.size(); ++i) next[i] = kA * x[i];
    ctx.MulAdd(r, r, c, grad::Strided<float>{b.data(), r, 1}, x.data(), c, next.data(), c);
    std::swap(x, next);
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      u[i * cols + j] = x[U(tall ? j * rows + i : i * cols + j)];
    }
  }
}

Optimizer::Optimizer(Parameters& params, const AdamWOptions& adamw, const MuonOptions& muon)
    : params_(params), adamw_(adamw), muon_(muon), m_(U(params.total())), v_(U(params.total())) {}

bool Optimizer::uses_muon(const Parameter& p) const {
  if (!muon_.enabled || p.spec.shape.size() != 2 || p.rows() < 2 || p.cols() < 2) return false;
  switch (p.spec.role) {
    case TensorRole::kAttention:
    case TensorRole::kDense:
    case TensorRole::kLatent:
    case TensorRole::kSharedExpert:
    case TensorRole::kRoutedExpert:
      return true;
    case TensorRole::kRouter:
      return muon_.router;
    case TensorRole::kEmbedding:
    case TensorRole::kHead:
    case TensorRole::kNorm:
    case TensorRole::kResidual:
      return false;
  }
  return false;
}

std::int64_t Optimizer::block_rows(const Parameter& p) const {
  return p.rows() / Heads(params_.config(), p.spec);
}

void Optimizer::AdamW(const Parameter& p, double lr, double scale) {
  const std::int64_t at = p.value - params_.values();
  const auto t = static_cast<double>(steps_);
  const double m_fix = 1 / (1 - std::pow(adamw_.b1, t)), v_fix = 1 / (1 - std::pow(adamw_.b2, t));
  const double decay = p.spec.shape.size() == 2 && p.rows() > 1 ? adamw_.decay : 0.0;
  for (std::int64_t i = 0; i < p.size(); ++i) {
    const double g = scale * p.grad[i];
    float &m = m_[U(at + i)], &v = v_[U(at + i)];
    const double m1 = adamw_.b1 * m + (1 - adamw_.b1) * g;
    const double v1 = adamw_.b2 * v + (1 - adamw_.b2) * g * g;
    m = static_cast<float>(m1), v = static_cast<float>(v1);
    const double w = p.value[i];
    const double update = m1 * m_fix / (std::sqrt(v1 * v_fix) + adamw_.eps) + decay * w;
    p.value[i] = static_cast<float>(w - lr * update);
  }
}

void Optimizer::Muon(const grad::Context& ctx, double lr, double scale) {
  struct Block {
    const Parameter* p;
    std::int64_t first, rows;
  };
  std::vector<Block> blocks;
  for (const Parameter& p : params_.list()) {
    if (!uses_muon(p)) continue;
    const std::int64_t rows = block_rows(p);
    for (std::int64_t r = 0; r < p.rows(); r += rows) blocks.push_back({&p, r, rows});
  }
  ctx.ForEach(static_cast<std::int64_t>(blocks.size()), 1 << 15, [&](std::int64_t i) {
    const Block& b = blocks[U(i)];
    const std::int64_t cols = b.p->cols(), n = b.rows * cols, at = b.first * cols;
    float *w = b.p->value + at, *buf = m_.data() + (w - params_.values());
    const float* g = b.p->grad + at;
    std::vector<float> u(U(n));
    const auto momentum = static_cast<float>(muon_.momentum);
    for (std::int64_t j = 0; j < n; ++j) {
      const float gj = g[j] * static_cast<float>(scale);
      buf[j] = momentum * buf[j] + gj;
      u[U(j)] = gj + momentum * buf[j];
    }
    NewtonSchulz(ctx, u.data(), b.rows, cols);
    const double size = 0.2 * std::sqrt(static_cast<double>(std::max(b.rows, cols)));
    for (std::int64_t j = 0; j < n; ++j) {
      w[j] = static_cast<float>(w[j] - lr * (size * u[U(j)] + muon_.decay * w[j]));
    }
  });
}

void Optimizer::Step(const grad::Context& ctx, double lr, double muon_lr, double scale) {
  ++steps_;
  std::vector<const Parameter*> adam;
  for (const Parameter& p : params_.list()) {
    if (!p.is_router_bias() && !uses_muon(p)) adam.push_back(&p);
  }
  ctx.ForEach(static_cast<std::int64_t>(adam.size()), 1 << 15,
              [&](std::int64_t i) { AdamW(*adam[U(i)], lr, scale); });
  if (muon_.enabled) Muon(ctx, muon_lr, scale);
  params_.Refresh();
}

double GradientNorm(const Parameters& params) {
  double sum = 0;
  for (const Parameter& p : params.list()) {
    if (p.is_router_bias()) continue;
    for (std::int64_t i = 0; i < p.size(); ++i) sum += static_cast<double>(p.grad[i]) * p.grad[i];
  }
  return std::sqrt(sum);
}

}  // namespace k3
