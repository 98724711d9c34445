#include "k3/layers/ffn_layer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "k3/kernels/exec.h"

namespace k3 {
namespace {

double Act(EncoderAct act, double x) {
  switch (act) {
    case EncoderAct::kSilu:
      return x / (1 + std::exp(-x));
    case EncoderAct::kTanh:
      return std::tanh(x);
    case EncoderAct::kRelu:
      return std::max(0.0, x);
    case EncoderAct::kNone:
      break;
  }
  return x;
}

// The golden model of a router encoder has one activation; this is each of them, written out.
TEST(FfnLayer, RouterReadsTheEncodersActivation) {
  const float identity[] = {1, 0, 0, 1}, bias[] = {0, 0}, halves[] = {.5f, .5f, .5f, .5f};
  const auto matrix = [](const float* data) { return WeightRef{WeightFormat::kF32, 2, 2, data}; };
  MoeWeights w;
  w.router = w.router_encoder = matrix(identity);
  w.router_bias = CVec(bias, {2});
  w.experts.resize(2);
  for (ExpertWeights& e : w.experts) e = {matrix(halves), matrix(halves), matrix(halves)};
  MoeConfig c;
  c.n_experts = c.top_k = c.encoder_dim = c.intermediate = 2;
  c.router = RouterSpace::kEncoder;
  c.renormalize = false;
  const float x[] = {0.8f, -1.5f};
  for (const EncoderAct act :
       {EncoderAct::kSilu, EncoderAct::kTanh, EncoderAct::kRelu, EncoderAct::kNone}) {
    c.encoder_act = act;
    Exec exec(1);
    float y[2];
    RoutingTrace trace;
    const Workspace::Mark mark(exec.ws);
    MoeForward(c, {}, 1e-5f, w, exec, CMat(x, {1, 2}), Mat(y, {1, 2}), &trace);
    for (std::int64_t i = 0; i < 2; ++i) {
      const double score = Act(act, static_cast<double>(x[trace.experts(0, i)]));
      EXPECT_NEAR(trace.weights(0, i), 1 / (1 + std::exp(-score)), 1e-6) << static_cast<int>(act);
    }
  }
}

}  // namespace
}  // namespace k3
