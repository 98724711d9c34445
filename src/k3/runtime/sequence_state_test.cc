#include "k3/runtime/sequence_state.h"

#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "support/fake_model.h"

namespace k3 {
namespace {

using test::Bytes;
using test::FakeModel;

/// One KDA and one MLA layer, tiny.
ModelConfig SmallConfig() {
  ModelConfig c;
  c.hidden = 4;
  c.n_layers = 2;
  c.attention = {AttentionKind::kKda, AttentionKind::kMla};
  c.kda.n_heads = 1;
  c.kda.head_dim = 2;
  c.mla.kv_lora_rank = 2;
  c.mla.qk_rope_dim = 1;
  return c;
}

/// A state in the middle of things, with recognisable numbers everywhere.
SequenceState Example(const FakeModel& model) {
  SequenceState s = NewSequence(model, 99);
  AppendPrompt(s, Bytes("abca"));
  s.sampler.Accept('z');
  s.tokens.push_back('z');
  float next = 1;
  for (float& x : s.model.layer(0).kda.state) x = next++;
  for (float& x : s.model.layer(0).kda.conv) x = next++;
  PagedRows& rows = s.model.layer(1).rows;
  rows.Grow(4);
  for (std::int64_t i = 0; i < 4; ++i) {
    for (std::int64_t d = 0; d < rows.width(); ++d) rows.MutableRow(i)[d] = next++;
  }
  s.model.Advance(4);
  return s;
}

FakeModel SmallModel() {
  FakeModel model("");
  model.config = SmallConfig();
  return model;
}

Result<SequenceState> Parse(const std::string& bytes, const FakeModel& model) {
  return ParseState(bytes, "a.k3s", {model.print, model.vocab()}, model.NewState());
}

TEST(StateFile, RoundTrip) {
  const FakeModel model = SmallModel();
  const SequenceState s = Example(model);
  const std::string bytes = SerializeState(s, model.print);
  const auto back = Parse(bytes, model);
  ASSERT_TRUE(back.ok()) << back.message();
  EXPECT_EQ(back->tokens, s.tokens);
  EXPECT_EQ(back->sampler.rng_state(), s.sampler.rng_state());
  EXPECT_EQ(back->sampler.counts(), s.sampler.counts());
  EXPECT_EQ(back->sampler.counts().at('a'), (Sampler::Counts{2, 0}));
  EXPECT_EQ(back->sampler.counts().at('z'), (Sampler::Counts{0, 1}));
  EXPECT_EQ(back->model.position(), 4);
  EXPECT_EQ(back->pending().size(), 1u);
  EXPECT_EQ(SerializeState(*back, model.print), bytes);
  const SequenceState fresh = NewSequence(model, 0);
  ASSERT_TRUE(Parse(SerializeState(fresh, model.print), model).ok()) << "an empty state is a state";
}

TEST(StateFile, EveryFlippedBitAndEveryCutIsRefused) {
  const FakeModel model = SmallModel();
  const std::string bytes = SerializeState(Example(model), model.print);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (const int bit : {0, 3, 7}) {
      std::string bad = bytes;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      EXPECT_FALSE(Parse(bad, model).ok()) << "byte " << i << " bit " << bit;
    }
    EXPECT_FALSE(Parse(bytes.substr(0, i), model).ok()) << "cut to " << i;
  }
  EXPECT_FALSE(Parse(bytes + "x", model).ok());
}

TEST(StateFile, AnotherModelOrVersionIsNamed) {
  FakeModel model = SmallModel();
  const std::string bytes = SerializeState(Example(model), model.print);
  model.print = 2;
  const auto other = Parse(bytes, model);
  ASSERT_FALSE(other.ok());
  EXPECT_NE(other.message().find("a.k3s: state belongs to another model"), std::string::npos);

  model.print = 1;
  std::string version = bytes;
  version[8] = 7;
  EXPECT_EQ(Parse(version, model).message(), "a.k3s: state file has version 7, expected 1");
  EXPECT_EQ(Parse("{}", model).message().find("a.k3s: not a state file"), 0u);

  // Same fingerprint, other shapes: the model's own part refuses.
  model.config.kda.head_dim = 4;
  EXPECT_FALSE(Parse(bytes, model).ok());
}

TEST(StateFile, HugeCountsAreRefusedWithoutAllocating) {
  const FakeModel model = SmallModel();
  const std::string bytes = SerializeState(Example(model), model.print);
  for (const std::size_t field : {32u, 40u, 48u}) {
    for (const std::uint64_t huge :
         {~std::uint64_t{0}, std::uint64_t{1} << 62, std::uint64_t{1} << 40}) {
      std::string bad = bytes;
      std::memcpy(bad.data() + field, &huge, sizeof huge);
      EXPECT_FALSE(Parse(bad, model).ok());
    }
  }
}

/// `bytes` with `value` at offset `at` and a checksum that fits: what a forger would write.
template <class T>
std::string Forged(std::string bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
  const std::uint64_t sum = XXH3_64bits(bytes.data(), bytes.size() - sizeof sum);
  std::memcpy(bytes.data() + bytes.size() - sizeof sum, &sum, sizeof sum);
  return bytes;
}

TEST(StateFile, ContentIsCheckedAlsoWhenTheChecksumFits) {
  const FakeModel model = SmallModel();
  const std::string bytes = SerializeState(Example(model), model.print);
  constexpr std::size_t kTokens = 56, kCounts = kTokens + 5 * 4, kModel = kCounts + 4 * 12;
  ASSERT_TRUE(Parse(Forged(bytes, kTokens, TokenId{'b'}), model).ok());
  const auto vocab = static_cast<TokenId>(model.vocab());
  const std::pair<std::string, const char*> cases[] = {
      {Forged(bytes, kTokens, vocab), "is outside the vocabulary"},
      {Forged(bytes, kTokens + 4 * 4, TokenId{-1}), "token id -1 is outside the vocabulary"},
      {Forged(bytes, kCounts + 3 * 12, vocab), "is outside the vocabulary"},
      {Forged(bytes, kCounts + 12, TokenId{'a'}), "counted token 97 is out of order"},
      {Forged(bytes, kCounts + 12, TokenId{'A'}), "counted token 65 is out of order"},
      {Forged(bytes, kModel, std::int64_t{-1}), "position -1"},
      {Forged(bytes, kModel, std::int64_t{5}), "state image of"},
      {Forged(bytes, kModel, INT64_MAX), "state image of"},
      {Forged(bytes, 12, 1u), "does not hold what its header says"},  // reserved
      {Forged(bytes, 48, std::uint64_t{bytes.size() - kModel - 9}), "does not hold what"},
  };
  for (const auto& [bad, words] : cases) {
    const auto r = Parse(bad, model);
    ASSERT_FALSE(r.ok()) << words;
    EXPECT_NE(r.message().find(words), std::string::npos) << r.message();
    EXPECT_EQ(r.message().find("a.k3s: "), 0u) << r.message();
  }
}

TEST(StateFile, PositionBeyondTheTokensIsRefused) {
  const FakeModel model = SmallModel();
  SequenceState s = Example(model);
  s.tokens.resize(3);  // of 4 that the model has consumed
  const auto r = Parse(SerializeState(s, model.print), model);
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.message(), "a.k3s: state is at position 4 of 3 tokens");
}

TEST(StateFile, SaveAndLoadThroughAFile) {
  const FakeModel model = SmallModel();
  const std::string path = testing::TempDir() + "k3_state_test.k3s";
  ASSERT_TRUE(SaveState(path, Example(model), model).ok());
  const auto back = LoadState(path, model);
  ASSERT_TRUE(back.ok()) << back.message();
  EXPECT_EQ(back->tokens, Example(model).tokens);
  std::remove(path.c_str());
  const auto missing = LoadState(path, model);
  ASSERT_FALSE(missing.ok());
  EXPECT_NE(missing.message().find(path), std::string::npos);
  EXPECT_FALSE(SaveState("/nonexistent/dir/x", Example(model), model).ok());
}

}  // namespace
}  // namespace k3
