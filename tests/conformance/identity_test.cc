// Exact mode, bit for bit: a sequence's scores and state do not depend on how the run was cut, on
// the sequences beside it, on threads, or on having been copied or stored on the way.
#include <cstring>

#include <gtest/gtest.h>

#include "k3/base/rng.h"
#include "k3/model/model.h"
#include "support/golden.h"

namespace k3 {
namespace {

using testing::GoldenDir;

class Identity : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto loaded = Model::Load(GoldenDir() + "/" + GetParam());
    ASSERT_TRUE(loaded.ok()) << loaded.message();
    model = std::move(*loaded);
  }
  std::vector<TokenId> Tokens(std::uint64_t seed, std::size_t n) const {
    Rng rng(seed);
    std::vector<TokenId> ids(n);
    for (TokenId& t : ids)
      t = static_cast<TokenId>(rng.Next() % static_cast<std::uint64_t>(model->config().vocab));
    return ids;
  }
  std::vector<float> Run(ModelState& state, std::span<const TokenId> ids, Exec& e) {
    std::vector<float> logits;
    const SequenceInput input{ids, &state, LogitRows::kAll};
    const Status s = model->Forward({&input, 1}, e, logits);
    EXPECT_TRUE(s.ok()) << s.message();
    return logits;
  }
  static void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b,
                             const std::string& what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    EXPECT_EQ(std::memcmp(a.data(), b.data(), 4 * a.size()), 0) << what;
  }

  std::unique_ptr<Model> model;
  Exec exec{2};
};

TEST_P(Identity, PrefillCutAtEveryPosition) {
  const auto ids = Tokens(1, 101);
  const std::span<const TokenId> all(ids);
  ModelState whole = model->NewState();
  const auto want = Run(whole, all, exec);
  const std::string image = whole.Serialize();
  for (std::size_t cut = 1; cut <= 100; ++cut) {
    ModelState state = model->NewState();
    auto got = Run(state, all.first(cut), exec);
    const auto rest = Run(state, all.subspan(cut), exec);
    got.insert(got.end(), rest.begin(), rest.end());
    ExpectSameBits(got, want, "cut at " + std::to_string(cut));
    EXPECT_EQ(state.Serialize(), image) << "cut at " << cut;
  }
}

TEST_P(Identity, BatchesOfOneToSixteen) {
  std::vector<std::vector<TokenId>> ids;
  std::vector<std::vector<float>> want;
  std::vector<std::string> images;
  for (std::size_t i = 0; i < 16; ++i) {
    ids.push_back(Tokens(100 + i, 1 + (i * 7) % 23));
    ModelState state = model->NewState();
    want.push_back(Run(state, ids[i], exec));
    images.push_back(state.Serialize());
  }
  for (std::size_t n = 1; n <= 16; ++n) {
    std::vector<ModelState> states(n, model->NewState());
    std::vector<SequenceInput> batch;
    for (std::size_t i = 0; i < n; ++i) batch.push_back({ids[i], &states[i], LogitRows::kAll});
    std::vector<float> logits;
    ASSERT_TRUE(model->Forward(batch, exec, logits).ok());
    std::size_t at = 0;
    for (std::size_t i = 0; i < n; ++i) {
      EXPECT_EQ(std::memcmp(&logits[at], want[i].data(), 4 * want[i].size()), 0)
          << i << " of " << n;
      EXPECT_EQ(states[i].Serialize(), images[i]) << i << " of " << n;
      at += want[i].size();
    }
  }
}

TEST_P(Identity, MixedBatchOfPrefillDecodeAndNothing) {
  const auto long_ids = Tokens(7, 40), short_ids = Tokens(8, 5);
  ModelState a = model->NewState(), b = model->NewState(), c = model->NewState();
  Run(a, std::span(long_ids).first(30), exec);
  ModelState a2 = a;
  const auto want_a = Run(a2, std::span(long_ids).subspan(30, 1), exec);
  ModelState b2 = b;
  const auto want_b = Run(b2, short_ids, exec);
  const std::vector<TokenId> none;
  const SequenceInput batch[] = {{std::span(long_ids).subspan(30, 1), &a, LogitRows::kLast},
                                 {none, &c, LogitRows::kLast},
                                 {short_ids, &b, LogitRows::kAll}};
  std::vector<float> logits;
  ASSERT_TRUE(model->Forward(batch, exec, logits).ok());
  std::vector<float> want = want_a;
  want.insert(want.end(), want_b.begin(), want_b.end());
  ExpectSameBits(logits, want, "mixed batch");
  EXPECT_EQ(c.position(), 0);
  EXPECT_EQ(a.Serialize(), a2.Serialize());
  EXPECT_EQ(b.Serialize(), b2.Serialize());
}

