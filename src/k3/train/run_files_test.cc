// What a run writes for people: events, plots, and the memory it announces.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "k3/train/event_file.h"
#include "k3/train/gradient_pass.h"
#include "k3/train/line_plot.h"
#include "k3/train/probe.h"
#include "k3/train/run_memory.h"
#include "support/golden.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using testing::GoldenDir;
using ::testing::HasSubstr;
using testing::ReadBytes;
using testing::TempDir;

TEST(EventFile, ChecksumsAndRecords) {
  EXPECT_EQ(Crc32c("123456789"), 0xE3069283u);  // the check value of the Castagnoli polynomial
  EXPECT_EQ(Crc32c(""), 0u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8A9136AAu);  // RFC 3720, B.4
  const std::string r = EventRecord("ab");
  ASSERT_EQ(r.size(), 8u + 4 + 2 + 4);
  EXPECT_EQ(r.substr(0, 8), std::string("\2\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(r.substr(12, 2), "ab");
}

TEST(EventFile, ANewPartVoidsWhatTheOldOneLoggedLater) {
  TempDir dir;
  const EventFile::Scalar loss{"loss", 2.5};
  auto first = EventFile::Create(dir / ".", 0);
  ASSERT_TRUE(first.ok()) << first.message();
  ASSERT_TRUE(first->Add(1, {&loss, 1}).ok());
  auto second = EventFile::Create(dir / ".", 7);
  ASSERT_TRUE(second.ok());
  const std::string start("\x3a\x02\x08\x01", 4);  // session_log { status: START }
  EXPECT_THAT(ReadBytes(dir / "events.out.tfevents.0000000007.k3"), HasSubstr(start));
  EXPECT_THAT(ReadBytes(dir / "events.out.tfevents.0000000000.k3"),
              ::testing::Not(HasSubstr(start)));
  // Back behind the second part: its file would be read after the third one and void it.
  ASSERT_TRUE(EventFile::Create(dir / ".", 5).ok());
  EXPECT_FALSE(std::filesystem::exists(dir / "events.out.tfevents.0000000007.k3"));
  EXPECT_TRUE(std::filesystem::exists(dir / "events.out.tfevents.0000000000.k3"));
  EXPECT_FALSE(EventFile::Create(dir / "none", 0).ok());
}

TEST(LinePlot, DrawsEscapesAndSurvivesOddValues) {
  LinePlot plot;
  plot.title = "a < b & c";
  plot.curves = {{"one", {{0, 1}, {1, NAN}, {2, INFINITY}, {3, 2}}, false}, {"none", {}, true}};
  const std::string svg = LinePlotSvg(plot);
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; c"));
  EXPECT_THAT(svg, ::testing::Not(HasSubstr("nan")));
  EXPECT_THAT(svg, ::testing::Not(HasSubstr("inf")));
  EXPECT_THAT(LinePlotSvg({}), HasSubstr("</svg>"));
  plot.curves[0].points.assign(100'000, {5, 5});  // one place: no division by zero
  EXPECT_LT(LinePlotSvg(plot).size(), 50'000u);
}

TEST(RunMemory, CountsWhatAPassHoldsForEveryKindOfModel) {
  for (const char* name : {"tiny-k3", "variants/released", "variants/gqa_rope", "variants/gated",
                           "variants/full_attn_res", "variants/router_encoder"}) {
    const std::string dir = GoldenDir() + "/" + name;
    if (!std::filesystem::exists(dir)) continue;
    auto params = Parameters::Load(dir);
    ASSERT_TRUE(params.ok()) << params.message();
    const PassShape shape{3, 40, 1.0, 2, MathMode::kExact};
    const auto plan = PlanRunMemory((*params)->config(), shape, {}, 1);
    ASSERT_TRUE(plan.ok()) << plan.message();
    EXPECT_EQ(plan->weights, 4 * (*params)->total());
    EXPECT_EQ(plan->optimizer, 8 * (*params)->total());

    GradientPass pass(**params, 2);
    const std::vector<TokenId> ids(41, 3);
    const TrainRow row{std::span(ids).first(40), std::span(ids).subspan(1)};
    const std::vector<TrainRow> rows(3, row);
    ASSERT_TRUE(pass.Run(rows, 1.0).ok());
    const auto held = static_cast<double>(pass.held_bytes());
    const auto planned = static_cast<double>(plan->workspace + plan->saved + plan->sequences);
    EXPECT_NEAR(planned / held, 1.0, 0.1) << name << ": planned " << planned << ", held " << held;
  }
}

TEST(Probe, SeesUniformAttentionAndDecays) {
  auto params = Parameters::Load(GoldenDir() + "/variants/released");
  ASSERT_TRUE(params.ok()) << params.message();
  Parameters& p = **params;
  for (Parameter& q : p.list()) {  // no query: every key counts the same
    if (q.spec.name.find("q_b_proj") != std::string::npos ||
        (q.spec.name.find("q_proj") != std::string::npos)) {
      std::fill_n(q.value, q.size(), 0.f);
    }
  }
  p.Refresh();
  std::vector<TokenId> ids;
  for (TokenId i = 0; i < 30; ++i) ids.push_back(i);
  const auto r = ProbeModel(p, ids);
  ASSERT_TRUE(r.ok()) << r.message();
  ASSERT_EQ(r->layers.size(), static_cast<std::size_t>(p.config().n_layers));
  std::size_t kda = 0, softmax = 0;
  for (const LayerProbe& l : r->layers) {
    EXPECT_EQ(l.has_similarity, l.layer > 0);
    EXPECT_LE(std::abs(l.similarity), 1 + 1e-6);
    if (l.kind == "kda") {
      ++kda;
      double sum = 0;
      for (const double share : l.decay_histogram) sum += share;
      EXPECT_NEAR(sum, 1, 1e-6);
      EXPECT_GT(l.decay_mean, 0);
      EXPECT_LT(l.attention_entropy, 0);
    } else {
      ++softmax;
      EXPECT_NEAR(l.attention_entropy, 1, 1e-6) << l.layer;
    }
  }
  EXPECT_GT(kda, 0u);
  EXPECT_GT(softmax, 0u);
  ASSERT_FALSE(r->depth_weights.empty());
  for (const auto& [site, weights] : r->depth_weights) {
    double sum = 0;
    for (const double w : weights) sum += w;
    EXPECT_NEAR(sum, 1, 1e-5) << site;
  }
}

TEST(Probe, NamesLearnedScales) {
  auto params = Parameters::Load(GoldenDir() + "/variants/norm_scaled");
  ASSERT_TRUE(params.ok()) << params.message();
  (*params)->Find("model.layers.0.self_attention_res_alpha")->value[0] = 0.25f;
  const std::vector<TokenId> ids{1, 2, 3};
  const auto r = ProbeModel(**params, ids);
  ASSERT_TRUE(r.ok());
  bool found = false;
  for (const auto& [name, value] : r->scales) {
    if (name == "model.layers.0.self_attention_res_alpha") found = value == 0.25;
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace k3
