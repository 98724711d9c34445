// Backward of routing weights and of the experts.
#include <cmath>
#include <numeric>

#include "k3/kernels/backward/backward.h"
#include "k3/kernels/backward/grad_math_internal.h"

namespace k3::grad {

template <class S>
void Route(const Context& ctx, const RouteArgs<S>& a) {
  const std::int64_t E = a.logits.dim(1), k = a.experts.dim(1);
  ctx.ForEach(a.logits.dim(0), 20 * E, [&](std::int64_t t) {
    std::vector<S> scratch(static_cast<std::size_t>(2 * E));
    S *score = scratch.data(), *dscore = score + E;
    std::copy_n(a.logits.row(t), E, score);
    if (a.softmax) {
      Softmax(score, E);
    } else {
      for (std::int64_t e = 0; e < E; ++e) score[e] = Sigmoid(score[e]);
    }
    // w_j = scale s_j / W: ds_j = scale / W (dw_j - sum_f dw_f s_f / W).
    S sum = static_cast<S>(1e-20), dot = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      sum += score[a.experts(t, j)];
      dot += score[a.experts(t, j)] * a.dweights(t, j);
    }
    for (std::int64_t j = 0; j < k; ++j) {
      const S dw = a.dweights(t, j);
      dscore[a.experts(t, j)] =
          a.renormalize && k > 1 ? a.scale / sum * (dw - dot / sum) : a.scale * dw;
    }
    S mean = 0;
    for (std::int64_t e = 0; a.softmax && e < E; ++e) mean += score[e] * dscore[e];
    for (std::int64_t e = 0; e < E; ++e) {
      a.dlogits.row(t)[e] +=
          a.softmax ? score[e] * (dscore[e] - mean) : dscore[e] * score[e] * (S{1} - score[e]);
    }
  });
}

namespace {

/// Token-expert pairs grouped by expert: pair[start[e] .. start[e + 1]) are those of expert e, in
/// token order; slot is the inverse.
struct Groups {
  std::vector<std::int64_t> start, pair, slot;

  Groups(View<const std::int32_t, 2> experts, std::size_t n_experts) : start(n_experts + 1) {
    const std::int64_t k = experts.dim(1), n = experts.dim(0) * k;
    auto expert = [&](std::int64_t p) { return static_cast<std::size_t>(experts(p / k, p % k)); };
    for (std::int64_t p = 0; p < n; ++p) ++start[expert(p) + 1];
    std::partial_sum(start.begin(), start.end(), start.begin());
    std::vector<std::int64_t> next(start);
    pair.resize(static_cast<std::size_t>(n)), slot.resize(pair.size());
    for (std::int64_t p = 0; p < n; ++p) {
      const std::int64_t s = next[expert(p)]++;
      slot[static_cast<std::size_t>(p)] = s;
      pair[static_cast<std::size_t>(s)] = p;
    }
  }
};

/// Gradients of one expert for its m pairs; leaves those of the inputs in dx_rows [m, D].
template <class S>
void OneExpert(const Context& ctx, const ExpertMlpArgs<S>& a, const ExpertOf<S>& w,
               const std::int64_t* pair, std::int64_t m, S* dx_rows) {
  const std::int64_t D = a.x.dim(1), I = w.w1.dim(0), k = a.experts.dim(1);
  std::vector<S> scratch(static_cast<std::size_t>(2 * m * D + 4 * m * I));
  S *x = scratch.data(), *dy = x + m * D, *gate = dy + m * D, *up = gate + m * I, *h = up + m * I,
    *dh = h + m * I;
  for (std::int64_t r = 0; r < m; ++r) {
    std::copy_n(a.x.row(pair[r] / k), D, x + r * D);
    std::copy_n(a.dy.row(pair[r] / k), D, dy + r * D);
  }
  ctx.Round(x, 2 * m * D);
  ctx.MulTransposed(m, D, I, x, D, w.w1.data, gate, I);
  ctx.MulTransposed(m, D, I, x, D, w.w3.data, up, I);
  ctx.MulAdd(m, D, I, Strided<S>{dy, D, 1}, w.w2.data, w.w2.strides[0], dh, I);
  for (std::int64_t r = 0; r < m; ++r) {
    const std::int64_t t = pair[r] / k, j = pair[r] % k;
    const S weight = a.weights(t, j);
    S dweight = 0;
    for (std::int64_t i = r * I; i < (r + 1) * I; ++i) {
      const ActGrad<S> act = Differentiate(a.act, gate[i], up[i]);
      dweight += dh[i] * act.y;
      h[i] = act.y * weight;  // dw2 wants the weighted dy: the factor may stand here as well
      gate[i] = dh[i] * weight * act.dgate;
      up[i] = dh[i] * weight * act.dup;
    }
    a.dweights(t, j) += dweight;
  }
  ctx.Round(gate, 3 * m * I);
  if (w.dw2.data) ctx.MulAdd(D, m, I, Strided<S>{dy, 1, D}, h, I, w.dw2.data, w.dw2.strides[0]);
  if (w.dw1.data) ctx.MulAdd(I, m, D, Strided<S>{gate, 1, I}, x, D, w.dw1.data, w.dw1.strides[0]);
  if (w.dw3.data) ctx.MulAdd(I, m, D, Strided<S>{up, 1, I}, x, D, w.dw3.data, w.dw3.strides[0]);
  ctx.MulAdd(m, I, D, Strided<S>{gate, I, 1}, w.w1.data, w.w1.strides[0], dx_rows, D);
  ctx.MulAdd(m, I, D, Strided<S>{up, I, 1}, w.w3.data, w.w3.strides[0], dx_rows, D);
}

}  // namespace

template <class S>
void ExpertMlp(const Context& ctx, const ExpertMlpArgs<S>& a) {
  const std::int64_t T = a.x.dim(0), D = a.x.dim(1), k = a.experts.dim(1);
  const Groups groups(a.experts, a.table.size());
  std::vector<S> dx_rows(static_cast<std::size_t>(T * k * D));
  ctx.ForEach(static_cast<std::int64_t>(a.table.size()), 1 << 15, [&](std::int64_t e) {
    const auto i = static_cast<std::size_t>(e);
    const std::int64_t first = groups.start[i], m = groups.start[i + 1] - first;
    if (m > 0) {
      OneExpert(ctx, a, a.table[i], groups.pair.data() + first, m, dx_rows.data() + first * D);
    }
  });
  ctx.ForEach(T, k * D, [&](std::int64_t t) {
    for (std::int64_t j = 0; j < k; ++j) {
      const S* row = dx_rows.data() + groups.slot[static_cast<std::size_t>(t * k + j)] * D;
      for (std::int64_t d = 0; d < D; ++d) a.dx.row(t)[d] += row[d];
    }
  });
}

K3_INSTANTIATE(Route);
K3_INSTANTIATE(ExpertMlp);

}  // namespace k3::grad