TEST_P(Identity, ForkRestoreAndImage) {
  const auto ids = Tokens(3, 90);
  const std::span<const TokenId> all(ids);
  ModelState state = model->NewState();
  Run(state, all.first(70), exec);  // not a multiple of the page size
  const ModelState snapshot = state;
  ModelState fork = state;
  const auto want = Run(state, all.subspan(70), exec);

  const std::string image = state.Serialize();
  Run(fork, all.first(9), exec);  // a fork that goes elsewhere leaves the others alone
  EXPECT_EQ(state.Serialize(), image);
  ModelState restored = snapshot;
  ExpectSameBits(Run(restored, all.subspan(70), exec), want, "after restore");

  ModelState from_image = model->NewState();
  ASSERT_TRUE(from_image.Deserialize(snapshot.Serialize()).ok());
  EXPECT_EQ(from_image.position(), 70);
  ExpectSameBits(Run(from_image, all.subspan(70), exec), want, "after save and load");
  EXPECT_EQ(from_image.Serialize(), state.Serialize());
}

TEST_P(Identity, AForkAndItsOriginalGoDifferentWays) {
  const auto ids = Tokens(9, 90), other = Tokens(10, 20);
  const std::span<const TokenId> all(ids);
  ModelState state = model->NewState(), alone = model->NewState();
  Run(state, all.first(70), exec);  // the page that both go on in has these two owners only
  Run(alone, all.first(70), exec);
  ModelState fork = state;
  Run(state, all.subspan(70), exec);
  Run(alone, all.subspan(70), exec);
  Run(fork, other, exec);
  EXPECT_EQ(state.Serialize(), alone.Serialize());
}

TEST_P(Identity, OneThreadAgainstTwoAndSeven) {
  const auto ids = Tokens(4, 80);
  ModelState one_state = model->NewState();
  Exec one(1);
  const auto want = Run(one_state, ids, one);
  for (const int threads : {2, 7}) {
    Exec many(threads);
    ModelState state = model->NewState();
    ExpectSameBits(Run(state, ids, many), want, std::to_string(threads) + " threads");
    EXPECT_EQ(state.Serialize(), one_state.Serialize());
  }
}

TEST_P(Identity, FastModeCutOnTheGrid) {
  const auto ids = Tokens(5, 200);
  const std::span<const TokenId> all(ids);
  exec.math = MathMode::kFast;
  ModelState whole = model->NewState();
  const auto want = Run(whole, all, exec);
  for (std::size_t cut = kFastGrid; cut < 200; cut += kFastGrid) {
    ModelState state = model->NewState();
    auto got = Run(state, all.first(cut), exec);
    const auto rest = Run(state, all.subspan(cut), exec);
    got.insert(got.end(), rest.begin(), rest.end());
    ExpectSameBits(got, want, "fast mode, cut at " + std::to_string(cut));
  }
}

TEST_P(Identity, DamagedImagesAreRefusedAndChangeNothing) {
  const auto ids = Tokens(6, 10);
  ModelState state = model->NewState();
  Run(state, ids, exec);
  const std::string image = state.Serialize();
  ModelState other = model->NewState();
  for (const std::string& bad :
       {std::string(), image.substr(0, 7), image.substr(0, image.size() - 1), image + "x",
        std::string(image.size(), '\xff'), std::string(image.size(), '\x7f')}) {
    EXPECT_FALSE(other.Deserialize(bad).ok());
    EXPECT_EQ(other.position(), 0);
  }
}

TEST_P(Identity, TokensOutsideTheVocabularyChangeNothing) {
  ModelState state = model->NewState();
  for (const TokenId bad : {-1, static_cast<TokenId>(model->config().vocab)}) {
    const TokenId ids[] = {1, bad};
    std::vector<float> logits;
    const SequenceInput input{ids, &state, LogitRows::kAll};
    const Status s = model->Forward({&input, 1}, exec, logits);
    ASSERT_FALSE(s.ok());
    EXPECT_NE(s.message().find(std::to_string(bad)), std::string::npos);
    EXPECT_EQ(state.position(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Exact, Identity,
                         ::testing::Values("tiny-k3", "tiny-linear", "variants/mqa",
                                           "variants/full_attn_res"),
                         [](const auto& p) {
                           const std::string path = p.param;
                           return path.substr(path.find_first_of("/-") + 1);
                         });

}  // namespace
}  // namespace k3
