#include "k3/runtime/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace k3 {
namespace {

SamplingParams Greedy() {
  SamplingParams p;
  p.temperature = 0;
  return p;
}

TokenId Pick(const std::vector<float>& logits, const SamplingParams& params, std::uint64_t seed = 1,
             std::vector<TokenId> generated = {}, std::vector<TokenId> prompt = {}) {
  Sampler s(seed);
  s.AcceptPrompt(prompt);
  for (const TokenId t : generated) s.Accept(t);
  const auto r = s.Sample(logits, params);
  EXPECT_TRUE(r.ok()) << r.message();
  return r.ok() ? r->token : -1;
}

/// How often each id comes up in n draws.
std::vector<int> Histogram(const std::vector<float>& logits, const SamplingParams& params, int n) {
  Sampler s(42);
  std::vector<int> count(logits.size());
  for (int i = 0; i < n; ++i) ++count[static_cast<std::size_t>(s.Sample(logits, params)->token)];
  return count;
}

TEST(Sampler, TinyTemperaturesAreGreedyAndTiesGoToTheLowerId) {
  const std::vector<float> logits{1.f, 3.f, 3.f, 2.999f};
  for (const double t : {0.0, 1e-30, 1e-4}) {
    SamplingParams p;
    p.temperature = t;
    for (std::uint64_t seed = 0; seed < 50; ++seed) EXPECT_EQ(Pick(logits, p, seed), 1);
  }
}

TEST(Sampler, FrequenciesFollowTheSoftmax) {
  const std::vector<float> logits{0.f, 1.f, -1.f, 2.f, 0.5f, -3.f};
  for (const double t : {0.5, 1.0, 2.0}) {
    SamplingParams p;
    p.temperature = t;
    const int n = 40000;
    const auto count = Histogram(logits, p, n);
    double z = 0, chi2 = 0;
    for (const float l : logits) z += std::exp(l / t);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double want = n * std::exp(logits[i] / t) / z;
      chi2 += (count[i] - want) * (count[i] - want) / want;
    }
    EXPECT_LT(chi2, 20.5) << "temperature " << t;  // 5 degrees of freedom, p = 0.001
  }
}

TEST(Sampler, TopKTopPAndMinPKeepTheBest) {
  const std::vector<float> logits{std::log(0.1f), std::log(0.5f), std::log(0.15f), std::log(0.25f)};
  const auto kept = [&](const SamplingParams& p) {
    std::string ids;
    const auto count = Histogram(logits, p, 4000);
    for (std::size_t i = 0; i < count.size(); ++i) {
      if (count[i] > 0) ids += std::to_string(i);
    }
    return ids;
  };
  SamplingParams p;
  EXPECT_EQ(kept(p), "0123");
  p.top_k = 2;
  EXPECT_EQ(kept(p), "13");
  p = {};
  p.top_p = 0.8;  // 0.5 + 0.25 is not enough
  EXPECT_EQ(kept(p), "123");
  p.top_p = 0.7;
  EXPECT_EQ(kept(p), "13");
  p.top_p = 0;
  EXPECT_EQ(kept(p), "1");
  p = {};
  p.min_p = 0.4;  // at least 0.2
  EXPECT_EQ(kept(p), "13");
  p = {};
  p.top_k = 2;  // then 0.5 becomes two thirds
  p.top_p = 0.66;
  EXPECT_EQ(kept(p), "1");
}

TEST(Sampler, TopPSearchesFarIntoALongTail) {
  const std::vector<float> flat(600, 0.f);
  SamplingParams p;
  p.top_p = 0.5;
  const auto count = Histogram(flat, p, 4000);
  int low = 0;
  for (std::size_t i = 0; i < 300; ++i) low += count[i];
  EXPECT_EQ(low, 4000);
  EXPECT_GT(count[299] + count[298] + count[297] + count[296], 0);
}

TEST(Sampler, PenaltiesFollowTheirFormulas) {
  SamplingParams p = Greedy();
  p.repetition_penalty = 2;  // prompt and output alike: 4/2 < 3, and -1 becomes -2
  EXPECT_EQ(Pick({4.f, 3.f}, p, 1, {}, {0}), 1);
  EXPECT_EQ(Pick({-1.f, -1.5f}, p, 1, {0}), 1);
  EXPECT_EQ(Pick({-1.f, -2.5f}, p, 1, {0}), 0);
  p = Greedy();
  p.frequency_penalty = 0.5;  // 4 - 3 * 0.5 = 2.5
  EXPECT_EQ(Pick({4.f, 2.6f}, p, 1, {0, 0, 0}), 1);
  EXPECT_EQ(Pick({4.f, 2.4f}, p, 1, {0, 0, 0}), 0);
  EXPECT_EQ(Pick({4.f, 2.6f}, p, 1, {}, {0, 0, 0}), 0) << "the prompt does not count";
  p = Greedy();
  p.presence_penalty = 1.5;
  EXPECT_EQ(Pick({4.f, 2.6f}, p, 1, {0, 0, 0}), 1);
  EXPECT_EQ(Pick({4.f, 2.4f}, p, 1, {0, 0, 0}), 0);
  EXPECT_EQ(Pick({4.f, 2.6f}, p, 1, {}, {0}), 0) << "the prompt does not count";
  p = Greedy();
  p.logit_bias = {{0, -2.0}, {1, 0.5}};
  EXPECT_EQ(Pick({4.f, 1.6f}, p), 1);
  EXPECT_EQ(Pick({4.f, 1.4f}, p), 0);
}

