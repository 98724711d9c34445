// Gradient checks of the recurrence, its gate, the short convolution and softmax attention.
#include "k3/kernels/backward/check_test_util.h"

namespace k3::grad::testing {
namespace {

using Doubles = std::vector<double>;

TEST(GradientCheck, ShortConv) {
  constexpr std::int64_t P = 35, k = 4, T = 8, kTail = (k - 1) * P;
  // One sequence shorter than the kernel, one empty, one longer. The history found and the history
  // left count as an input and as an output.
  const std::vector<SequenceRange> ranges{{0, 2}, {2, 0}, {2, 6}};
  Rng rng(1);
  Bag<double> b;
  b.in = {
      {"x", Random(rng, T * P)}, {"w", Random(rng, P * k)}, {"history", Random(rng, 3 * kTail)}};
  CheckGradients(
      "short_conv", b,
      [&](Bag<double>& p) {
        Doubles y(U(T * P)), left = p.in["history"];
        for (std::size_t s = 0; s < ranges.size(); ++s) {
          const auto [begin, n] = ranges[s];
          auto at = [&](std::int64_t j, std::int64_t c) {
            return j < k - 1 ? p.in["history"][s * U(kTail) + U(j * P + c)]
                             : p.in["x"][U((begin + j - k + 1) * P + c)];
          };
          for (std::int64_t c = 0; c < P; ++c) {
            for (std::int64_t t = 0; t < n; ++t) {
              double sum = 0;
              for (std::int64_t j = 0; j < k; ++j) sum += p.in["w"][U(c * k + j)] * at(t + j, c);
              y[U((begin + t) * P + c)] = sum * Sig(sum);
            }
            for (std::int64_t j = 0; j < k - 1; ++j) {
              left[s * U(kTail) + U(j * P + c)] = at(n + j, c);
            }
          }
        }
        y.insert(y.end(), left.begin(), left.end());
        return y;
      },
      [&]<class S>(const Context& ctx, Bag<S>& p) {
        std::vector<S> dh(p.dy.begin() + T * P, p.dy.end());
        std::vector<const S*> histories;
        std::vector<S*> dhistories;
        for (std::int64_t s = 0; s < 3; ++s) {
          histories.push_back(p.in["history"].data() + s * kTail);
          dhistories.push_back(dh.data() + s * kTail);
        }
        ShortConv<S>(ctx, {p.M("x", T, P), p.M("w", P, k), ranges, histories,
                           View<const S, 2>(p.dy.data(), {T, P}), p.D("x", T, P), p.D("w", P, k),
                           dhistories});
        for (std::size_t i = 0; i < dh.size(); ++i) p.d["history"][i] += dh[i];
      });
}

TEST(GradientCheck, KdaGate) {
  constexpr std::int64_t T = 4, N = 3, K = 5, P = N * K;
  for (const bool bounded : {true, false}) {
    Rng rng(2);
    Bag<double> b;
    b.in = {{"f", Random(rng, T * P, 2)}, {"dt_bias", Random(rng, P)}, {"a_log", Random(rng, N)}};
    CheckGradients(
        bounded ? "bounded" : "softplus", b,
        [&](Bag<double>& p) {
          Doubles g;
          for (std::int64_t i = 0; i < T * P; ++i) {
            const double e = std::exp(p.in["a_log"][U(i % P / K)]);
            const double z = p.in["f"][U(i)] + p.in["dt_bias"][U(i % P)];
            g.push_back(bounded ? -5 * Sig(e * z) : -e * std::log(1 + std::exp(z)));
          }
          return g;
        },
        [&]<class S>(const Context& ctx, Bag<S>& p) {
          KdaGate<S>(ctx, {p.M("f", T, P), p.V("dt_bias"), p.V("a_log"),
                           bounded ? std::optional<S>(S(-5)) : std::nullopt, p.Dy(P),
                           p.D("f", T, P), p.DV("dt_bias"), p.DV("a_log")});
        });
  }
}

TEST(GradientCheck, KdaRecurrence) {
  // 37 tokens cross two borders; the second sequence starts and ends on odd rows, the third is
  // empty. Initial states are inputs, final states outputs.
  constexpr std::int64_t T = 44, N = 2, K = 5, V = 3;
  const std::vector<SequenceRange> ranges{{0, 37}, {37, 7}, {44, 0}};
  Rng rng(3);
  Bag<double> b;
  b.in = {{"q", Random(rng, T * N * K, 0.4)}, {"k", Random(rng, T * N * K, 0.4)},
          {"v", Random(rng, T * N * V)},      {"g", Random(rng, T * N * K, 0.2)},
          {"beta", Random(rng, T * N, 0.2)},  {"state", Random(rng, 3 * N * K * V)}};
  for (double& g : b.in["g"]) g -= 0.5;
  for (double& x : b.in["beta"]) x += 0.5;
  CheckGradients(
      "kda", b,
      [&](Bag<double>& p) {
        Doubles o(U(T * N * V)), state = p.in["state"];
        for (std::size_t s = 0; s < ranges.size(); ++s) {
          for (std::int64_t n = 0; n < N; ++n) {
            double* S = &state[s * U(N * K * V) + U(n * K * V)];
            for (std::int64_t t = ranges[s].begin; t < ranges[s].begin + ranges[s].count; ++t) {
              const double *q = &p.in["q"][U((t * N + n) * K)], *k = &p.in["k"][U((t * N + n) * K)];
              const double *g = &p.in["g"][U((t * N + n) * K)], *v = &p.in["v"][U((t * N + n) * V)];
              Doubles u(v, v + V);
              for (std::int64_t d = 0; d < K; ++d) {
                for (std::int64_t j = 0; j < V; ++j) {
                  S[d * V + j] *= std::exp(g[d]);
                  u[U(j)] -= k[d] * S[d * V + j];
                }
              }
              for (std::int64_t d = 0; d < K; ++d) {
                for (std::int64_t j = 0; j < V; ++j) {
                  S[d * V + j] += k[d] * p.in["beta"][U(t * N + n)] * u[U(j)];
                  o[U((t * N + n) * V + j)] += 0.7 * q[d] * S[d * V + j];
                }
              }
            }
          }
        }
        o.insert(o.end(), state.begin(), state.end());
        return o;
      },
      [&]<class S>(const Context& ctx, Bag<S>& p) {
        std::vector<S> ds(p.dy.begin() + T * N * V, p.dy.end());
        std::vector<const S*> states;
        std::vector<S*> dstates;
        for (std::int64_t s = 0; s < 3; ++s) {
          states.push_back(p.in["state"].data() + s * N * K * V);
          dstates.push_back(ds.data() + s * N * K * V);
        }
        KdaArgs<S> a;
        a.q = p.M("q", T, N * K), a.k = p.M("k", T, N * K), a.v = p.M("v", T, N * V);
        a.g = p.M("g", T, N * K), a.beta = p.M("beta", T, N);
        a.n_heads = N, a.scale = S(0.7), a.sequences = ranges, a.states = states;
        a.dout = View<const S, 2>(p.dy.data(), {T, N * V});
        a.dq = p.D("q", T, N * K), a.dk = p.D("k", T, N * K), a.dv = p.D("v", T, N * V);
        a.dg = p.D("g", T, N * K), a.dbeta = p.D("beta", T, N), a.dstates = dstates;
        Kda<S>(ctx, a);
        for (std::size_t i = 0; i < ds.size(); ++i) p.d["state"][i] += ds[i];
      });
}

/// o_i = sum_j softmax_j(scores)[j] v_j over the keys a query may see.
Doubles Attend(std::int64_t n, const Doubles& scores, const std::vector<const double*>& values,
               std::int64_t dv) {
  double total = 0;
  Doubles o(U(dv));
  for (std::int64_t j = 0; j < n; ++j) total += std::exp(scores[U(j)]);
  for (std::int64_t j = 0; j < n; ++j) {
    for (std::int64_t d = 0; d < dv; ++d) {
      o[U(d)] += std::exp(scores[U(j)]) / total * values[U(j)][d];
    }
  }
  return o;
}

constexpr std::int64_t kPageRows = 4;
/// Splits one array of rows into pages.
template <class S>
std::vector<S*> Pages(S* rows, std::int64_t n_rows, std::int64_t width) {
  std::vector<S*> pages;
  for (std::int64_t i = 0; i < n_rows; i += kPageRows) pages.push_back(rows + i * width);
  return pages;
}

TEST(GradientCheck, Mla) {
  // Two sequences: one from the start, one whose six first rows are older than its queries.
  constexpr std::int64_t N = 2, kNope = 3, kRope = 2, V = 4, R = 5, kRow = R + kRope;
  constexpr std::int64_t T = 8, kRows[] = {5, 9}, kCounts[] = {5, 3}, kQ = N * (kNope + kRope);
  Rng rng(4);
  Bag<double> b;
  b.in = {{"q", Random(rng, T * kQ)},
          {"kv_b", Random(rng, N * (kNope + V) * R, 0.5)},
          {"rows0", Random(rng, kRows[0] * kRow)},
          {"rows1", Random(rng, kRows[1] * kRow)}};
  CheckGradients(
      "mla", b,
      [&](Bag<double>& p) {
        Doubles o;
        for (std::int64_t t = 0; t < T; ++t) {
          const std::int64_t s = t < kCounts[0] ? 0 : 1;
          const std::int64_t n = s == 0 ? t + 1 : kRows[1] - kCounts[1] + t - kCounts[0] + 1;
          const auto rows = p.M(s == 0 ? "rows0" : "rows1", kRows[s], kRow);
          for (std::int64_t h = 0; h < N; ++h) {
            auto expand = [&](std::int64_t j, std::int64_t d) {  // row d of the head's kv_b
              double sum = 0;
              for (std::int64_t r = 0; r < R; ++r) {
                sum += p.in["kv_b"][U((h * (kNope + V) + d) * R + r)] * rows(j, r);
              }
              return sum;
            };
            const double* q = &p.in["q"][U(t * kQ + h * (kNope + kRope))];
            Doubles scores;
            std::vector<Doubles> values;
            std::vector<const double*> pointers;
            for (std::int64_t j = 0; j < n; ++j) {
              double dot = 0;
              for (std::int64_t d = 0; d < kNope; ++d) dot += q[d] * expand(j, d);
              for (std::int64_t d = 0; d < kRope; ++d) dot += q[kNope + d] * rows(j, R + d);
              scores.push_back(0.6 * dot);
              values.emplace_back();
              for (std::int64_t d = 0; d < V; ++d) values.back().push_back(expand(j, kNope + d));
            }
            for (const Doubles& v : values) pointers.push_back(v.data());
            const Doubles head = Attend(n, scores, pointers, V);
            o.insert(o.end(), head.begin(), head.end());
          }
        }
        return o;
      },
      [&]<class S>(const Context& ctx, Bag<S>& p) {
        std::vector<const S*> pages[2];
        std::vector<S*> dpages[2];
        std::vector<PagedSequence<S>> sequences;
        for (std::size_t s = 0; s < 2; ++s) {
          const std::string name = s == 0 ? "rows0" : "rows1";
          pages[s] = Pages<const S>(p.in[name].data(), kRows[s], kRow);
          dpages[s] = Pages<S>(p.d[name].data(), kRows[s], kRow);
          sequences.push_back(
              {s == 0 ? 0 : kCounts[0], kCounts[s], kRows[s], pages[s], {}, dpages[s], {}});
        }
        MlaArgs<S> a;
        a.q = p.M("q", T, kQ), a.kv_b = p.M("kv_b", N * (kNope + V), R);
        a.n_heads = N, a.nope_dim = kNope, a.rope_dim = kRope, a.v_dim = V;
        a.page_rows = kPageRows, a.scale = S(0.6), a.sequences = sequences;
        a.dout = p.Dy(N * V), a.dq = p.D("q", T, kQ), a.dkv_b = p.D("kv_b", N * (kNope + V), R);
        Mla<S>(ctx, a);
      });
}

TEST(GradientCheck, Gqa) {
  // 130 queries need a second block of weights; four query heads share two key heads.
  constexpr std::int64_t N = 4, G = 2, D = 2, T = 132, kRows[] = {2, 133}, kCounts[] = {2, 130};
  Rng rng(5);
  Bag<double> b;
  b.in = {{"q", Random(rng, T * N * D)},
          {"k0", Random(rng, kRows[0] * G * D)},
          {"v0", Random(rng, kRows[0] * G * D)},
          {"k1", Random(rng, kRows[1] * G * D)},
          {"v1", Random(rng, kRows[1] * G * D)}};
  CheckGradients(
      "gqa", b,
      [&](Bag<double>& p) {
        Doubles o;
        for (std::int64_t t = 0; t < T; ++t) {
          const std::int64_t s = t < kCounts[0] ? 0 : 1;
          const std::int64_t n = s == 0 ? t + 1 : kRows[1] - kCounts[1] + t - kCounts[0] + 1;
          const Doubles &keys = p.in[s == 0 ? "k0" : "k1"], &values = p.in[s == 0 ? "v0" : "v1"];
          for (std::int64_t h = 0; h < N; ++h) {
            Doubles scores;
            std::vector<const double*> pointers;
            for (std::int64_t j = 0; j < n; ++j) {
              double dot = 0;
              for (std::int64_t d = 0; d < D; ++d) {
                dot += p.in["q"][U((t * N + h) * D + d)] * keys[U((j * G + h / 2) * D + d)];
              }
              scores.push_back(dot / std::sqrt(2.0));
              pointers.push_back(&values[U((j * G + h / 2) * D)]);
            }
            const Doubles head = Attend(n, scores, pointers, D);
            o.insert(o.end(), head.begin(), head.end());
          }
        }
        return o;
      },
      [&]<class S>(const Context& ctx, Bag<S>& p) {
        std::vector<const S*> k[2], v[2];
        std::vector<S*> dk[2], dv[2];
        std::vector<PagedSequence<S>> sequences;
        for (std::size_t s = 0; s < 2; ++s) {
          const std::string kn = s == 0 ? "k0" : "k1", vn = s == 0 ? "v0" : "v1";
          k[s] = Pages<const S>(p.in[kn].data(), kRows[s], G * D);
          v[s] = Pages<const S>(p.in[vn].data(), kRows[s], G * D);
          dk[s] = Pages<S>(p.d[kn].data(), kRows[s], G * D);
          dv[s] = Pages<S>(p.d[vn].data(), kRows[s], G * D);
          sequences.push_back(
              {s == 0 ? 0 : kCounts[0], kCounts[s], kRows[s], k[s], v[s], dk[s], dv[s]});
        }
        GqaArgs<S> a;
        a.q = p.M("q", T, N * D), a.n_heads = N, a.n_kv_heads = G, a.page_rows = kPageRows;
        a.sequences = sequences, a.dout = p.Dy(N * D), a.dq = p.D("q", T, N * D);
        Gqa<S>(ctx, a);
      });
}

}  // namespace
}  // namespace k3::grad::testing
