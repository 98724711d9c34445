// Backward of the short convolution, the decay gate and the KDA recurrence.
#include <cmath>

#include "k3/kernels/backward/backward.h"
#include "k3/kernels/backward/grad_math_internal.h"
#include "k3/kernels/backward/kda_head.h"
#include "k3/kernels/cpu/simd_table.h"

namespace k3::grad {
namespace {

struct DoubleMath {
  static double Dot(const double* a, const double* b, std::int64_t n) {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
  }
  static void Axpy(double a, const double* x, double* y, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) y[i] += a * x[i];
  }
};

void RunHead(const Context&, const KdaHead<double>& h) { KdaHeadBackward<double, DoubleMath>(h); }
void RunHead(const Context& ctx, const KdaHead<float>& h) { ctx.simd().kda_backward(h); }

/// Channels [c0, c1) of one sequence. Rows of the sequence follow its history: x(j) for j < k - 1
/// is history, x(k - 1 + t) is token t.
template <class S>
void ConvChannels(const ShortConvArgs<S>& a, std::size_t seq, std::int64_t c0, std::int64_t c1) {
  const std::int64_t P = a.w.dim(0), k = a.w.dim(1), tail = k - 1, n = c1 - c0;
  const auto [begin, count] = a.sequences[seq];
  const S* history = a.histories.empty() ? nullptr : a.histories[seq];
  S* dhistory = a.dhistories.empty() ? nullptr : a.dhistories[seq];
  const std::vector<S> zero(static_cast<std::size_t>(n));
  auto x = [&](std::int64_t j) {
    if (j >= tail) return a.x.row(begin + j - tail) + c0;
    return history ? history + j * P + c0 : zero.data();
  };
  std::vector<S> dx(static_cast<std::size_t>((tail + count) * n));
  for (std::int64_t j = 0; dhistory && j < tail; ++j) {
    std::copy_n(dhistory + j * P + c0, n, dx.data() + (count + j) * n);
  }
  // Taps first, channels inside: both loops below then run along memory.
  std::vector<S> w(static_cast<std::size_t>(k * n)), dws(w.size()),
      sums(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < k * n; ++i) w[static_cast<std::size_t>(i)] = a.w(c0 + i % n, i / n);
  for (std::int64_t t = 0; t < count; ++t) {
    const S* dy = a.dy.row(begin + t) + c0;
    S* d = sums.data();
    std::fill_n(d, n, S{0});
    for (std::int64_t j = 0; j < k; ++j) {
      const S *xj = x(t + j), *wj = w.data() + j * n;
      for (std::int64_t c = 0; c < n; ++c) d[c] += wj[c] * xj[c];
    }
    for (std::int64_t c = 0; c < n; ++c) {
      const S s = Sigmoid(d[c]);
      d[c] = dy[c] * s * (S{1} + d[c] * (S{1} - s));
    }
    for (std::int64_t j = 0; j < k; ++j) {
      const S *xj = x(t + j), *wj = w.data() + j * n;
      S *dxj = dx.data() + (t + j) * n, *dwj = dws.data() + j * n;
      for (std::int64_t c = 0; c < n; ++c) {
        dxj[c] += d[c] * wj[c];
        dwj[c] += d[c] * xj[c];
      }
    }
  }
  for (std::int64_t i = 0; a.dw.data && i < n * k; ++i) {
    a.dw(c0 + i % n, i / n) += dws[static_cast<std::size_t>(i)];
  }
  for (std::int64_t j = 0; dhistory && j < tail; ++j) {
    std::copy_n(dx.data() + j * n, n, dhistory + j * P + c0);
  }
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t c = 0; c < n; ++c) {
      a.dx.row(begin + t)[c0 + c] += dx[static_cast<std::size_t>((tail + t) * n + c)];
    }
  }
}

}  // namespace

template <class S>
void ShortConv(const Context& ctx, const ShortConvArgs<S>& a) {
  constexpr std::int64_t kChannels = 32;
  const std::int64_t P = a.w.dim(0), blocks = (P + kChannels - 1) / kChannels;
  // Sequences add to the same weights: they follow each other inside one task.
  ctx.ForEach(blocks, kChannels * 40 * a.x.dim(0), [&](std::int64_t b) {
    for (std::size_t s = 0; s < a.sequences.size(); ++s) {
      if (a.sequences[s].count == 0) continue;
      ConvChannels(a, s, b * kChannels, std::min(P, (b + 1) * kChannels));
    }
  });
}

