// Backward of the ops that treat rows or elements by themselves.
#include <algorithm>
#include <cmath>

#include "k3/kernels/backward/backward.h"
#include "k3/kernels/backward/grad_math_internal.h"

namespace k3::grad {
namespace {

/// 1 / sqrt(sum(x^2) / divisor + eps)
template <class S>
S InverseNorm(const S* x, std::int64_t n, S divisor, S eps) {
  return S{1} / std::sqrt(Dot(x, x, n) / divisor + eps);
}

/// n = x r with r = InverseNorm(x): dx += r (dn - n <n, dn> / divisor), where dn(i) is given.
template <class S, class F>
void NormBackward(const S* x, std::int64_t n, S r, S divisor, F dn, S* dx) {
  if (dx == nullptr) return;
  S dot = 0;
  for (std::int64_t i = 0; i < n; ++i) dot += dn(i) * x[i];
  const S back = dot * r * r / divisor;
  for (std::int64_t i = 0; i < n; ++i) dx[i] += r * (dn(i) - x[i] * back);
}

template <class T>
T* RowOrNull(const View<T, 2>& v, std::int64_t t) {
  return v.data ? v.row(t) : nullptr;
}

}  // namespace

template <class S>
void RmsNorm(const Context& ctx, const RmsNormArgs<S>& a) {
  const auto D = a.x.dim(1);
  const S divisor = static_cast<S>(D);
  ctx.ReduceRows(a.x.dim(0), D, 6 * D, a.dw.data, [&](std::int64_t t, S* dw) {
    const S *x = a.x.row(t), *dy = a.dy.row(t), *w = a.w.data;
    const S r = InverseNorm(x, D, divisor, a.eps);
    for (std::int64_t d = 0; d < D; ++d) dw[d] += dy[d] * x[d] * r;
    NormBackward(
        x, D, r, divisor, [=](std::int64_t d) { return dy[d] * w[d]; }, RowOrNull(a.dx, t));
  });
}

template <class S>
void GatedRmsNorm(const Context& ctx, const GatedRmsNormArgs<S>& a) {
  const auto V = a.w.dim(0), P = a.x.dim(1);
  const S divisor = static_cast<S>(V);
  ctx.ReduceRows(a.x.dim(0), V, 20 * P, a.dw.data, [&](std::int64_t t, S* dw) {
    std::vector<S> dn(static_cast<std::size_t>(V));
    for (std::int64_t h = 0; h < P; h += V) {
      const S *x = a.x.row(t) + h, *gate = a.gate.row(t) + h, *dy = a.dy.row(t) + h, *w = a.w.data;
      const S r = InverseNorm(x, V, divisor, a.eps);
      for (std::int64_t d = 0; d < V; ++d) {
        const S s = Sigmoid(gate[d]), n = x[d] * r;
        dw[d] += dy[d] * n * s;
        dn[static_cast<std::size_t>(d)] = dy[d] * w[d] * s;
        if (a.dgate.data) a.dgate.row(t)[h + d] += dy[d] * n * w[d] * s * (S{1} - s);
      }
      NormBackward(
          x, V, r, divisor, [&](std::int64_t d) { return dn[static_cast<std::size_t>(d)]; },
          a.dx.data ? a.dx.row(t) + h : nullptr);
    }
  });
}

template <class S>
void L2Norm(const Context& ctx, const L2NormArgs<S>& a) {
  const auto K = a.head_dim;
  ctx.ForEach(a.x.dim(0), 6 * a.x.dim(1), [&](std::int64_t t) {
    for (std::int64_t h = 0; h < a.x.dim(1); h += K) {
      const S *x = a.x.row(t) + h, *dy = a.dy.row(t) + h;
      const S r = InverseNorm(x, K, S{1}, a.eps);
      NormBackward(x, K, r, S{1}, [=](std::int64_t d) { return dy[d]; }, a.dx.row(t) + h);
    }
  });
}

template <class S>
void GatedAct(const Context& ctx, const GatedActArgs<S>& a) {
  const auto D = a.dy.dim(1);
  ctx.ForEach(a.dy.dim(0), 40 * D, [&](std::int64_t t) {
    for (std::int64_t d = 0; d < D; ++d) {
      const ActGrad<S> g = Differentiate(a.act, a.gate.row(t)[d], a.up.row(t)[d]);
      const S dy = a.dy.row(t)[d];
      if (a.dgate.data) a.dgate.row(t)[d] += dy * g.dgate;
      if (a.dup.data) a.dup.row(t)[d] += dy * g.dup;
    }
  });
}

template <class S>
void Residual(const Context& ctx, const ResidualArgs<S>& a) {
  const auto D = a.dout.dim(1);
  ctx.ReduceRows(a.dout.dim(0), 1, 10 * D, a.dalpha, [&](std::int64_t t, S* dalpha) {
    const S *dout = a.dout.row(t), *y = a.y.row(t);
    const bool scalar = a.gate.data && a.gate.dim(1) == 1;
    S s = scalar ? Sigmoid(a.gate(t, 0)) : S{1}, dscalar = 0;
    for (std::int64_t d = 0; d < D; ++d) {
      if (a.gate.data && !scalar) s = Sigmoid(a.gate(t, d));
      if (a.dx.data) a.dx.row(t)[d] += dout[d];
      if (a.dy.data) a.dy.row(t)[d] += dout[d] * a.alpha * s;
      const S dscale = dout[d] * y[d];
      *dalpha += dscale * s;
      if (!a.dgate.data) continue;
      const S dgate = dscale * a.alpha * s * (S{1} - s);
      if (scalar) {
        dscalar += dgate;
      } else {
        a.dgate(t, d) += dgate;
      }
    }
    if (scalar && a.dgate.data) a.dgate(t, 0) += dscalar;
  });
}

template <class S>
void Pointwise(const Context& ctx, const PointwiseArgs<S>& a) {
  const auto D = a.dy.dim(1);
  ctx.ForEach(a.dy.dim(0), 10 * D, [&](std::int64_t t) {
    for (std::int64_t d = 0; d < D; ++d) {
      const S x = a.x.row(t)[d], s = Sigmoid(x), c = std::tanh(x);
      const S slope = a.fn == PointwiseFn::kSilu   ? s * (S{1} + x * (S{1} - s))
                      : a.fn == PointwiseFn::kTanh ? S{1} - c * c
                                                   : S(x > 0);
      a.dx.row(t)[d] += a.dy.row(t)[d] * slope;
    }
  });
}

template <class S>
void Sigmoid(const Context& ctx, const SigmoidArgs<S>& a) {
  ctx.ForEach(a.dy.dim(0), 4 * a.dy.dim(1), [&](std::int64_t t) {
    for (std::int64_t d = 0; d < a.dy.dim(1); ++d) {
      const S y = a.y.row(t)[d];
      a.dx.row(t)[d] += a.dy.row(t)[d] * y * (S{1} - y);
    }
  });
}

template <class S>
void SigmoidGate(const Context& ctx, const SigmoidGateArgs<S>& a) {
  ctx.ForEach(a.dy.dim(0), 12 * a.dy.dim(1), [&](std::int64_t t) {
    for (std::int64_t d = 0; d < a.dy.dim(1); ++d) {
      const S s = Sigmoid(a.gate.row(t)[d]), dy = a.dy.row(t)[d];
      if (a.dx.data) a.dx.row(t)[d] += dy * s;
      if (a.dgate.data) a.dgate.row(t)[d] += dy * a.x.row(t)[d] * s * (S{1} - s);
    }
  });
}

template <class S>
void AddBias(const Context& ctx, const AddBiasArgs<S>& a) {
  const auto D = a.dy.dim(1);
  ctx.ReduceRows(a.dy.dim(0), D, 2 * D, a.dbias.data, [&](std::int64_t t, S* dbias) {
    for (std::int64_t d = 0; d < D; ++d) {
      dbias[d] += a.dy.row(t)[d];
      if (a.dx.data) a.dx.row(t)[d] += a.dy.row(t)[d];
    }
  });
}

template <class S>
void CopyRows(const Context& ctx, const CopyRowsArgs<S>& a) {
  // A row may be copied twice: columns are split among threads, not rows.
  ctx.Split(a.dy.dim(1), a.dy.dim(0), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < a.dy.dim(0); ++i) {
      S* dx = a.dx.row(a.rows.empty() ? i : a.rows[static_cast<std::size_t>(i)]);
      for (std::int64_t d = begin; d < end; ++d) dx[d] += a.dy.row(i)[d];
    }
  });
}

