#include "k3/runtime/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "k3/base/rng.h"
#include "support/engine_fixtures.h"

namespace k3 {
namespace {

using Positions = std::vector<std::int64_t>;

std::int64_t Sum(const Positions& v) {
  return std::accumulate(v.begin(), v.end(), std::int64_t{0});
}

TEST(SharePrefill, EvenlyAndWhatAShortOneLeavesGoesToTheOthers) {
  const std::vector<PromptNeed> needs{{1000, 0, 0, 1}, {40, 0, 0, 2}, {1000, 0, 0, 3}};
  EXPECT_EQ(SharePrefill(needs, 512, MathMode::kExact), (Positions{224, 40, 240}));
  EXPECT_EQ(SharePrefill(needs, 512, MathMode::kFast), (Positions{192, 40, 256}));
  EXPECT_EQ(SharePrefill({}, 512, MathMode::kFast), Positions{});
}

TEST(SharePrefill, HigherPrioritiesTakeWhatTheyCanFirst) {
  const std::vector<PromptNeed> needs{{1000, 0, 0, 1}, {300, 5, 0, 2}};
  EXPECT_EQ(SharePrefill(needs, 512, MathMode::kExact), (Positions{208, 300}));
  EXPECT_EQ(SharePrefill(needs, 200, MathMode::kExact), (Positions{8, 192}));
}

TEST(SharePrefill, WhoWaitedLongestComesFirstWhenThereAreTooMany) {
  std::vector<PromptNeed> needs;
  for (std::uint64_t i = 0; i < 10; ++i) needs.push_back({500, 0, 10 - i, i});
  const Positions share = SharePrefill(needs, 128, MathMode::kFast);
  EXPECT_EQ(share, (Positions{0, 0, 0, 0, 0, 0, 0, 0, 64, 64}));
}

TEST(SharePrefill, KeepsTheBudgetAndAlwaysMovesSomething) {
  Rng rng(1);
  for (int round = 0; round < 3000; ++round) {
    std::vector<PromptNeed> needs;
    for (std::uint64_t i = rng.Next() % 12 + 1; i > 0; --i) {
      needs.push_back({1 + static_cast<std::int64_t>(rng.Next() % 700),
                       static_cast<int>(rng.Next() % 3), rng.Next() % 5, i});
    }
    const auto budget = 1 + static_cast<std::int64_t>(rng.Next() % 600);
    for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
      const Positions share = SharePrefill(needs, budget, math);
      ASSERT_GT(Sum(share), 0);
      ASSERT_LE(Sum(share), math == MathMode::kFast ? std::max(budget, kFastGrid) : budget);
      for (std::size_t i = 0; i < share.size(); ++i) ASSERT_LE(share[i], needs[i].remaining);
    }
  }
}

TEST(PieceEnd, AnywhereInExactModeOnTheGridInFastMode) {
  EXPECT_EQ(PieceEnd(10, 50, 1000, MathMode::kExact), 60);
  EXPECT_EQ(PieceEnd(10, 0, 1000, MathMode::kExact), 11);
  EXPECT_EQ(PieceEnd(990, 50, 1000, MathMode::kExact), 1000);
  EXPECT_EQ(PieceEnd(0, 130, 1000, MathMode::kFast), 128);
  EXPECT_EQ(PieceEnd(64, 10, 1000, MathMode::kFast), 128);
  EXPECT_EQ(PieceEnd(64, 10, 70, MathMode::kFast), 70);
  EXPECT_EQ(PieceEnd(64, INT64_MAX, 70, MathMode::kFast), 70);
}

TEST(SnapshotPlan, WantedPlacesAndAGeometricGrid) {
  EXPECT_EQ(SnapshotPlan(1000, {}, MathMode::kExact), (Positions{256, 384, 512, 768}));
  EXPECT_EQ(SnapshotPlan(100, {}, MathMode::kExact), Positions{});
  const Positions wanted{300, 300, -5, 0, 1000, 2000, 20};
  EXPECT_EQ(SnapshotPlan(1000, wanted, MathMode::kExact), (Positions{20, 256, 300, 384, 512, 768}));
  EXPECT_EQ(SnapshotPlan(1000, wanted, MathMode::kFast), (Positions{256, 384, 512, 768, 960}));
  EXPECT_EQ(SnapshotPlan(1000, Positions{700, 127}, MathMode::kFast),
            (Positions{64, 256, 384, 512, 640, 768, 960}));
  EXPECT_EQ(SnapshotPlan(511, {}, MathMode::kFast), (Positions{256, 384}));
  EXPECT_EQ(SnapshotPlan(640, {}, MathMode::kFast), (Positions{256, 384, 512}));
  EXPECT_LT(SnapshotPlan(INT64_MAX, {}, MathMode::kExact).size(), 80u);
}

TEST(Rank, PriorityThenAge) {
  EXPECT_LT((Rank{1, 9}), (Rank{0, 1}));
  EXPECT_LT((Rank{0, 1}), (Rank{0, 2}));
  EXPECT_FALSE((Rank{0, 1}) < (Rank{0, 1}));
}

TEST(StateSize, IsWhatStatesReallyTake) {
  test::HashModel model;
  const StateSize size = StateSize::Of(model.NewState());
  ModelState state = model.NewState();
  std::vector<float> logits;
  for (std::int64_t n = 1; n <= 200; ++n) {
    const TokenId token = 5;
    const SequenceInput input{{&token, 1}, &state, LogitRows::kNone};
    ASSERT_TRUE(model.Forward({&input, 1}, logits).ok());
    ASSERT_EQ(state.bytes(), size.At(n));
    ASSERT_EQ(size.At(n), ModelState::BytesFor(model.config, n));
  }
}

}  // namespace
}  // namespace k3
