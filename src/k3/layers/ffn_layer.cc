#include "k3/layers/ffn_layer.h"

#include "k3/layers/scratch.h"

namespace k3 {
namespace {

/// What the router reads: x, the latent z, or act(W_enc x).
CMat RouterInput(const MoeConfig& c, const MoeWeights& w, Exec& exec, CMat x, CMat z) {
  if (c.router == RouterSpace::kHidden) return x;
  if (c.router == RouterSpace::kLatent) return z;
  const Mat code = NewMat(exec, x.dim(0), c.encoder_dim);
  exec.ops->Gemm({x, w.router_encoder, code, true});
  switch (c.encoder_act) {
    case EncoderAct::kSilu:
      exec.ops->Pointwise({code, PointwiseFn::kSilu, code});
      break;
    case EncoderAct::kTanh:
      exec.ops->Pointwise({code, PointwiseFn::kTanh, code});
      break;
    case EncoderAct::kRelu:
      exec.ops->Pointwise({code, PointwiseFn::kRelu, code});
      break;
    case EncoderAct::kNone:
      break;
  }
  return code;
}

RoutingTrace Route(const MoeConfig& c, const MoeWeights& w, Exec& exec, CMat input) {
  const std::int64_t T = input.dim(0);
  const Mat logits = NewMat(exec, T, c.n_experts);
  exec.ops->Gemm({input, w.router, logits, true});
  RouteArgs args;
  args.logits = logits;
  args.bias = w.router_bias;
  args.k = c.top_k;
  args.softmax = c.score == ScoreFunction::kSoftmax;
  args.renormalize = c.renormalize;
  args.scale = c.routed_scale;
  args.n_group = c.n_group;
  args.topk_group = c.topk_group;
  args.experts = View<std::int32_t, 2>(exec.ws.Alloc<std::int32_t>(T * c.top_k), {T, c.top_k});
  args.weights = NewMat(exec, T, c.top_k);
  exec.ops->Route(args);
  return {args.experts, args.weights};
}

}  // namespace

void DenseForward(const GatedActivation& act, const DenseWeights& w, Exec& exec, CMat x, Mat y) {
  const Mat gate = NewMat(exec, x.dim(0), w.gate.rows), up = NewMat(exec, x.dim(0), w.up.rows);
  exec.ops->Gemm({x, w.gate, gate});
  exec.ops->Gemm({x, w.up, up});
  exec.ops->GatedAct({gate, up, act, gate});
  exec.ops->Gemm({gate, w.down, y});
}

void MoeForward(const MoeConfig& c, const GatedActivation& act, float rms_eps, const MoeWeights& w,
                Exec& exec, CMat x, Mat y, RoutingTrace* trace) {
  const std::int64_t T = x.dim(0);
  CMat z = x;
  if (!w.latent_down.empty()) {
    const Mat latent = NewMat(exec, T, c.latent);
    exec.ops->Gemm({x, w.latent_down, latent});
    z = latent;
  }
  const RoutingTrace chosen = Route(c, w, exec, RouterInput(c, w, exec, x, z));
  if (trace != nullptr) *trace = chosen;

  const Mat combined = w.latent_up.empty() ? y : NewMat(exec, T, c.latent);
  exec.ops->ExpertMlp({z, chosen.experts, chosen.weights, w.experts, act, combined});
  if (!w.latent_up.empty()) {
    if (w.latent_norm.data) exec.ops->RmsNorm({combined, w.latent_norm, rms_eps, combined});
    exec.ops->Gemm({combined, w.latent_up, y});
  }
  if (!w.shared.gate.empty()) {
    const Mat shared = NewMat(exec, T, y.dim(1));
    DenseForward(act, w.shared, exec, x, shared);
    exec.ops->Residual({y, shared, 1.f, {}, y});
  }
}

}  // namespace k3
