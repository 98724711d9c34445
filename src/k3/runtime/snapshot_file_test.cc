#include "k3/runtime/snapshot_file.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/engine_fixtures.h"

namespace k3 {
namespace {

/// After 40 tokens with scores, and after the first 24 without.
std::vector<SavedSnapshot> TwoSnapshots(test::HashModel& model) {
  Rng rng(5);
  const std::vector<TokenId> tokens = test::RandomTokens(rng, 40, 60);
  std::vector<SavedSnapshot> list;
  for (const std::size_t n : {40u, 24u}) {
    SavedSnapshot s{{tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(n)}, {}};
    s.snapshot.state = model.NewState();
    const SequenceInput input{s.tokens, &s.snapshot.state, LogitRows::kLast};
    EXPECT_TRUE(model.Forward({&input, 1}, s.snapshot.logits).ok());
    if (n == 24) s.snapshot.logits.clear();
    s.snapshot.whole_only = n == 40 && model.mode == MathMode::kFast;
    list.push_back(std::move(s));
  }
  return list;
}

TEST(SnapshotFile, GivesBackWhatWasSaved) {
  test::HashModel model;
  const auto list = TwoSnapshots(model);
  const auto got = ParseSaved(SerializeSaved(list, model), "file", model);
  ASSERT_TRUE(got.ok()) << got.message();
  ASSERT_EQ(got->size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ((*got)[i].tokens, list[i].tokens);
    EXPECT_EQ((*got)[i].snapshot.logits, list[i].snapshot.logits);
    EXPECT_EQ((*got)[i].snapshot.whole_only, list[i].snapshot.whole_only);
    EXPECT_EQ((*got)[i].snapshot.state.Serialize(), list[i].snapshot.state.Serialize());
  }
}

TEST(SnapshotFile, EveryCutAndEveryFlippedBitIsRefused) {
  test::HashModel model;
  const std::string bytes = SerializeSaved(TwoSnapshots(model), model);
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_FALSE(ParseSaved(bytes.substr(0, n), "file", model).ok()) << n;
  }
  for (std::size_t i = 0; i < 8 * bytes.size(); i += i < 2000 ? 1 : 37) {
    std::string bad = bytes;
    bad[i / 8] = static_cast<char>(bad[i / 8] ^ (1 << (i % 8)));
    EXPECT_FALSE(ParseSaved(bad, "file", model).ok()) << i;
  }
  EXPECT_FALSE(ParseSaved(bytes + "x", "file", model).ok());
  EXPECT_NE(ParseSaved("hello", "file", model).message().find("not a saved state"),
            std::string::npos);
}

TEST(SnapshotFile, BelongsToOneModelAndOneArithmetic) {
  test::HashModel model;
  model.mode = MathMode::kFast;
  const std::string fast = SerializeSaved({}, model);
  EXPECT_FALSE(ParseSaved(fast, "file", model).ok()) << "nothing in it";
  model.mode = MathMode::kExact;
  const std::string bytes = SerializeSaved(TwoSnapshots(model), model);
  model.mode = MathMode::kFast;
  const auto arithmetic = ParseSaved(bytes, "file", model);
  ASSERT_FALSE(arithmetic.ok());
  EXPECT_NE(arithmetic.message().find("exact, expected fast"), std::string::npos)
      << arithmetic.message();
  model.mode = MathMode::kExact;
  model.print = 2;
  const auto other = ParseSaved(bytes, "file", model);
  ASSERT_FALSE(other.ok());
  EXPECT_NE(other.message().find("another model"), std::string::npos) << other.message();
}

}  // namespace
}  // namespace k3
