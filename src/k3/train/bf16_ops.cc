#include "k3/train/bf16_ops.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "k3/kernels/forwarding_ops.h"
#include "k3/tensor/dtype.h"

namespace k3 {
namespace {

void Round(std::vector<float>& x) {
  for (float& v : x) v = RoundToBF16(v);
}

class Bf16Ops final : public ForwardingOps {
 public:
  using ForwardingOps::ForwardingOps;

  void Gemm(const GemmArgs& a) override {
    if (a.keep_f32) return inner_->Gemm(a);
    const std::int64_t cols = a.x.dim(1);
    x_.clear();
    for (std::int64_t t = 0; t < a.x.dim(0); ++t) {
      x_.insert(x_.end(), a.x.row(t), a.x.row(t) + cols);
    }
    Round(x_);
    GemmArgs rounded = a;
    rounded.x = CMat(x_.data(), {a.x.dim(0), cols});
    inner_->Gemm(rounded);
  }

  /// Expert by expert, since what enters the last product is rounded inside.
  void ExpertMlp(const ExpertMlpArgs& a) override {
    const std::int64_t T = a.x.dim(0), D = a.x.dim(1), k = a.experts.dim(1);
    std::vector<std::vector<std::int64_t>> pairs(a.table.size());
    for (std::int64_t p = 0; p < T * k; ++p) {
      pairs[static_cast<std::size_t>(a.experts(p / k, p % k))].push_back(p);
    }
    answers_.resize(static_cast<std::size_t>(T * k * D));
    for (std::size_t e = 0; e < pairs.size(); ++e) {
      if (!pairs[e].empty()) OneExpert(a, a.table[e], pairs[e]);
    }
    for (std::int64_t t = 0; t < T; ++t) {
      std::fill_n(a.y.row(t), D, 0.f);
      for (std::int64_t j = 0; j < k; ++j) {
        const float* row = answers_.data() + (t * k + j) * D;
        for (std::int64_t d = 0; d < D; ++d) a.y.row(t)[d] += a.weights(t, j) * row[d];
      }
    }
  }

 private:
  /// Leaves the answer to pair p in row p of answers_.
  void OneExpert(const ExpertMlpArgs& a, const ExpertWeights& w,
                 const std::vector<std::int64_t>& pairs) {
    const auto m = static_cast<std::int64_t>(pairs.size());
    const std::int64_t D = a.x.dim(1), I = w.w1.rows, k = a.experts.dim(1);
    rows_.resize(static_cast<std::size_t>(m * D)), out_.resize(rows_.size());
    for (std::int64_t r = 0; r < m; ++r) {
      std::copy_n(a.x.row(pairs[static_cast<std::size_t>(r)] / k), D, rows_.data() + r * D);
    }
    gate_.resize(static_cast<std::size_t>(m * I)), up_.resize(gate_.size());
    const Mat gate(gate_.data(), {m, I}), up(up_.data(), {m, I}), out(out_.data(), {m, D});
    const CMat x(rows_.data(), {m, D});
    Gemm({x, w.w1, gate});
    Gemm({x, w.w3, up});
    inner_->GatedAct({gate, up, a.act, gate});
    Gemm({gate, w.w2, out});
    for (std::int64_t r = 0; r < m; ++r) {
      std::copy_n(out.row(r), D, answers_.data() + pairs[static_cast<std::size_t>(r)] * D);
    }
  }

  std::vector<float> x_, rows_, gate_, up_, out_, answers_;  // kept between calls
};

}  // namespace

std::unique_ptr<Backend> MakeBf16Ops(std::unique_ptr<Backend> inner) {
  return std::make_unique<Bf16Ops>(std::move(inner));
}

}  // namespace k3
