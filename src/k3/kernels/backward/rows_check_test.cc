// Gradient checks of the row-wise ops, products, experts and the loss. The forward passes here are
// the equations of the op headers in float64, written apart from the backward ones.
#include "k3/kernels/backward/check_test_util.h"

namespace k3::grad::testing {
namespace {

using Doubles = std::vector<double>;

constexpr std::int64_t T = 5, D = 12;

TEST(GradientCheck, RmsNorm) {
  Rng rng(1);
  Bag<double> b;
  b.in = {{"x", Random(rng, T * D)}, {"w", Random(rng, D)}};
  CheckGradients(
      "rms_norm", b,
      [](Bag<double>& p) {
        Doubles y;
        for (std::int64_t t = 0; t < T; ++t) {
          double sum = 0;
          for (std::int64_t d = 0; d < D; ++d) sum += std::pow(p.M("x", T, D)(t, d), 2);
          for (std::int64_t d = 0; d < D; ++d) {
            y.push_back(p.in["w"][U(d)] * p.M("x", T, D)(t, d) / std::sqrt(sum / D + 0.01));
          }
        }
        return y;
      },
      []<class S>(const Context& ctx, Bag<S>& p) {
        RmsNorm<S>(ctx, {p.M("x", T, D), p.V("w"), S(0.01), p.Dy(D), p.D("x", T, D), p.DV("w")});
      });
}

TEST(GradientCheck, GatedRmsNorm) {
  Rng rng(2);
  Bag<double> b;
  b.in = {{"x", Random(rng, T * D)}, {"gate", Random(rng, T * D)}, {"w", Random(rng, 4)}};
  CheckGradients(
      "gated_rms_norm", b,
      [](Bag<double>& p) {
        Doubles y;
        for (std::int64_t i = 0; i < T * D; ++i) {
          double sum = 0;
          for (std::int64_t j = i / 4 * 4; j < i / 4 * 4 + 4; ++j) {
            sum += std::pow(p.in["x"][U(j)], 2);
          }
          y.push_back(p.in["w"][U(i % 4)] * p.in["x"][U(i)] / std::sqrt(sum / 4 + 0.01) *
                      Sig(p.in["gate"][U(i)]));
        }
        return y;
      },
      []<class S>(const Context& ctx, Bag<S>& p) {
        GatedRmsNorm<S>(ctx, {p.M("x", T, D), p.M("gate", T, D), p.V("w"), S(0.01), p.Dy(D),
                              p.D("x", T, D), p.D("gate", T, D), p.DV("w")});
      });
}

TEST(GradientCheck, L2Norm) {
  Rng rng(3);
  Bag<double> b;
  b.in = {{"x", Random(rng, T * D)}};
  CheckGradients(
      "l2_norm", b,
      [](Bag<double>& p) {
        Doubles y;
        for (std::int64_t i = 0; i < T * D; ++i) {
          double sum = 0.02;
          for (std::int64_t j = i / 6 * 6; j < i / 6 * 6 + 6; ++j) {
            sum += std::pow(p.in["x"][U(j)], 2);
          }
          y.push_back(p.in["x"][U(i)] / std::sqrt(sum));
        }
        return y;
      },
      []<class S>(const Context& ctx, Bag<S>& p) {
        L2Norm<S>(ctx, {p.M("x", T, D), 6, S(0.02), p.Dy(D), p.D("x", T, D)});
      });
}

Doubles Product(const Doubles& x, const Doubles& w, std::int64_t K) {
  Doubles y;
  for (std::size_t t = 0; t < x.size(); t += U(K)) {
    for (std::size_t n = 0; n < w.size(); n += U(K)) {
      double sum = 0;
      for (std::size_t k = 0; k < U(K); ++k) sum += x[t + k] * w[n + k];
      y.push_back(sum);
    }
  }
  return y;
}

TEST(GradientCheck, Gemm) {
  // Sizes that leave tails in every direction of the register tile; and more than one block of k.
  for (const auto& [t, n, k] : std::vector<std::array<std::int64_t, 3>>{
           {1, 1, 1}, {7, 5, 67}, {13, 33, 80}, {300, 3, 2}, {2, 300, 3}}) {
    Rng rng(4);
    Bag<double> b;
    b.in = {{"x", Random(rng, t * k)}, {"w", Random(rng, n * k)}};
    CheckGradients(
        "gemm", b, [k = k](Bag<double>& p) { return Product(p.in["x"], p.in["w"], k); },
        [t = t, n = n, k = k]<class S>(const Context& ctx, Bag<S>& p) {
          Gemm<S>(ctx, {p.M("x", t, k), p.M("w", n, k), p.Dy(n), p.D("x", t, k), p.D("w", n, k)});
        });
  }
}

TEST(GradientCheck, EmbedAndCopyRows) {
  Rng rng(5);
  const std::vector<TokenId> ids{3, 0, 3, 1};
  const std::vector<std::int64_t> rows{3, 0, 3, 1};
  Bag<double> b;
  b.in = {{"x", Random(rng, T * D)}};
  auto forward = [&](Bag<double>& p) {
    Doubles y;
    for (const std::int64_t r : rows) {
      y.insert(y.end(), &p.in["x"][U(r * D)], &p.in["x"][U(r * D)] + D);
    }
    return y;
  };
  CheckGradients("embed", b, forward, [&]<class S>(const Context& ctx, Bag<S>& p) {
    Embed<S>(ctx, {ids, p.Dy(D), p.D("x", T, D)});
  });
  CheckGradients("copy_rows", b, forward, [&]<class S>(const Context& ctx, Bag<S>& p) {
    CopyRows<S>(ctx, {rows, p.Dy(D), p.D("x", T, D)});
  });
  CheckGradients(
      "copy", b, [](Bag<double>& p) { return p.in["x"]; },
      [&]<class S>(const Context& ctx, Bag<S>& p) {
        CopyRows<S>(ctx, {{}, p.Dy(D), p.D("x", T, D)});
      });
}

double Act(const GatedActivation& act, double g, double u) {
  if (!act.situ) return g * Sig(g) * u;
  const double b1 = act.b1, up = act.b2 ? *act.b2 * std::tanh(u / *act.b2) : u;
  return b1 * std::tanh(g / b1) * Sig(g) * up;
}

TEST(GradientCheck, GatedAct) {
  for (const GatedActivation& act :
       {GatedActivation{false, 0.f, {}}, GatedActivation{true, 2.f, {}},
        GatedActivation{true, 2.f, 3.f}}) {
    Rng rng(6);
    Bag<double> b;
    b.in = {{"gate", Random(rng, T * D, 2)}, {"up", Random(rng, T * D, 2)}};
    CheckGradients(
        "gated_act", b,
        [&](Bag<double>& p) {
          Doubles y;
          for (std::size_t i = 0; i < p.in["up"].size(); ++i) {
            y.push_back(Act(act, p.in["gate"][i], p.in["up"][i]));
          }
          return y;
        },
        [&]<class S>(const Context& ctx, Bag<S>& p) {
          GatedAct<S>(ctx, {p.M("gate", T, D), p.M("up", T, D), act, p.Dy(D), p.D("gate", T, D),
                            p.D("up", T, D)});
        });
  }
}

TEST(GradientCheck, Residual) {
  for (const std::int64_t width : {std::int64_t{0}, std::int64_t{1}, D}) {
    Rng rng(7);
    Bag<double> b;
    b.in = {{"x", Random(rng, T * D)}, {"y", Random(rng, T * D)}, {"alpha", {0.6}}};
    if (width > 0) b.in["gate"] = Random(rng, T * width);
    CheckGradients(
        "residual", b,
        [&](Bag<double>& p) {
          Doubles out = p.in["x"];
          for (std::int64_t i = 0; i < T * D; ++i) {
            const double s = width == 0   ? 1
                             : width == 1 ? Sig(p.in["gate"][U(i / D)])
                                          : Sig(p.in["gate"][U(i)]);
            out[U(i)] += p.in["alpha"][0] * s * p.in["y"][U(i)];
          }
          return out;
        },
        [&]<class S>(const Context& ctx, Bag<S>& p) {
          ResidualArgs<S> a{p.M("y", T, D), {}, p.in["alpha"][0],   p.Dy(D), p.D("x", T, D),
                            p.D("y", T, D), {}, p.d["alpha"].data()};
          if (width > 0) a.gate = p.M("gate", T, width), a.dgate = p.D("gate", T, width);
          Residual<S>(ctx, a);
        });
  }
}

TEST(GradientCheck, Pointwise) {
  for (const PointwiseFn fn : {PointwiseFn::kSilu, PointwiseFn::kTanh, PointwiseFn::kRelu}) {
    Rng rng(8);
    Bag<double> b;
    b.in = {{"x", Random(rng, T * D)}};
    CheckGradients(
        "pointwise", b,
        [&](Bag<double>& p) {
          Doubles y = p.in["x"];
          for (double& x : y) {
            x = fn == PointwiseFn::kSilu   ? x * Sig(x)
                : fn == PointwiseFn::kTanh ? std::tanh(x)
                                           : std::max(x, 0.0);
          }
          return y;
        },
        [&]<class S>(const Context& ctx, Bag<S>& p) {
          Pointwise<S>(ctx, {p.M("x", T, D), fn, p.Dy(D), p.D("x", T, D)});
        });
  }
}

TEST(GradientCheck, SigmoidAndGate) {
  Rng rng(9);
  Bag<double> b;
  b.in = {{"x", Random(rng, T * D)}};
  CheckGradients(
      "sigmoid", b,
      [](Bag<double>& p) {
        Doubles y = p.in["x"];
        for (double& x : y) x = Sig(x);
        return y;
      },
      []<class S>(const Context& ctx, Bag<S>& p) {
        std::vector<S> y = p.in["x"];
        for (S& x : y) x = S{1} / (S{1} + std::exp(-x));
        Sigmoid<S>(ctx, {View<const S, 2>(y.data(), {T, D}), p.Dy(D), p.D("x", T, D)});
      });
  b.in["gate"] = Random(rng, T * D);
  CheckGradients(
      "sigmoid_gate", b,
      [](Bag<double>& p) {
        Doubles y = p.in["x"];
        for (std::size_t i = 0; i < y.size(); ++i) y[i] *= Sig(p.in["gate"][i]);
        return y;
      },
      []<class S>(const Context& ctx, Bag<S>& p) {
        SigmoidGate<S>(
            ctx, {p.M("x", T, D), p.M("gate", T, D), p.Dy(D), p.D("x", T, D), p.D("gate", T, D)});
      });
}

TEST(GradientCheck, AddBias) {
  Rng rng(10);
  Bag<double> b;
  b.in = {{"x", Random(rng, T * D)}, {"bias", Random(rng, D)}};
  CheckGradients(
      "add_bias", b,
      [](Bag<double>& p) {
        Doubles y = p.in["x"];
        for (std::size_t i = 0; i < y.size(); ++i) y[i] += p.in["bias"][i % U(D)];
        return y;
      },
      []<class S>(const Context& ctx, Bag<S>& p) {
        AddBias<S>(ctx, {p.Dy(D), p.D("x", T, D), p.DV("bias")});
      });
}

TEST(GradientCheck, AttnRes) {
  for (const std::int64_t n : {1, 2, 4}) {
    Rng rng(11);
    Bag<double> b;
    for (std::int64_t e = 0; e < n; ++e) b.in["row" + std::to_string(e)] = Random(rng, T * D);
    b.in["w"] = Random(rng, D);
    b.in["gamma"] = {0.7};
    CheckGradients(
        "attn_res", b,
        [&](Bag<double>& p) {
          Doubles y;
          for (std::int64_t t = 0; t < T; ++t) {
            Doubles s(U(n));
            double total = 0;
            for (std::int64_t e = 0; e < n; ++e) {
              const auto row = p.M("row" + std::to_string(e), T, D);
              double dot = 0, square = 0;
              for (std::int64_t d = 0; d < D; ++d) {
                dot += row(t, d) * p.in["w"][U(d)], square += row(t, d) * row(t, d);
              }
              total += s[U(e)] = std::exp(dot / std::sqrt(square / D + 0.01));
            }
            for (std::int64_t d = 0; d < D; ++d) {
              double mix = 0;
              for (std::int64_t e = 0; e < n; ++e) {
                mix += s[U(e)] / total * p.M("row" + std::to_string(e), T, D)(t, d);
              }
              const double live = p.M("row" + std::to_string(n - 1), T, D)(t, d);
              y.push_back(live + p.in["gamma"][0] * (mix - live));
            }
          }
          return y;
        },
        [&]<class S>(const Context& ctx, Bag<S>& p) {
          std::vector<const S*> rows;
          std::vector<S*> drows;
          for (std::int64_t e = 0; e < n; ++e) {
            rows.push_back(p.in["row" + std::to_string(e)].data());
            drows.push_back(p.d["row" + std::to_string(e)].data());
          }
          AttnRes<S>(ctx, {rows, p.V("w"), S(0.01), p.in["gamma"][0], p.Dy(D), drows, p.DV("w"),
                           p.d["gamma"].data()});
        });
  }
}

TEST(GradientCheck, Rope) {
  Rng rng(12);
  const std::vector<std::int64_t> positions{0, 1, 2, 7, 100};
  Bag<double> b;
  b.in = {{"x", Random(rng, T * D)}};
  CheckGradients(
      "rope", b,
      [&](Bag<double>& p) {
        Doubles y = p.in["x"];
        for (std::int64_t t = 0; t < T; ++t) {
          for (std::int64_t h = t * D; h < (t + 1) * D; h += 6) {
            for (std::int64_t d = 0; d < 3; ++d) {
              const double phi = static_cast<double>(positions[U(t)]) *
                                 std::pow(100.0, -2.0 * static_cast<double>(d) / 6);
              const double a = y[U(h + d)], c = y[U(h + d + 3)];
              y[U(h + d)] = a * std::cos(phi) - c * std::sin(phi);
              y[U(h + d + 3)] = c * std::cos(phi) + a * std::sin(phi);
            }
          }
        }
        return y;
      },
      [&]<class S>(const Context& ctx, Bag<S>& p) {
        std::vector<S> d = p.dy;
        Rope<S>(ctx, {View<S, 2>(d.data(), {T, D}), 6, 100.0, positions});
        for (std::size_t i = 0; i < d.size(); ++i) p.d["x"][i] += d[i];
      });
}

TEST(GradientCheck, RouteWeights) {
  const std::vector<std::int32_t> chosen{0, 3, 2, 1, 5, 4, 3, 0, 1, 2};
  for (const bool softmax : {false, true}) {
    for (const bool renormalize : {false, true}) {
      Rng rng(13);
      Bag<double> b;
      b.in = {{"logits", Random(rng, T * 6)}};
      CheckGradients(
          "route", b,
          [&](Bag<double>& p) {
            Doubles y;
            for (std::int64_t t = 0; t < T; ++t) {
              double z = 0, sum = 0;
              Doubles s;
              for (std::int64_t e = 0; e < 6; ++e) z += std::exp(p.M("logits", T, 6)(t, e));
              for (std::int64_t e = 0; e < 6; ++e) {
                const double x = p.M("logits", T, 6)(t, e);
                s.push_back(softmax ? std::exp(x) / z : Sig(x));
              }
              for (std::size_t j = 0; j < 2; ++j) sum += s[U(chosen[U(t) * 2 + j])];
              for (std::size_t j = 0; j < 2; ++j) {
                y.push_back(1.5 * s[U(chosen[U(t) * 2 + j])] / (renormalize ? sum : 1));
              }
            }
            return y;
          },
          [&]<class S>(const Context& ctx, Bag<S>& p) {
            Route<S>(ctx, {p.M("logits", T, 6), View<const std::int32_t, 2>(chosen.data(), {T, 2}),
                           softmax, renormalize, S(1.5), p.Dy(2), p.D("logits", T, 6)});
          });
    }
  }
}

TEST(GradientCheck, ExpertMlp) {
  constexpr std::int64_t kExperts = 4, I = 7, kTop = 2;  // expert 3 stays without tokens
  const std::vector<std::int32_t> chosen{0, 1, 2, 0, 1, 2, 0, 2, 1, 0};
  const GatedActivation act{true, 4.f, 25.f};
  Rng rng(14);
  Bag<double> b;
  b.in = {{"x", Random(rng, T * D)},
          {"weights", Random(rng, T * kTop)},
          {"w1", Random(rng, kExperts * I * D, 0.3)},
          {"w3", Random(rng, kExperts * I * D, 0.3)},
          {"w2", Random(rng, kExperts * I * D, 0.3)}};
  CheckGradients(
      "expert_mlp", b,
      [&](Bag<double>& p) {
        Doubles y(U(T * D));
        for (std::int64_t i = 0; i < T * kTop; ++i) {
          const std::int64_t t = i / kTop, e = chosen[U(i)];
          for (std::int64_t h = 0; h < I; ++h) {
            double g = 0, u = 0;
            for (std::int64_t d = 0; d < D; ++d) {
              g += p.in["w1"][U((e * I + h) * D + d)] * p.in["x"][U(t * D + d)];
              u += p.in["w3"][U((e * I + h) * D + d)] * p.in["x"][U(t * D + d)];
            }
            for (std::int64_t d = 0; d < D; ++d) {
              y[U(t * D + d)] +=
                  p.in["weights"][U(i)] * p.in["w2"][U((e * D + d) * I + h)] * Act(act, g, u);
            }
          }
        }
        return y;
      },
      [&]<class S>(const Context& ctx, Bag<S>& p) {
        std::vector<ExpertOf<S>> table;
        for (std::int64_t e = 0; e < kExperts; ++e) {
          const auto in = [&](const char* n, std::int64_t r, std::int64_t c) {
            return View<const S, 2>(p.in[n].data() + e * r * c, {r, c});
          };
          const auto d = [&](const char* n, std::int64_t r, std::int64_t c) {
            return View<S, 2>(p.d[n].data() + e * r * c, {r, c});
          };
          table.push_back({in("w1", I, D), in("w3", I, D), in("w2", D, I), d("w1", I, D),
                           d("w3", I, D), d("w2", D, I)});
        }
        ExpertMlp<S>(ctx, {p.M("x", T, D), View<const std::int32_t, 2>(chosen.data(), {T, kTop}),
                           p.M("weights", T, kTop), table, act, p.Dy(D), p.D("x", T, D),
                           p.D("weights", T, kTop)});
      });
}

TEST(GradientCheck, CrossEntropy) {
  constexpr std::int64_t kTokens = 300, kVocab = 5, H = 3;  // more than one chunk
  Rng rng(15);
  std::vector<TokenId> targets;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    targets.push_back(static_cast<TokenId>(rng.Next() % (kVocab + 1)) - 1);
  }
  Bag<double> b;
  b.in = {{"hidden", Random(rng, kTokens * H)}, {"head", Random(rng, kVocab * H)}};
  auto losses = [&](Bag<double>& p) {
    const Doubles scores = Product(p.in["hidden"], p.in["head"], H);
    Doubles loss;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      double sum = 0;
      for (std::int64_t v = 0; v < kVocab; ++v) sum += std::exp(scores[U(t * kVocab + v)]);
      const TokenId y = targets[U(t)];
      loss.push_back(y < 0 ? 0.0 : std::log(sum) - scores[U(t * kVocab + y)]);
    }
    return loss;
  };
  CheckGradients(
      "cross_entropy", b,
      [&](Bag<double>& p) {
        double sum = 0;
        for (const double x : losses(p)) sum += x;
        return Doubles{sum};
      },
      [&]<class S>(const Context& ctx, Bag<S>& p) {
        std::vector<double> each(U(kTokens));
        const double sum = CrossEntropy<S>(
            ctx, {p.M("hidden", kTokens, H), p.M("head", kVocab, H), targets, p.dy[0],
                  p.D("hidden", kTokens, H), p.D("head", kVocab, H), each});
        const Doubles want = losses(b);
        EXPECT_NEAR(sum, Inner(want, Doubles(want.size(), 1.0)), 1e-3);
        for (std::size_t t = 0; t < each.size(); ++t) EXPECT_NEAR(each[t], want[t], 1e-5) << t;
      });
}

}  // namespace
}  // namespace k3::grad::testing
