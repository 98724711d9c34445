// The loss on top of the output layer, and what a teacher adds to it.
#include <cmath>

#include "k3/kernels/backward/backward.h"

namespace k3::grad {
namespace {

/// Scores of `n` hidden rows from `begin` on. Those of a teacher are never rounded.
template <class S>
void Scores(const Context& ctx, View<const S, 2> hidden, View<const S, 2> head, std::int64_t begin,
            std::int64_t n, S* out, bool is_teacher = false) {
  const std::int64_t V = head.dim(0), H = head.dim(1);
  std::vector<S> home;
  const View<const S, 2> rows(hidden.row(begin), {n, H}, hidden.strides);
  const View<const S, 2> x = is_teacher ? rows : ctx.Rounded(rows, home);
  ctx.Split(V, n * H, [&](std::int64_t b, std::int64_t e) {
    ctx.MulTransposed(n, H, e - b, x.data, x.strides[0], head.row(b), out + b, V);
  });
}

/// log sum_v exp(z[v] * r), without leaving the range.
template <class S>
double LogSum(const S* z, std::int64_t V, double r) {
  S top = z[0];
  for (std::int64_t v = 1; v < V; ++v) top = std::max(top, z[v]);
  double sum = 0;
  for (std::int64_t v = 0; v < V; ++v) sum += std::exp(static_cast<S>(r) * (z[v] - top));
  return r * top + std::log(sum);
}

struct TokenLoss {
  double nats = 0, divergence = 0;
};

/// Replaces the scores z of a token by their gradient.
template <class S>
TokenLoss Differentiate(S* z, std::int64_t V, TokenId target, double scale) {
  S top = z[0];
  for (std::int64_t v = 1; v < V; ++v) top = std::max(top, z[v]);
  double sum = 0;
  const double own = z[target] - top;
  for (std::int64_t v = 0; v < V; ++v) sum += z[v] = std::exp(z[v] - top);
  const S r = static_cast<S>(scale / sum);
  for (std::int64_t v = 0; v < V; ++v) z[v] *= r;
  z[target] -= static_cast<S>(scale);
  return {std::log(sum) - own, 0};
}

/// The same with the scores t of a teacher:
///   dz = scale ((1 - w) (softmax(z) - onehot) + w T (softmax(z / T) - softmax(t / T))).
template <class S>
TokenLoss Distil(S* z, const S* t, std::int64_t V, TokenId target, double scale, double weight,
                 double temperature) {
  const double r = 1 / temperature;
  const double plain = LogSum(z, V, 1.0), soft = LogSum(z, V, r), taught = LogSum(t, V, r);
  TokenLoss loss{plain - z[target], 0};
  for (std::int64_t v = 0; v < V; ++v) {
    const double log_p = r * z[v] - soft, log_q = r * t[v] - taught, q = std::exp(log_q);
    loss.divergence += q * (log_q - log_p);
    const double hard = std::exp(z[v] - plain) - (v == target ? 1 : 0);
    z[v] = static_cast<S>(scale *
                          ((1 - weight) * hard + weight * temperature * (std::exp(log_p) - q)));
  }
  loss.divergence *= temperature * temperature;
  return loss;
}

}  // namespace

template <class S>
double CrossEntropy(const Context& ctx, const CrossEntropyArgs<S>& a) {
  constexpr std::int64_t kChunk = 256;  // tokens whose scores exist at once
  const std::int64_t T = a.hidden.dim(0), V = a.head.dim(0), H = a.head.dim(1);
  const bool taught = a.teacher_hidden.data != nullptr;
  const std::int64_t most = std::min(T, kChunk);
  std::vector<S> scores(static_cast<std::size_t>(most * V));
  std::vector<S> lesson(static_cast<std::size_t>(taught ? most * V : 0));
  std::vector<TokenLoss> loss(static_cast<std::size_t>(most));
  double total = 0, divergence = 0;
  for (std::int64_t begin = 0; begin < T; begin += kChunk) {
    const std::int64_t m = std::min(kChunk, T - begin);
    const View<S, 2> p(scores.data(), {m, V});
    Scores(ctx, a.hidden, a.head, begin, m, p.data);
    if (taught) Scores(ctx, a.teacher_hidden, a.teacher_head, begin, m, lesson.data(), true);
    ctx.ForEach(m, 10 * V, [&](std::int64_t i) {
      const TokenId target = a.targets[static_cast<std::size_t>(begin + i)];
      TokenLoss& out = loss[static_cast<std::size_t>(i)];
      out = {};
      if (target < 0) return std::fill(p.row(i), p.row(i) + V, S{0});
      const auto scale = static_cast<double>(a.scale);
      out = taught ? Distil(p.row(i), lesson.data() + i * V, V, target, scale, a.teacher_weight,
                            a.temperature)
                   : Differentiate(p.row(i), V, target, scale);
    });
    for (std::int64_t i = 0; i < m; ++i) {
      const TokenLoss& one = loss[static_cast<std::size_t>(i)];
      total += one.nats, divergence += one.divergence;
      if (!a.losses.empty()) a.losses[static_cast<std::size_t>(begin + i)] = one.nats;
    }
    GemmArgs<S> g;
    g.x = View<const S, 2>(a.hidden.row(begin), {m, H}, a.hidden.strides);
    g.w = a.head;
    g.dy = p;
    if (a.dhidden.data) g.dx = View<S, 2>(a.dhidden.row(begin), {m, H}, a.dhidden.strides);
    g.dw = a.dhead;
    Gemm(ctx, g);
  }
  if (a.divergence != nullptr) *a.divergence = divergence;
  return total;
}

template double CrossEntropy<float>(const Context&, const CrossEntropyArgs<float>&);
template double CrossEntropy<double>(const Context&, const CrossEntropyArgs<double>&);

}  // namespace k3::grad