TEST(Sampler, BiasComesBeforeRepetitionAndThatBeforeCounts) {
  SamplingParams p = Greedy();
  p.repetition_penalty = 2;
  p.frequency_penalty = 0.5;
  p.presence_penalty = 0.25;  // 2 / 2 - 0.75 = 0.25, not (2 - 0.75) / 2
  EXPECT_EQ(Pick({2.f, 0.4f}, p, 1, {0}), 1);
  EXPECT_EQ(Pick({2.f, 0.2f}, p, 1, {0}), 0);
  p = Greedy();
  p.repetition_penalty = 2;
  p.logit_bias = {{0, 2.0}};  // (0 + 2) / 2, not 0 / 2 + 2
  EXPECT_EQ(Pick({0.f, 1.5f}, p, 1, {0}), 1);
  EXPECT_EQ(Pick({0.f, 0.5f}, p, 1, {0}), 0);
}

TEST(Sampler, SameSeedSameTokensAndACopyContinuesAlike) {
  const std::vector<float> logits{0.f, 0.1f, 0.2f, 0.3f};
  Sampler a(7), b(7), other(8);
  std::vector<TokenId> ta, tb, to;
  for (int i = 0; i < 64; ++i) {
    ta.push_back(a.Sample(logits, {})->token);
    tb.push_back(b.Sample(logits, {})->token);
    to.push_back(other.Sample(logits, {})->token);
  }
  EXPECT_EQ(ta, tb);
  EXPECT_NE(ta, to);
  Sampler copy = a;
  // Greedy draws use up the stream as well, so switching it on and off does not shift the rest.
  (void)a.Sample(logits, Greedy());
  (void)copy.Sample(logits, {});
  for (int i = 0; i < 16; ++i)
    EXPECT_EQ(a.Sample(logits, {})->token, copy.Sample(logits, {})->token);
}

TEST(Sampler, ScoresThatAreNotFiniteAreAnError) {
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    Sampler s;
    const auto r = s.Sample(std::vector<float>{0.f, bad, 1.f}, Greedy());
    ASSERT_FALSE(r.ok());
    EXPECT_EQ(r.error().code, Code::kNumeric);
    EXPECT_NE(r.message().find("token 1"), std::string::npos) << r.message();
  }
  EXPECT_FALSE(Sampler().Sample({}, Greedy()).ok());
}

TEST(Sampler, LogprobsComeFromTheUnmodifiedScores) {
  const std::vector<float> logits{std::log(0.2f), std::log(0.5f), std::log(0.3f)};
  SamplingParams p = Greedy();
  p.logit_bias = {{0, 50.0}};
  const auto r = Sampler().Sample(logits, p, 2);
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->token, 0);
  EXPECT_NEAR(r->logprob, std::log(0.2), 1e-6);
  ASSERT_EQ(r->top.size(), 2u);
  EXPECT_EQ(r->top[0].id, 1);
  EXPECT_EQ(r->top[1].id, 2);
  EXPECT_NEAR(r->top[1].logprob, std::log(0.3), 1e-6);
  EXPECT_EQ(Sampler().Sample(logits, p, 99)->top.size(), 3u);
  EXPECT_TRUE(Sampler().Sample(logits, p, 0)->top.empty());
  EXPECT_NEAR(LogSoftmaxAt(std::vector<float>{1e4f, -1e4f}, 1), -2e4, 1e-9);
}

TEST(Sampler, ExtremeScoresStayInRange) {
  const float big = std::numeric_limits<float>::max();
  SamplingParams p;
  p.temperature = 0.01;
  p.top_p = 0.9;
  EXPECT_EQ(Pick({-big, big, -big}, p), 1);
  p.min_p = 1;
  EXPECT_EQ(Pick({0.f}, p), 0);
}

/// The rules of sampler.h over a fully sorted list, for comparison.
TokenId SortEverything(const std::vector<float>& logits, const SamplingParams& p, double u) {
  std::vector<std::pair<double, TokenId>> order;
  double total = 0, best = logits[0];
  for (const float l : logits) best = std::max(best, static_cast<double>(l));
  for (std::size_t i = 0; i < logits.size(); ++i) {
    order.emplace_back(-static_cast<double>(logits[i]), static_cast<TokenId>(i));
  }
  const auto weight = [&](std::size_t i) {
    return std::exp((-order[i].first - best) / p.temperature);
  };
  if (p.top_k == 0) {
    for (std::size_t i = 0; i < order.size(); ++i) total += weight(i);  // in the order of the ids
  }
  std::sort(order.begin(), order.end());
  if (p.top_k > 0) {
    order.resize(std::min(order.size(), static_cast<std::size_t>(p.top_k)));
    for (std::size_t i = 0; i < order.size(); ++i) total += weight(i);
  }
  std::size_t kept = order.size();
  double mass = total;
  if (p.top_p < 1 || p.min_p > 0) {
    for (kept = 1, mass = weight(0); kept < order.size() && mass < p.top_p * total; ++kept) {
      if (weight(kept) < p.min_p) break;
      mass += weight(kept);
    }
  }
  double sum = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    sum += weight(i);
    if (sum > u * mass) return order[i].second;
  }
  return order[kept - 1].second;
}

