// Balancing rules against goldens, and a router that starts skewed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "k3/base/rng.h"
#include "k3/train/balancer.h"
#include "k3/train/gradient_pass.h"
#include "support/config_fixtures.h"
#include "support/golden.h"

namespace k3 {
namespace {

using testing::Golden;
using Doubles = std::vector<double>;

Doubles Read(const Golden& g, const std::string& name) {
  const auto f = g.Floats(name);
  return {f.begin(), f.end()};
}

std::vector<std::int64_t> Loads(const Doubles& scores, const Doubles& bias, std::int64_t k) {
  const std::size_t n = bias.size();
  std::vector<std::int64_t> load(n);
  for (std::size_t t = 0; t < scores.size(); t += n) {
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return scores[t + a] + bias[a] > scores[t + b] + bias[b];
    });
    for (std::int64_t j = 0; j < k; ++j) ++load[order[static_cast<std::size_t>(j)]];
  }
  return load;
}

void ExpectNear(const Doubles& got, const Doubles& want, double tolerance = 2e-7) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
}

TEST(BalanceRules, TheWorkedExample) {
  const Golden g("modules_variants.safetensors");
  const Doubles s = Read(g, "qb_worked.scores"), zero(4);
  EXPECT_EQ(Loads(s, zero, 2), (std::vector<std::int64_t>{4, 3, 1, 0}));
  const Doubles exact = QuantileBias(s, zero, 2);
  ExpectNear(exact, Read(g, "qb_worked.bias_exact"));
  EXPECT_EQ(Loads(s, exact, 2), (std::vector<std::int64_t>{2, 2, 2, 2}));
  MarginHistogram h(zero, 1000);
  h.Add(s, zero, 2);
  ExpectNear(h.Bias(2), Read(g, "qb_worked.bias_hist"));
  EXPECT_EQ(Loads(s, h.Bias(2), 2), (std::vector<std::int64_t>{2, 2, 2, 2}));
  ExpectNear(QuantileBias(s, zero, 2, false), Read(g, "qb_worked.bias_exact_uncentred"));
  ExpectNear(QuantileBias(s, zero, 2, true, 0.5), Read(g, "qb_worked.bias_exact_rate_half"));
  ExpectNear(SignBias(Loads(s, zero, 2), zero, 2, 0.1), Read(g, "qb_worked.bias_sign_0p1"));
}

TEST(BalanceRules, ThreeStepsOfEveryRule) {
  const Golden g("modules_variants.safetensors");
  const Doubles all = Read(g, "balance.scores");
  Doubles tau(8), sliding(8), quantile(8), sign(8);
  for (std::size_t t = 0; t < 3; ++t) {
    const Doubles s(all.begin() + static_cast<std::ptrdiff_t>(t * 512),
                    all.begin() + static_cast<std::ptrdiff_t>((t + 1) * 512));
    const std::string step = "balance.step" + std::to_string(t);
    auto expect_load = [&](const char* name, const Doubles& bias) {
      const auto want = g.Ints(step + ".load_" + name);
      const auto got = Loads(s, bias, 3);
      EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin(), want.end())) << step << name;
    };
    expect_load("sliding", sliding), expect_load("quantile", quantile), expect_load("sign", sign);
    sliding = SlidingBias(ScoreQuantiles(s, 8, 3), tau, 0.3);
    quantile = QuantileBias(s, quantile, 3);
    sign = SignBias(Loads(s, sign, 3), sign, 24, 0.01);
    ExpectNear(tau, Read(g, step + ".tau_sliding_0p3"));
    ExpectNear(sliding, Read(g, step + ".bias_sliding"));
    ExpectNear(quantile, Read(g, step + ".bias_quantile"));
    ExpectNear(sign, Read(g, step + ".bias_sign_0p01"));
  }
  const Doubles first(all.begin(), all.begin() + 48 * 8);
  ExpectNear(QuantileBias(first, Doubles(8), 3), Read(g, "balance.masked_48_bias"));
}

