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

TEST(Drift, ReferencesOfAnotherRunReplaceLearning) {
  DriftOptions o;
  o.reference = 64;
  o.window = 32;
  DriftMonitor before(o), after(o);
  for (int i = 0; i < 64; ++i) before.Observe("length", "all", 4);
  for (int i = 0; i < 63; ++i) before.Observe("unfinished", "all", 4);
  const std::string file = Dump(ReferenceJson(before));
  const Status loaded = after.LoadReference(file, "ref.json");
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  ASSERT_EQ(after.rows().size(), 1u);
  for (int i = 0; i < 96; ++i) after.Observe("length", "all", 400);
  EXPECT_EQ(after.rows()[0].detector.state(), DriftDetector::State::kAlert);
  EXPECT_EQ(Dump(ReferenceJson(after)), file);
}

TEST(Drift, BrokenReferencesAreRefusedByPlace) {
  const auto message = [](const std::string& text) {
    DriftMonitor m;
    const Status s = m.LoadReference(text, "ref.json");
    EXPECT_TRUE(m.rows().empty());
    return s.ok() ? std::string("accepted") : s.message();
  };
  const auto row = [](const std::string& counts) {
    return R"({"references":[{"signal":"a","stratum":"b","counts":)" + counts + "}]}";
  };
  std::string zeros = "[0", some = "[1";
  for (int i = 1; i < 64; ++i) zeros += ",0", some += ",0";
  zeros += "]", some += "]";
  EXPECT_EQ(message("[]"), "ref.json: found no object at the root");
  EXPECT_EQ(message("{}"), "ref.json: references: expected a list");
  EXPECT_EQ(message(R"({"references":[1]})"), "ref.json: references[0]: expected an object");
  for (const std::string& counts :
       {zeros, std::string("[1]"), std::string("null"), "[-1" + some.substr(2),
        "[1e300" + some.substr(2), "[\"1\"" + some.substr(2)}) {
    EXPECT_NE(message(row(counts)).find("references[0]: counts: expected 64"), std::string::npos)
        << counts;
  }
  const std::string one = row(some), two = one.substr(15, one.size() - 17);
  EXPECT_NE(message(R"({"references":[)" + two + "," + two + "]}").find("twice"),
            std::string::npos);
  EXPECT_NE(message("{").find("ref.json"), std::string::npos);
}

}  // namespace
}  // namespace k3::serve
