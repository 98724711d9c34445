#include "k3/serve/drift.h"

#include <gtest/gtest.h>

#include <cmath>

#include "k3/base/rng.h"

namespace k3::serve {
namespace {

/// Log-normal: lengths and times look like that.
double Draw(Rng& rng, double shift) {
  const double normal =
      std::sqrt(-2 * std::log(1 - rng.Uniform())) * std::cos(6.2831853 * rng.Uniform());
  return std::exp(shift + 0.8 * normal);
}

TEST(Drift, DistanceOfEqualAndOfDisjointCounts) {
  EXPECT_EQ(JensenShannonBits({1, 2, 3}, {2, 4, 6}), 0);
  EXPECT_NEAR(JensenShannonBits({5, 0}, {0, 5}), 1, 1e-12);
  EXPECT_EQ(JensenShannonBits({0, 0}, {1, 1}), 0);
}

TEST(Drift, NoiseIsWhatEqualSourcesStayBelow) {
  Rng rng(1);
  int over = 0;
  constexpr int kTries = 2000;
  for (int t = 0; t < kTries; ++t) {
    std::vector<double> a(8), b(8);
    for (int i = 0; i < 512; ++i) a[rng.Next() % 8] += 1;
    for (int i = 0; i < 128; ++i) b[rng.Next() % 8] += 1;
    over += JensenShannonBits(a, b) > JensenShannonNoise(8, 512, 128);
  }
  EXPECT_LT(over, 10);  // 2 are expected
}

TEST(Drift, StationaryTrafficRaisesFewAlarms) {
  int alarms = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {  // each a day of 12 minutes a window
    Rng rng(seed);
    DriftDetector d({});
    bool alarm = false;
    for (int i = 0; i < 512 + 120 * 128; ++i) {
      d.Observe(Draw(rng, 0));
      alarm |= d.state() == DriftDetector::State::kAlert;
    }
    alarms += alarm;
  }
  EXPECT_LE(alarms, 1);
}

TEST(Drift, ShiftIsSeenWithinFiveWindowsAndForgottenWhenItEnds) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Rng rng(seed);
    DriftDetector d({});
    for (int i = 0; i < 512 + 10 * 128; ++i) d.Observe(Draw(rng, 0));
    ASSERT_EQ(d.state(), DriftDetector::State::kOk);
    for (int i = 0; i < 5 * 128; ++i) d.Observe(Draw(rng, 0.7));  // twice as long
    EXPECT_EQ(d.state(), DriftDetector::State::kAlert) << seed;
    for (int i = 0; i < 5 * 128; ++i) d.Observe(Draw(rng, 0));
    EXPECT_EQ(d.state(), DriftDetector::State::kOk) << seed;
  }
}

TEST(Drift, OddValuesAreTakenOrLeft) {
  DriftDetector d({});
  for (const double v : {0.0, -1.0, 1e308, 1e-308, std::nan(""), double{INFINITY}}) d.Observe(v);
  EXPECT_EQ(d.state(), DriftDetector::State::kLearning);
}

TEST(Drift, AlertsComeWithTheirHistograms) {
  DriftOptions o;
  o.reference = 64;
  o.window = 32;
  DriftMonitor m(o);
  for (int i = 0; i < 64; ++i) m.Observe("length", DriftMonitor::PromptStratum(10), 4);
  EXPECT_TRUE(AlertsJson(m)["alerts"].empty());
  for (int i = 0; i < 96; ++i) m.Observe("length", DriftMonitor::PromptStratum(10), 400);
  const Json j = AlertsJson(m);
  ASSERT_EQ(j["alerts"].size(), 1u);
  EXPECT_EQ(j["alerts"][0]["stratum"], "prompt<=64");
  EXPECT_EQ(j["alerts"][0]["reference"][0]["count"], 64);
  EXPECT_EQ(j["alerts"][0]["window"][0]["count"], 32);
}

}  // namespace
}  // namespace k3::serve