TEST(BalanceRules, AuxiliaryLoss) {
  const Golden g("modules_variants.safetensors");
  auto logits = g.Floats("aux.logits");
  // Sixteen rows that count, and one of padding that must not.
  logits.insert(logits.end(), 8, 3.f);
  std::vector<char> counted(16, 1);
  counted.push_back(0);
  for (const bool softmax : {false, true}) {
    const std::string name = softmax ? "aux.softmax." : "aux.sigmoid.";
    auto idx = g.Ints(name + "idx");
    idx.insert(idx.end(), {0, 1, 2});
    std::vector<float> d(17 * 8);
    const double loss =
        AuxLoss(CMat(logits.data(), {17, 8}), View<const std::int32_t, 2>(idx.data(), {17, 3}),
                softmax, 0.01, counted, 2.0, Mat(d.data(), {17, 8}));
    EXPECT_NEAR(loss, g.Floats(name + "loss")[0], 1e-7);
    const auto want = g.Floats(name + "d_logits");
    for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(d[i], 2 * want[i], 1e-8) << i;
    for (std::size_t i = want.size(); i < d.size(); ++i) EXPECT_EQ(d[i], 0.f);
  }
}

/// 4096 tokens, or 64 an expert, whose scores favour low experts; `flip` favours high ones.
Doubles Skewed(Rng& rng, std::size_t n, bool flip) {
  Doubles s;
  for (std::size_t t = 0; t < std::max<std::size_t>(4096, 64 * n); ++t) {
    for (std::size_t e = 0; e < n; ++e) {
      const double at = static_cast<double>(flip ? n - 1 - e : e) / static_cast<double>(n);
      const double x = 1.5 - 3 * at + 2 * (rng.Uniform() + rng.Uniform() - 1);
      s.push_back(1 / (1 + std::exp(-x)));
    }
  }
  return s;
}

double MaxViolation(const std::vector<std::int64_t>& load) {
  const double mean =
      static_cast<double>(std::accumulate(load.begin(), load.end(), std::int64_t{0})) /
      static_cast<double>(load.size());
  return static_cast<double>(*std::max_element(load.begin(), load.end())) / mean - 1;
}

TEST(BalanceRules, QuantileNeedsNoKnobAtAnySizeAndFollowsAShift) {
  for (const std::size_t n : {16u, 64u, 256u}) {
    Rng rng(7);
    Doubles bias(n);
    EXPECT_GT(MaxViolation(Loads(Skewed(rng, n, false), bias, 4)), 1.5) << n;
    for (int step = 0; step < 4; ++step) {
      const Doubles s = Skewed(rng, n, step >= 2);  // a sudden shift after two steps
      MarginHistogram h(bias, 1000);
      h.Add(s, bias, 4);
      bias = h.Bias(4);
      if (step == 1 || step == 3) {
        EXPECT_LT(MaxViolation(Loads(Skewed(rng, n, step >= 2), bias, 4)), 0.5) << n << step;
      }
    }
  }
}

TEST(BalanceRules, FewExpertsAndShortBatches) {
  // Two experts, one chosen: the cutoff is the other one. One token: its share is not whole.
  for (const auto& [n, k] : std::vector<std::pair<std::size_t, std::int64_t>>{{2, 1}, {8, 2}}) {
    for (const std::size_t m : {1u, 3u, 64u}) {
      Rng rng(m);
      Doubles bias(n);
      for (int step = 0; step < 5; ++step) {
        Doubles s;
        for (std::size_t i = 0; i < m * n; ++i) s.push_back(rng.Uniform());
        MarginHistogram h(bias, 1000);
        h.Add(s, bias, k);
        for (const Doubles& b : {h.Bias(k), QuantileBias(s, bias, k)}) {
          double mean = 0;
          for (const double x : b) {
            EXPECT_TRUE(std::isfinite(x));
            mean += x / static_cast<double>(n);
          }
          EXPECT_NEAR(mean, 0, 1e-6);
        }
        bias = h.Bias(k);
      }
    }
  }
}

