// AdamW and Muon, learning-rate schedules, clipping.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/kernels/backward/context.h"
#include "k3/train/params.h"

namespace k3 {

/// m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w -= lr (m^ / (sqrt(v^) + eps) + decay w), with
/// m^, v^ corrected for their start at 0 and the old w in the decay term. Matrices with more than
/// one row decay; vectors, convolutions and single rows do not. Spec section 19.
struct AdamWOptions {
  double b1 = 0.9, b2 = 0.95, eps = 1e-8, decay = 0.1;
};

/// Matrices inside the layers, one block at a time (a head of a query, key or value projection, an
/// expert, or the whole matrix):
///   buf = momentum buf + g;  u = g + momentum buf;  w -= lr (0.2 sqrt(max(rows, cols)) NS(u)
///   + decay w)
/// with NS the five-step Newton-Schulz iteration towards the nearest orthogonal matrix. Embedding,
/// head, router and everything that is no matrix takes AdamW.
struct MuonOptions {
  bool enabled = false;
  bool router = false;  // true: the router takes Muon as well
  double lr = 2e-3, momentum = 0.95, decay = 0.1;
};

enum class ScheduleKind : std::uint8_t { kConstant, kCosine, kWarmupStableDecay };

/// Factor on the learning rates. Steps count from 0; warm-up rises linearly to 1.
struct Schedule {
  ScheduleKind kind = ScheduleKind::kCosine;
  std::int64_t warmup = 0, total = 0;
  std::int64_t decay = 0;  // kWarmupStableDecay: the last steps fall linearly
  double floor = 0.1;      // at the end

  double At(std::int64_t step) const;
  Status Check() const;
};

/// In place: u [rows, cols] towards U V^T of its singular value decomposition.
void NewtonSchulz(const grad::Context& ctx, float* u, std::int64_t rows, std::int64_t cols);

class Optimizer {
 public:
  Optimizer(Parameters& params, const AdamWOptions& adamw, const MuonOptions& muon);

  /// One step with the gradients as they are. `scale` multiplies them first (clipping).
  void Step(const grad::Context& ctx, double lr, double muon_lr, double scale = 1.0);

  std::int64_t steps() const { return steps_; }
  bool uses_muon(const Parameter& p) const;
  /// Rows of the blocks Muon treats as matrices of their own.
  std::int64_t block_rows(const Parameter& p) const;

  // For checkpoints: same layout as the parameters. Muon's momentum stands in `first`.
  std::vector<float>& first() { return m_; }
  std::vector<float>& second() { return v_; }
  void set_steps(std::int64_t n) { steps_ = n; }

 private:
  void AdamW(const Parameter& p, double lr, double scale);
  void Muon(const grad::Context& ctx, double lr, double scale);

  Parameters& params_;
  AdamWOptions adamw_;
  MuonOptions muon_;
  std::int64_t steps_ = 0;
  std::vector<float> m_, v_;
};

/// Euclidean norm of all gradients; not finite when any of them is not.
double GradientNorm(const Parameters& params);

}  // namespace k3
