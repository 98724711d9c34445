#include "k3/layers/residual.h"

#include <cmath>

#include "k3/layers/scratch.h"

namespace k3 {
namespace {

/// What every stream has in common.
struct Base : ResidualStream {
  Base(const ResidualConfig& c, std::int64_t layers, float eps, const ResidualWeights& weights,
       Exec& e, Mat embedding, ResidualObserver* o)
      : config(c), n_layers(layers), rms_eps(eps), w(weights), exec(e), p(embedding), observer(o) {}

  CMat live() const override { return p; }

  const ResidualSite& site(std::int64_t layer, Site s) const {
    return (s == Site::kAttention ? w.attention : w.ffn)[static_cast<std::size_t>(layer)];
  }

  /// Attention over `rows` (banked rows, then the live one) into `mixed`.
  CMat Mix(const ResidualSite& s, std::int64_t layer, std::optional<Site> where) {
    if (mixed.data == nullptr) mixed = NewMat(exec, p.dim(0), p.dim(1));
    std::vector<const float*> rows(bank);
    rows.push_back(p.data);
    Mat weights;
    std::unique_ptr<Workspace::Mark> mark;
    if (observer != nullptr) {
      mark = std::make_unique<Workspace::Mark>(exec.ws);
      weights = NewMat(exec, p.dim(0), static_cast<std::int64_t>(rows.size()));
    }
    const auto gamma = s.gamma ? std::optional<float>(*s.gamma) : std::nullopt;
    exec.ops->AttnRes(
        {rows, s.mix, rms_eps, gamma, mixed, weights, s.gamma, squares, known_squares});
    known_squares = squares.size();
    if (observer != nullptr) observer->DepthWeights(layer, where, weights);
    return mixed;
  }

  /// Banks the live row and starts the next, which a Write fills.
  void Bank() {
    bank.push_back(p.data);
    squares.push_back(NewMat(exec, p.dim(0), 1).data);
    p = NewMat(exec, p.dim(0), p.dim(1));
  }

  const ResidualConfig& config;
  std::int64_t n_layers;
  float rms_eps;
  const ResidualWeights& w;
  Exec& exec;
  Mat p;  // the live row
  ResidualObserver* observer;
  std::vector<const float*> bank;
  std::vector<float*> squares;    // of banked rows
  std::size_t known_squares = 0;  // how many of them a mix has left
  Mat mixed;
};

/// Spec section 4: the stream is banked raw every block_size layers and starts anew.
struct BlockAttnRes : Base {
  using Base::Base;

  CMat Read(std::int64_t layer, Site s) override {
    if (s == Site::kFfn) return Mix(site(layer, s), layer, s);
    const CMat h = bank.empty() ? CMat(p) : Mix(site(layer, s), layer, s);
    fresh = layer % config.block_size == 0;
    if (fresh) Bank();
    return h;
  }
  void Write(std::int64_t, Site s, CMat, CMat y) override {
    if (s == Site::kAttention && fresh) {
      exec.ops->CopyRows({y, {}, p});
    } else {
      exec.ops->Residual({p, y, 1.f, {}, p});
    }
  }
  CMat Output() override { return Mix(w.output, n_layers, std::nullopt); }

  bool fresh = false;
};

/// Every sublayer output is a row of its own; there is no sum.
struct FullAttnRes : Base {
  using Base::Base;

  CMat Read(std::int64_t layer, Site s) override {
    const CMat h = bank.empty() ? CMat(p) : Mix(site(layer, s), layer, s);
    Bank();
    return h;
  }
  void Write(std::int64_t, Site, CMat, CMat y) override { exec.ops->CopyRows({y, {}, p}); }
  CMat Output() override { return Mix(w.output, n_layers, std::nullopt); }
};

/// x + alpha f(x), with an optional norm on f and an optional gate.
struct Additive : Base {
  using Base::Base;

  CMat Read(std::int64_t, Site) override { return p; }
  void Write(std::int64_t layer, Site s, CMat n, CMat y) override {
    const Workspace::Mark mark(exec.ws);
    const ResidualSite& parts = site(layer, s);
    const bool plain =
        config.mode == ResidualMode::kPlain || (config.attention_only && s == Site::kFfn);
    if (plain) return exec.ops->Residual({p, y, 1.f, {}, p});
    if (config.mode == ResidualMode::kNormScaled) {
      const Mat normed = NewMat(exec, y.dim(0), y.dim(1));
      exec.ops->RmsNorm({y, parts.out_norm, rms_eps, normed});
      y = normed;
    }
    Mat gate;
    if (!parts.gate.empty()) {
      gate = NewMat(exec, y.dim(0), parts.gate.rows);
      exec.ops->Gemm({n, parts.gate, gate});
      exec.ops->AddBias({gate, parts.gate_bias, gate});
      if (observer != nullptr) observer->Gate(layer, s, gate);
    }
    const double depth = 1.0 / std::sqrt(2.0 * static_cast<double>(n_layers));
    const float alpha = config.fixed_depth_alpha ? static_cast<float>(depth)
                        : parts.alpha            ? *parts.alpha
                                                 : 1.f;
    exec.ops->Residual({p, y, alpha, gate, p, parts.alpha});
  }
  CMat Output() override { return p; }
};

}  // namespace

std::unique_ptr<ResidualStream> StartStream(const ResidualConfig& config, std::int64_t n_layers,
                                            float rms_eps, const ResidualWeights& w, Exec& exec,
                                            Mat embedding, ResidualObserver* observer) {
  switch (config.mode) {
    case ResidualMode::kBlockAttnRes:
      return std::make_unique<BlockAttnRes>(config, n_layers, rms_eps, w, exec, embedding,
                                            observer);
    case ResidualMode::kFullAttnRes:
      return std::make_unique<FullAttnRes>(config, n_layers, rms_eps, w, exec, embedding, observer);
    case ResidualMode::kPlain:
    case ResidualMode::kScaled:
    case ResidualMode::kGated:
    case ResidualMode::kGatedChannel:
    case ResidualMode::kNormScaled:
      break;
  }
  return std::make_unique<Additive>(config, n_layers, rms_eps, w, exec, embedding, observer);
}

}  // namespace k3