TEST(BalancerOnAModel, WithAllExpertsChosenTheBiasStaysZero) {
  for (const BalanceMethod method : {BalanceMethod::kQuantile, BalanceMethod::kSlidingQuantile,
                                     BalanceMethod::kSign, BalanceMethod::kAuxLoss}) {
    const auto config = testing::ParseConfig(
        testing::Released({}, {{"num_experts", 4}, {"num_experts_per_token", 4}}));
    ASSERT_TRUE(config.ok()) << config.message();
    auto params = Parameters::Create(*config);
    ASSERT_TRUE(params.ok());
    (*params)->Initialise({1, 0.02});
    GradientPass pass(**params, 1);
    BalanceOptions options;
    options.method = method;
    Balancer balancer(**params, options);
    balancer.Attach(pass.tape());
    const std::vector<TokenId> ids{1, 2, 3, 4, 5};
    const TrainRow row{std::span(ids).first(4), std::span(ids).subspan(1)};
    balancer.StartPass({}, 0.25);
    ASSERT_TRUE(pass.Run({&row, 1}, 0.25).ok());
    const auto report = balancer.Update();
    ASSERT_FALSE(report.empty());
    EXPECT_EQ(report[0].max_violation, 0);
    EXPECT_NEAR(report[0].entropy, 1, 1e-12);
    for (const Parameter& p : (*params)->list()) {
      if (!p.is_router_bias()) continue;
      for (std::int64_t e = 0; e < p.size(); ++e) EXPECT_EQ(p.value[e], 0.f);
    }
  }
}

/// A small mixture, and steps of two passes over it.
struct Mixture {
  std::unique_ptr<Parameters> params;
  std::unique_ptr<GradientPass> pass;
  std::unique_ptr<Balancer> balancer;
  std::vector<TokenId> ids;

  explicit Mixture(const BalanceOptions& options) {
    const auto config = testing::ParseConfig(
        testing::Released({}, {{"num_experts", 8}, {"num_experts_per_token", 2}}));
    EXPECT_TRUE(config.ok());
    params = std::move(Parameters::Create(*config)).value();
    params->Initialise({1, 0.1});
    pass = std::make_unique<GradientPass>(*params, 1);
    balancer = std::make_unique<Balancer>(*params, options);
    balancer->Attach(pass->tape());
    for (TokenId i = 0; i < 64; ++i) ids.push_back((i * 37 + 11) % 200);
  }
  void Pass(std::size_t begin, std::size_t end) {
    const TrainRow row{std::span(ids).subspan(begin, end - begin - 1),
                       std::span(ids).subspan(begin + 1, end - begin - 1)};
    balancer->StartPass({}, 1.0);
    EXPECT_TRUE(pass->Run({&row, 1}, 1.0).ok());
    balancer->EndPass();
  }
  std::vector<float> Bias() const {
    for (const Parameter& p : params->list()) {
      if (p.is_router_bias()) return {p.value, p.value + p.size()};
    }
    return {};
  }
};

TEST(BalancerOnAModel, LocalStatisticsAreTheMeanOfWhatPassesFindAlone) {
  BalanceOptions o;
  auto alone = [&](std::size_t begin, std::size_t end) {
    Mixture m(o);
    m.Pass(begin, end);
    m.balancer->Update();
    return m.Bias();
  };
  const auto first = alone(0, 40), second = alone(40, 64);
  Mixture pooled(o);
  o.local = true;
  Mixture local(o);
  for (Mixture* m : {&pooled, &local}) {
    m->Pass(0, 40), m->Pass(40, 64);
    m->balancer->Update();
  }
  double apart = 0;
  for (std::size_t e = 0; e < first.size(); ++e) {
    EXPECT_NEAR(local.Bias()[e], (first[e] + second[e]) / 2, 1e-6);
    apart = std::max<double>(apart, std::abs(local.Bias()[e] - pooled.Bias()[e]));
  }
  EXPECT_GT(apart, 1e-4) << "a mean of quantiles is not the quantile of all";
}

