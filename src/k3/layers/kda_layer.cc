#include "k3/layers/kda_layer.h"

#include <cmath>
#include <vector>

#include "k3/layers/scratch.h"

namespace k3 {
namespace {

/// Convolution, activation of one stream (0 q, 1 k, 2 v); updates the conv tails.
Mat Stream(const KdaConfig& c, Exec& exec, CMat x, const WeightRef& proj, CMat conv,
           std::span<const SequenceSlice> sequences, std::int64_t stream) {
  const Mat raw = NewMat(exec, x.dim(0), c.width()), out = NewMat(exec, x.dim(0), c.width());
  exec.ops->Gemm({x, proj, raw});
  std::vector<SequenceRange> ranges;
  std::vector<float*> histories;
  for (const SequenceSlice& s : sequences) {
    ranges.push_back({s.begin, s.count});
    histories.push_back(s.cache->kda.conv.data() + stream * (c.conv_kernel - 1) * c.width());
  }
  exec.ops->ShortConv({raw, conv, ranges, histories, out});
  return out;
}

/// The recurrence over all sequences, in the form the arithmetic mode asks for.
void Recur(const KdaConfig& c, Exec& exec, KdaArgs args, std::span<const SequenceSlice> sequences) {
  // Fast mode needs three passes: tokens before the first whole chunk, whole chunks, the rest.
  std::vector<SequenceRange> parts[3];
  std::vector<float*> states;
  for (const SequenceSlice& s : sequences) {
    states.push_back(s.cache->kda.state.data());
    const GridSplit cut = exec.math == MathMode::kFast ? SplitOnGrid(s.position, s.count, kKdaGrid)
                                                       : GridSplit{s.count, 0, 0};
    parts[0].push_back({s.begin, cut.head});
    parts[1].push_back({s.begin + cut.head, cut.middle});
    parts[2].push_back({s.begin + cut.head + cut.middle, cut.tail});
  }
  args.states = states;
  args.chunk = kKdaGrid;
  args.lower_bound = c.lower_bound;
  for (int i = 0; i < (exec.math == MathMode::kFast ? 3 : 1); ++i) {
    args.sequences = parts[i];
    if (i == 1) {
      exec.ops->KdaChunk(args);
    } else {
      exec.ops->KdaRecurrent(args);
    }
  }
}

}  // namespace

void KdaForward(const KdaConfig& c, float rms_eps, const KdaWeights& w, Exec& exec, CMat x,
                std::span<const SequenceSlice> sequences, Mat y, CMat* log_decay) {
  const std::int64_t T = x.dim(0), P = c.width();
  Backend& ops = *exec.ops;
  const Mat q = Stream(c, exec, x, w.q, w.conv_q, sequences, 0);
  const Mat k = Stream(c, exec, x, w.k, w.conv_k, sequences, 1);
  const Mat v = Stream(c, exec, x, w.v, w.conv_v, sequences, 2);
  ops.L2Norm({q, c.head_dim, 1e-6f, q});
  ops.L2Norm({k, c.head_dim, 1e-6f, k});

  const Mat low = NewMat(exec, T, w.f_a.rows), g = NewMat(exec, T, P);
  ops.Gemm({x, w.f_a, low});
  ops.Gemm({low, w.f_b, g});
  ops.KdaGate({g, w.dt_bias, w.a_log, c.lower_bound, g});
  if (log_decay != nullptr) *log_decay = g;
  const Mat beta = NewMat(exec, T, c.n_heads);
  ops.Gemm({x, w.b, beta});
  ops.Sigmoid({beta, beta});

  const Mat o = NewMat(exec, T, P);
  KdaArgs args;
  args.q = q, args.k = k, args.v = v, args.g = g, args.beta = beta, args.o = o;
  args.n_heads = c.n_heads;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_dim)));
  Recur(c, exec, args, sequences);

  const Mat gate = NewMat(exec, T, P);
  if (w.g.empty()) {
    const Mat low_gate = NewMat(exec, T, w.g_a.rows);
    ops.Gemm({x, w.g_a, low_gate});
    ops.Gemm({low_gate, w.g_b, gate});
  } else {
    ops.Gemm({x, w.g, gate});
  }
  ops.GatedRmsNorm({o, gate, w.o_norm, rms_eps, o});
  ops.Gemm({o, w.o, y});
}

}  // namespace k3