template <class S>
void Embed(const Context& ctx, const EmbedArgs<S>& a) {
  ctx.Split(a.dy.dim(1), a.dy.dim(0), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < a.dy.dim(0); ++i) {
      S* row = a.dtable.row(a.ids[static_cast<std::size_t>(i)]);
      for (std::int64_t d = begin; d < end; ++d) row[d] += a.dy.row(i)[d];
    }
  });
}

template <class S>
void Rope(const Context& ctx, const RopeArgs<S>& a) {
  const std::int64_t half = a.head_dim / 2;
  ctx.ForEach(a.d.dim(0), 60 * a.d.dim(1), [&](std::int64_t t) {
    const auto position = static_cast<double>(a.positions[static_cast<std::size_t>(t)]);
    for (std::int64_t d = 0; d < half; ++d) {
      const double angle = position * std::pow(a.theta, -2.0 * static_cast<double>(d) /
                                                            static_cast<double>(a.head_dim));
      const double c = std::cos(angle), s = std::sin(angle);
      for (S* x = a.d.row(t) + d; x < a.d.row(t) + a.d.dim(1); x += a.head_dim) {
        const double x0 = x[0], x1 = x[half];
        x[0] = static_cast<S>(x0 * c + x1 * s);
        x[half] = static_cast<S>(x1 * c - x0 * s);
      }
    }
  });
}