TEST(BalancerOnAModel, TheRateIsTheShareOfTheWayToTheQuantile) {
  for (const bool exact : {false, true}) {
    BalanceOptions o;
    o.exact = exact;
    auto after = [&](double rate) {
      o.rate = rate;
      Mixture m(o);
      m.Pass(0, 64);
      m.balancer->Update();
      return m.Bias();
    };
    const auto whole = after(1), quarter = after(0.25);
    for (std::size_t e = 0; e < whole.size(); ++e) {
      EXPECT_NEAR(quarter[e], 0.25 * whole[e], 1e-6) << exact;
    }
  }
}

TEST(BalancerOnAModel, SlidingWindowAveragesQuantilesAndTheScheduleTightens) {
  BalanceOptions o;
  o.method = BalanceMethod::kSlidingQuantile;
  o.decay = 1.0;
  auto after = [&](std::vector<std::pair<std::size_t, std::size_t>> steps, double progress = 0) {
    Mixture m(o);
    m.balancer->SetProgress(progress);
    for (const auto& [begin, end] : steps) {
      m.Pass(begin, end);
      m.balancer->Update();
    }
    return m.Bias();
  };
  // The scores are those of raw routing: they do not depend on the bias in layer one.
  const auto a = after({{0, 40}}), b = after({{24, 64}}), last = after({{0, 40}, {24, 64}});
  ASSERT_EQ(last, b);
  o.window = 2;
  const auto both = after({{0, 40}, {24, 64}});
  for (std::size_t e = 0; e < a.size(); ++e) EXPECT_NEAR(both[e], (a[e] + b[e]) / 2, 1e-6);

  o.window = 1, o.decay = 0.2, o.decay_end = 0.6;
  const auto early = after({{0, 40}}, 0.0), late = after({{0, 40}}, 1.0);
  for (std::size_t e = 0; e < a.size(); ++e) {
    EXPECT_NEAR(early[e], 0.2 * a[e], 1e-6);
    EXPECT_NEAR(late[e], 0.6 * a[e], 1e-6);
  }
}

TEST(BalancerOnAModel, WithinBatchUpdatesAreTakenBackWithASkippedStep) {
  BalanceOptions o;
  o.method = BalanceMethod::kSlidingQuantile;
  o.within_batch = true;
  Mixture m(o);
  const auto zero = m.Bias();
  const auto saved = m.balancer->thresholds();
  m.Pass(0, 40);
  const auto inside = m.Bias();
  EXPECT_NE(inside, zero) << "the second pass is routed with what the first one found";
  m.Pass(40, 64);
  EXPECT_NE(m.Bias(), inside);
  m.balancer->Discard();
  EXPECT_EQ(m.Bias(), zero);
  EXPECT_EQ(m.balancer->thresholds(), saved);
}

TEST(BalancerOnAModel, TheSlidingWindowSurvivesACheckpoint) {
  BalanceOptions o;
  o.method = BalanceMethod::kSlidingQuantile;
  o.window = 3;
  Mixture whole(o), part(o), resumed(o);
  whole.Pass(0, 40), whole.balancer->Update();
  part.Pass(0, 40), part.balancer->Update();
  ASSERT_TRUE(resumed.balancer->SetThresholds(part.balancer->thresholds()).ok());
  std::copy_n(part.params->values(), part.params->total(), resumed.params->values());
  for (Mixture* m : {&whole, &resumed}) m->Pass(24, 64), m->balancer->Update();
  EXPECT_EQ(whole.Bias(), resumed.Bias());
  o.window = 2;
  EXPECT_FALSE(Mixture(o).balancer->SetThresholds(part.balancer->thresholds()).ok());
}

}  // namespace
}  // namespace k3
