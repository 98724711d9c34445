#include "k3/serve/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

namespace k3::serve {
namespace {

using ::testing::HasSubstr;

TEST(ParseUrl, ReadsAndRefuses) {
  const auto a = ParseUrl("http://example:81/base/");
  ASSERT_TRUE(a.ok()) << a.message();
  EXPECT_EQ(a->host, "example");
  EXPECT_EQ(a->port, 81);
  EXPECT_EQ(a->base, "/base");
  const auto b = ParseUrl("http://[::1]:8080");
  ASSERT_TRUE(b.ok()) << b.message();
  EXPECT_EQ(b->host, "::1");
  EXPECT_EQ(b->port, 8080);
  EXPECT_EQ(ParseUrl("http://host")->port, 80);
  for (const char* bad :
       {"", "host:80", "https://host", "http://", "http://:80", "http://h:0", "http://h:65536",
        "http://h:8x", "http://u@h", "http://h/?q", "http://h h", "http://[::1", "http://[::1]8",
        "http://h\r\nX: y", "http://h:"}) {
    EXPECT_FALSE(ParseUrl(bad).ok()) << bad;
  }
}

TEST(LengthSpread, ReadsAndRefuses) {
  for (const char* good :
       {"1", "1048576", "uniform:1:1", "uniform:3:900", "lognormal:200:0", "lognormal:200:0.8"}) {
    EXPECT_TRUE(LengthSpread::Parse(good).ok()) << good;
  }
  for (const char* bad :
       {"", "0", "-1", "1048577", "9x", "uniform:2", "uniform:3:2", "uniform:0:2", "lognormal:0:1",
        "lognormal:9:-1", "lognormal:9:nan", "lognormal:9:5", "zipf:1:2", "99999999999999999999"}) {
    EXPECT_FALSE(LengthSpread::Parse(bad).ok()) << bad;
  }
}

TEST(LengthSpread, DrawsWhatItSays) {
  Rng rng(3);
  const auto uniform = LengthSpread::Parse("uniform:3:6").value();
  std::set<std::int64_t> seen;
  for (int i = 0; i < 400; ++i) seen.insert(uniform.Draw(rng));
  EXPECT_EQ(seen, (std::set<std::int64_t>{3, 4, 5, 6}));
  const auto lognormal = LengthSpread::Parse("lognormal:200:0.8").value();
  int below = 0;
  double logs = 0, squares = 0;
  for (int i = 0; i < 4000; ++i) {
    const auto n = lognormal.Draw(rng);
    ASSERT_GE(n, 1);
    ASSERT_LE(n, 3200);
    below += n < 200 ? 1 : 0;
    const double z = std::log(static_cast<double>(n) / 200) / 0.8;
    logs += z / 4000, squares += z * z / 4000;
  }
  EXPECT_NEAR(below, 2000, 160);  // five standard deviations
  EXPECT_NEAR(logs, 0, 0.08);
  EXPECT_NEAR(squares, 1, 0.12);
}

LoadOptions Mix() {
  LoadOptions o;
  o.requests = 2000;
  o.rate = 50;
  o.prompt = LengthSpread::Parse("uniform:2:9").value();
  o.prefix_tokens = 5, o.prefix_share = 0.25, o.prefixes = 3;
  return o;
}

TEST(PlanLoad, HasTheArrivalsAndSharesThatWereAskedFor) {
  const auto plan = PlanLoad(Mix());
  ASSERT_EQ(plan.size(), 2000u);
  int shared = 0;
  double squares = 0, before = 0;
  for (const PlannedRequest& r : plan) {
    ASSERT_GE(r.due_s, before);
    squares += (r.due_s - before) * (r.due_s - before);
    before = r.due_s;
    ASSERT_LT(r.prefix, 3);
    shared += r.prefix >= 0 ? 1 : 0;
  }
  EXPECT_NEAR(before, 40, 4.5);                // 2000 / 50; five standard deviations
  EXPECT_NEAR(squares / 2000 * 2500, 2, 0.5);  // an exponential's second moment, times rate^2
  EXPECT_NEAR(shared, 500, 100);
  LoadOptions other = Mix();
  other.prompt = LengthSpread::Fixed(7);
  EXPECT_EQ(PlanLoad(other)[17].due_s, plan[17].due_s);
  other.seed = 1;
  EXPECT_NE(PlanLoad(other)[17].due_s, plan[17].due_s);
}

TEST(RequestBody, SharesBeginningsOnPurposeOnly) {
  LoadOptions o = Mix();
  PromptPool pool;
  for (TokenId id = 0; id < 4096; ++id) pool.ids.push_back(id);
  const auto prompt = [&](const PlannedRequest& r, std::size_t i) {
    return nlohmann::json::parse(RequestBody(o, pool, r, i))["prompt"].get<std::vector<int>>();
  };
  std::set<int> first;
  for (std::size_t i = 0; i < 2000; ++i) first.insert(prompt({0, -1, 4, 8}, i)[0]);
  EXPECT_EQ(first.size(), 2000u);
  const auto a = prompt({0, 1, 4, 8}, 0), b = prompt({0, 1, 4, 8}, 1), c = prompt({0, 2, 4, 8}, 1);
  ASSERT_EQ(a.size(), 9u);
  EXPECT_TRUE(std::equal(a.begin(), a.begin() + 5, b.begin()));
  EXPECT_NE(a[5], b[5]);
  EXPECT_NE(a[0], c[0]);
  EXPECT_FALSE(first.contains(a[0]));
  o.chat = true;
  pool.ids.clear();
  pool.words = {" one", " two", " three"};
  const auto body = nlohmann::json::parse(RequestBody(o, pool, {0, -1, 4, 8}, 0));
  EXPECT_EQ(body["messages"][0]["content"], " one two three one");
}

TEST(CheckLoad, RefusesNonsense) {
  LoadOptions o;
  EXPECT_TRUE(CheckLoad(o).ok());
  o.concurrency = 0;
  EXPECT_FALSE(CheckLoad(o).ok());
  o.rate = 1;
  EXPECT_TRUE(CheckLoad(o).ok());
  o.prefix_share = 0.5;
  EXPECT_THAT(CheckLoad(o).message(), HasSubstr("length"));
}

TEST(Summarize, CountsCompleteAnswersOnly) {
  LoadOptions o;
  o.slo_ttft_s = 1.5, o.slo_tpot_s = 0.25;
  LoadRun run;
  run.seconds = 10;
  LoadSample s;
  s.status = 200, s.ttft_s = 1, s.last_s = 2, s.end_s = 2.5, s.gaps_s = {0.25, 0.75}, s.parts = 3;
  s.completion_tokens = 5, s.prompt_tokens = 7;
  run.samples.push_back(s);
  s.ttft_s = 2, s.last_s = 3;  // too late
  run.samples.push_back(s);
  s.ttft_s = 1, s.last_s = 2, s.completion_tokens = -1;  // a server without usage: 0.5 s a part
  run.samples.push_back(s);
  s.error = "http 429";
  run.samples.push_back(s);
  const LoadSummary sum = Summarize(o, run);
  EXPECT_EQ(sum.sent, 4);
  EXPECT_EQ(sum.ok, 3);
  EXPECT_EQ(sum.in_slo, 1);
  EXPECT_EQ(sum.errors.at("http 429"), 1);
  EXPECT_EQ(sum.completion_tokens, 13);
  EXPECT_DOUBLE_EQ(sum.tokens_per_s(), 1.3);
  EXPECT_DOUBLE_EQ(sum.goodput_per_s(), 0.1);
  EXPECT_DOUBLE_EQ(sum.tpot.p50, 0.25);
  EXPECT_DOUBLE_EQ(sum.tpot.max, 0.5);
  EXPECT_EQ(sum.itl.count, 6u);
  EXPECT_DOUBLE_EQ(sum.ttft.max, 2);
  const Json out = SummaryJson(o, sum);
  EXPECT_EQ(out["requests"]["errors"]["http 429"], 1);
  EXPECT_EQ(out["goodput"]["requests"], 1);
  EXPECT_TRUE(SummaryJson(o, Summarize(o, {}))["ttft_s"].is_null());
}

TEST(Quantiles, AreNearestRanks) {
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  const Quantiles q = Quantiles::Of(values);
  EXPECT_EQ(q.p50, 50);
  EXPECT_EQ(q.p90, 90);
  EXPECT_EQ(q.p99, 99);
  EXPECT_EQ(q.max, 100);
  EXPECT_NEAR(q.mean, 50.5, 1e-9);
  EXPECT_EQ(Quantiles::Of({7}).p99, 7);
}

}  // namespace
}  // namespace k3::serve