template <class S>
void AttnRes(const Context& ctx, const AttnResArgs<S>& a) {
  const auto n = static_cast<std::int64_t>(a.rows.size()), H = a.w.dim(0);
  const S divisor = static_cast<S>(H);
  std::vector<S> dw_dgamma(static_cast<std::size_t>(H + 1));
  ctx.ReduceRows(a.dy.dim(0), H + 1, 8 * n * H, dw_dgamma.data(), [&](std::int64_t t, S* sums) {
    const S *w = a.w.data, *dy = a.dy.row(t);
    auto row = [&](std::int64_t e) { return a.rows[static_cast<std::size_t>(e)] + t * H; };
    std::vector<S> scratch(static_cast<std::size_t>(3 * n));
    S *pi = scratch.data(), *r = pi + n, *dpi = r + n;
    const S gamma = a.gamma.value_or(S{1});
    for (std::int64_t e = 0; e < n; ++e) {
      r[e] = InverseNorm(row(e), H, divisor, a.eps);
      pi[e] = Dot(row(e), w, H) * r[e];
      dpi[e] = Dot(row(e), dy, H);
    }
    std::vector<S> score(pi, pi + n);
    Softmax(pi, n);
    S mean = 0;  // <dy, mix>
    for (std::int64_t e = 0; e < n; ++e) mean += pi[e] * dpi[e];
    sums[H] += mean - dpi[n - 1];
    for (std::int64_t e = 0; e < n; ++e) {
      const S ds = gamma * pi[e] * (dpi[e] - mean), *v = row(e);
      S* dv = a.drows[static_cast<std::size_t>(e)];
      const S direct = gamma * pi[e] + (e == n - 1 ? S{1} - gamma : S{0});
      const S shrink = r[e] * score[static_cast<std::size_t>(e)] / divisor;
      for (std::int64_t d = 0; d < H; ++d) sums[d] += ds * r[e] * v[d];
      if (dv == nullptr) continue;
      dv += t * H;
      for (std::int64_t d = 0; d < H; ++d) {
        dv[d] += direct * dy[d] + ds * r[e] * (w[d] - shrink * v[d]);
      }
    }
  });
  for (std::int64_t d = 0; a.dw.data && d < H; ++d) {
    a.dw(d) += dw_dgamma[static_cast<std::size_t>(d)];
  }
  if (a.dgamma) *a.dgamma += dw_dgamma[static_cast<std::size_t>(H)];
}

K3_INSTANTIATE(RmsNorm);
K3_INSTANTIATE(GatedRmsNorm);
K3_INSTANTIATE(L2Norm);
K3_INSTANTIATE(GatedAct);
K3_INSTANTIATE(Residual);
K3_INSTANTIATE(Pointwise);
K3_INSTANTIATE(Sigmoid);
K3_INSTANTIATE(SigmoidGate);
K3_INSTANTIATE(AddBias);
K3_INSTANTIATE(CopyRows);
K3_INSTANTIATE(Embed);
K3_INSTANTIATE(Rope);
K3_INSTANTIATE(AttnRes);

}  // namespace k3::grad
