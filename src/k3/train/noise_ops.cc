#include "k3/train/noise_ops.h"

#include <cmath>
#include <numbers>
#include <utility>

#include "k3/base/rng.h"
#include "k3/kernels/forwarding_ops.h"

namespace k3 {
namespace {

class NoiseOps final : public ForwardingOps {
 public:
  NoiseOps(std::unique_ptr<Backend> inner, const NoiseSource& source)
      : ForwardingOps(std::move(inner)), source_(source) {}

  void Gemm(const GemmArgs& a) override {
    inner_->Gemm(a);
    if (a.w.data != source_.matrix) return;
    Rng rng(source_.seed);
    for (std::int64_t t = 0; t < a.y.dim(0); ++t) {
      for (std::int64_t d = 0; d < a.y.dim(1); ++d) {
        const double u = 1.0 - rng.Uniform(), v = rng.Uniform();
        a.y.row(t)[d] +=
            static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
      }
    }
  }

 private:
  const NoiseSource& source_;
};

}  // namespace

std::unique_ptr<Backend> MakeNoiseOps(std::unique_ptr<Backend> inner, const NoiseSource& source) {
  return std::make_unique<NoiseOps>(std::move(inner), source);
}

}  // namespace k3