template <class S>
void KdaGate(const Context& ctx, const KdaGateArgs<S>& a) {
  const std::int64_t N = a.a_log.dim(0), P = a.f.dim(1), K = P / N;
  std::vector<S> sums(static_cast<std::size_t>(P + N));
  ctx.ReduceRows(a.f.dim(0), P + N, 20 * P, sums.data(), [&](std::int64_t t, S* add) {
    for (std::int64_t c = 0; c < P; ++c) {
      const S e = std::exp(a.a_log(c / K)), z = a.f.row(t)[c] + a.dt_bias(c), dg = a.dg.row(t)[c];
      S dz, da;
      if (a.lower_bound) {
        const S s = Sigmoid(e * z);
        dz = *a.lower_bound * s * (S{1} - s) * e * dg;
        da = dz * z;
      } else {
        dz = -e * Sigmoid(z) * dg;
        da = -e * (std::max(z, S{0}) + std::log1p(std::exp(-std::abs(z)))) * dg;
      }
      a.df.row(t)[c] += dz;
      add[c] += dz;
      add[P + c / K] += da;
    }
  });
  for (std::int64_t c = 0; a.ddt_bias.data && c < P; ++c) {
    a.ddt_bias(c) += sums[static_cast<std::size_t>(c)];
  }
  for (std::int64_t n = 0; a.da_log.data && n < N; ++n) {
    a.da_log(n) += sums[static_cast<std::size_t>(P + n)];
  }
}

template <class S>
void Kda(const Context& ctx, const KdaArgs<S>& a) {
  const std::int64_t N = a.n_heads, K = a.q.dim(1) / N, V = a.v.dim(1) / N;
  const auto tasks = static_cast<std::int64_t>(a.sequences.size()) * N;
  ctx.ForEach(tasks, 1 << 15, [&](std::int64_t i) {
    const auto s = static_cast<std::size_t>(i / N);
    const std::int64_t n = i % N;
    const auto [begin, T] = a.sequences[s];
    if (T == 0) return;
    std::vector<S> alpha(static_cast<std::size_t>(T * K));
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::int64_t d = 0; d < K; ++d) {
        alpha[static_cast<std::size_t>(t * K + d)] = std::exp(a.g.row(begin + t)[n * K + d]);
      }
    }
    std::vector<S> scratch(static_cast<std::size_t>(KdaHeadScratch(T, K, V, KdaArgs<S>::kBorder)));
    KdaHead<S> h{};
    h.T = T, h.K = K, h.V = V, h.border = KdaArgs<S>::kBorder, h.scale = a.scale;
    h.q = a.q.row(begin) + n * K, h.ld_q = a.q.strides[0];
    h.k = a.k.row(begin) + n * K, h.ld_k = a.k.strides[0];
    h.v = a.v.row(begin) + n * V, h.ld_v = a.v.strides[0];
    h.alpha = alpha.data(), h.ld_alpha = K;
    h.beta = a.beta.row(begin) + n, h.ld_beta = a.beta.strides[0];
    h.dout = a.dout.row(begin) + n * V, h.ld_o = a.dout.strides[0];
    h.dq = a.dq.row(begin) + n * K, h.ld_dq = a.dq.strides[0];
    h.dk = a.dk.row(begin) + n * K, h.ld_dk = a.dk.strides[0];
    h.dv = a.dv.row(begin) + n * V, h.ld_dv = a.dv.strides[0];
    h.dg = a.dg.row(begin) + n * K, h.ld_dg = a.dg.strides[0];
    h.dbeta = a.dbeta.row(begin) + n, h.ld_dbeta = a.dbeta.strides[0];
    h.S0 = a.states[s] + n * K * V, h.dS = a.dstates[s] + n * K * V;
    h.scratch = scratch.data();
    RunHead(ctx, h);
  });
}

K3_INSTANTIATE(ShortConv);
K3_INSTANTIATE(KdaGate);
K3_INSTANTIATE(Kda);

}  // namespace k3::grad