TEST(Sampler, SelectingAPartGivesWhatSortingEverythingWould) {
  Rng values(5);
  for (const std::size_t n : {1u, 2u, 63u, 64u, 65u, 700u, 20000u}) {
    std::vector<float> logits(n);
    // Few distinct values, so that ties are common; once in three a tail far below the best.
    const float step = n % 3 == 0 ? 1.f : 1.f / 16;
    for (float& l : logits) l = static_cast<float>(values.Next() % 97) * step;
    for (int draw = 0; draw < 60; ++draw) {
      SamplingParams p;
      p.temperature = draw % 2 == 0 ? 1.0 : 3.0;
      const double shares[] = {1e-9, 0.5, 0.97, 1 - 1e-12};
      if (draw % 3 == 1) p.top_p = shares[draw / 3 % 4];
      if (draw % 4 == 3) p.top_k = 300;
      if (draw % 5 == 4) p.min_p = 0.01;
      const auto seed = static_cast<std::uint64_t>(draw) + 1;
      Rng stream(seed);
      EXPECT_EQ(Pick(logits, p, seed), SortEverything(logits, p, stream.Uniform())) << n;
    }
  }
}

TEST(Sampler, ATokenThatIsNotAllowedHasNoProbability) {
  const std::vector<float> logits{3.f, 2.f, 2.f, -50.f};
  const std::vector<std::uint64_t> low{0b1110}, one{0b1000}, none{0}, absent;
  SamplingParams cold = Greedy(), warm;
  EXPECT_EQ(Sampler().Sample(logits, cold, -1, low)->token, 1);
  EXPECT_EQ(Sampler().Sample(logits, cold, -1, one)->token, 3);
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    EXPECT_NE(Sampler(seed).Sample(logits, warm, -1, low)->token, 0);
    EXPECT_EQ(Sampler(seed).Sample(logits, warm, -1, one)->token, 3);
    warm.top_k = 1;  // of those that are allowed
    EXPECT_EQ(Sampler(seed).Sample(logits, warm, -1, low)->token, 1);
    warm.top_k = 0;
  }
  // What it reports is still the model's own distribution.
  const auto r = Sampler().Sample(logits, cold, 1, one);
  EXPECT_EQ(r->top[0].id, 0);
  EXPECT_EQ(r->logprob, LogSoftmaxAt(logits, 3));
  EXPECT_EQ(LogprobsOf(logits, 3, 1)->logprob, r->logprob);
  EXPECT_FALSE(Sampler().Sample(logits, cold, -1, none).ok());
  EXPECT_FALSE(Sampler().Sample(logits, cold, -1, absent).ok());
  // Same stream with and without a mask that allows everything.
  const std::vector<std::uint64_t> all{0b1111};
  Sampler a(9), b(9);
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(a.Sample(logits, warm, -1, all)->token, b.Sample(logits, warm)->token);
  }
}

TEST(SamplingParams, ValidateNamesTheField) {
  const auto message = [](auto change) {
    SamplingParams p;
    change(p);
    const Status s = p.Validate(10);
    return s.ok() ? std::string() : s.message();
  };
  EXPECT_EQ(message([](auto&) {}), "");
  EXPECT_EQ(message([](auto& p) { p.temperature = -1; }).find("temperature: found -1"), 0u);
  EXPECT_EQ(message([](auto& p) { p.temperature = std::nan(""); }).find("temperature"), 0u);
  EXPECT_EQ(message([](auto& p) { p.top_k = -1; }).find("top_k"), 0u);
  EXPECT_EQ(message([](auto& p) { p.top_p = 1.5; }).find("top_p"), 0u);
  EXPECT_EQ(message([](auto& p) { p.min_p = -0.1; }).find("min_p"), 0u);
  EXPECT_EQ(message([](auto& p) { p.repetition_penalty = 0; }).find("repetition_penalty"), 0u);
  EXPECT_EQ(message([](auto& p) { p.frequency_penalty = INFINITY; }).find("frequency_penalty"), 0u);
  EXPECT_EQ(message([](auto& p) { p.presence_penalty = -101; }).find("presence_penalty"), 0u);
  EXPECT_EQ(message([](auto& p) { p.logit_bias = {{10, 1.0}}; }).find("logit_bias"), 0u);
  EXPECT_EQ(message([](auto& p) { p.logit_bias = {{1, 101.0}}; }).find("logit_bias of token 1"),
            0u);
}

}  // namespace
}  // namespace k3
