#include "k3/runtime/draft.h"

#include <gtest/gtest.h>

#include <vector>

#include "k3/base/rng.h"

namespace k3 {
namespace {

using Ids = std::vector<TokenId>;

TEST(NgramDrafter, ContinuesAfterTheLongestEarlierMatch) {
  NgramDrafter d;
  Ids draft;
  EXPECT_EQ(d.Draft(Ids{}, 4, draft), 0u);
  EXPECT_EQ(d.Draft(Ids{1, 2}, 4, draft), 0u);
  // "2 3 4" occurs twice; the first time after a 1, as now.
  const Ids text{1, 2, 3, 4, 50, 51, 52, 9, 2, 3, 4, 60, 61, 7, 1, 2, 3, 4};
  EXPECT_EQ(d.Draft(text, 3, draft), 4u);
  EXPECT_EQ(draft, (Ids{50, 51, 52}));
  EXPECT_EQ(d.Draft(text, 0, draft), 0u);
  EXPECT_TRUE(draft.empty());
  Ids other = text;
  other.push_back(99);
  EXPECT_EQ(d.Draft(other, 3, draft), 0u);
}

TEST(NgramDrafter, AShortLoopIsContinuedRoundAndRound) {
  NgramDrafter d;
  Ids draft;
  EXPECT_GT(d.Draft(Ids{5, 1, 2, 1, 2, 1}, 5, draft), 0u);
  EXPECT_EQ(draft, (Ids{2, 1, 2, 1, 2}));
}

TEST(NgramDrafter, PiecewiseGivesTheSameAsAtOnce) {
  Rng rng(1);
  Ids text;
  NgramDrafter grown;
  for (int i = 0; i < 400; ++i) {
    text.push_back(static_cast<TokenId>(rng.Next() % 4));
    Ids a, b;
    NgramDrafter fresh;
    const std::size_t n = grown.Draft(text, 6, a);
    EXPECT_EQ(fresh.Draft(text, 6, b), n);
    EXPECT_EQ(a, b);
    EXPECT_EQ(a.size(), n > 0 ? 6u : 0u);
  }
}

TEST(StepTimes, FindsThePriceOfARow) {
  StepTimes cost;
  EXPECT_EQ(cost.Seconds(3), 0);
  Rng rng(2);
  for (int i = 0; i < 200; ++i) {
    const double rows = 1 + static_cast<double>(rng.Next() % 9);
    cost.Observe(rows, 10 + 2 * rows);
  }
  EXPECT_NEAR(cost.per_row(), 2, 1e-6);
  EXPECT_NEAR(cost.fixed(), 10, 1e-6);
  StepTimes flat;  // nothing to tell the two apart
  for (int i = 0; i < 9; ++i) flat.Observe(1, 9);
  EXPECT_GT(flat.per_row(), 0);
  EXPECT_LT(flat.per_row(), 9);
  EXPECT_NEAR(flat.Seconds(1), 9, 1e-9);
}

TEST(DraftPolicy, StopsWhereDraftsFailAndTriesAgainAfterEverLongerPauses) {
  StepTimes cost;
  for (int i = 0; i < 50; ++i) cost.Observe(1 + i % 4, 3 + (1 + i % 4));
  DraftPolicy policy;
  std::int64_t drafted = 0;
  for (int look = 0; look < 2000; ++look) {
    const std::int64_t k = policy.Length(cost, 1, 8);
    if (k == 0) continue;
    drafted += k;
    policy.Report(k, 0);
  }
  EXPECT_LT(drafted, 60) << "three per cent of the looks";
  EXPECT_GT(drafted, 3);
}

TEST(DraftPolicy, DraftsTheMostWhereEverythingIsRight) {
  StepTimes cost;
  for (int i = 0; i < 50; ++i) cost.Observe(1 + i % 4, 3 + (1 + i % 4));
  DraftPolicy policy;
  std::int64_t k = 0;
  for (int look = 0; look < 20; ++look) {
    k = policy.Length(cost, 1, 8);
    policy.Report(k, k);
  }
  EXPECT_EQ(k, 8);
  // A full batch whose every row costs as much as a token: not even then.
  StepTimes full;
  for (int i = 0; i < 50; ++i) full.Observe(32 + i, 32 + i);
  DraftPolicy other;
  EXPECT_EQ(other.Length(full, 64, 8), 0);
  EXPECT_EQ(DraftPolicy(false).Length(full, 64, 8), 8);
}

}  // namespace
}  // namespace k3
