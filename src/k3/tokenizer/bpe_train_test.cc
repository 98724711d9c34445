#include "k3/tokenizer/bpe_train.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>

#include "k3/tokenizer/test_util.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;

Tokenizer Trained(const BpeTrainer& trainer, std::size_t n) {
  const auto files = trainer.Train(n);
  EXPECT_TRUE(files.ok()) << files.message();
  auto t = Tokenizer::Parse(files->ranks, files->config, "trained");
  EXPECT_TRUE(t.ok()) << t.message();
  return std::move(*t);
}

TEST(BpeTrainer, JoinsTheMostFrequentPairFirst) {
  BpeTrainer trainer;
  trainer.Add("aab aab aab ab");  // pieces "aab", " aab" twice, " ab"
  const Tokenizer t = Trained(trainer, 259);
  EXPECT_EQ(*t.Bytes(256), "ab");    // 4 times
  EXPECT_EQ(*t.Bytes(257), "aab");   // 3
  EXPECT_EQ(*t.Bytes(258), " aab");  // 2
  EXPECT_EQ(t.Encode("aab aab"), (std::vector<TokenId>{257, 258}));
}

TEST(BpeTrainer, OfEqualPairsTheOneOfLowerRanksComesFirst) {
  BpeTrainer one, two;
  one.Add("cd"), one.Add("ab");
  two.Add("ab"), two.Add("cd");
  EXPECT_EQ(*Trained(one, 258).Bytes(256), "ab");
  EXPECT_EQ(one.Train(258)->ranks, two.Train(258)->ranks) << "the order of texts is no matter";
}

TEST(BpeTrainer, RunsOfOneCharacter) {
  BpeTrainer trainer;
  trainer.Add(std::string(5000, 'a'));
  // 2, 4, ... 128 and what is left of the run.
  const auto files = trainer.Train(1000);
  ASSERT_FALSE(files.ok());
  EXPECT_THAT(files.message(), HasSubstr("ranks only, expected 1000"));
  const Tokenizer t = Trained(trainer, 256 + 7);
  EXPECT_EQ(t.Bytes(256 + 6)->size(), BpeTrainer::kMaxTokenBytes);
}

TEST(BpeTrainer, RoundTripAndTheFamilysNames) {
  BpeTrainer trainer;
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "word" + std::to_string(i * 7919 % 1000) + " und 漢字 é\n";
  trainer.Add(text);
  trainer.Add("\xff\xfe broken");
  const Tokenizer t = Trained(trainer, 700);
  EXPECT_EQ(t.n_ranks(), 700u);
  EXPECT_EQ(t.vocab_size(), 956u);
  EXPECT_EQ(*t.SpecialId("[BOS]"), 700);
  EXPECT_EQ(*t.SpecialId("[EOS]"), 701);
  EXPECT_EQ(*t.SpecialId("<|media_pad|>"), 721);
  EXPECT_EQ(*t.SpecialId("[PAD]"), 955);
  EXPECT_TRUE(t.add_bos());
  for (const std::string& s : {text, std::string("\xff\x00z", 3), std::string("neu 🙂")}) {
    EXPECT_EQ(t.Decode(t.Encode(s)), s);
  }
  EXPECT_LT(t.Encode(text).size(), text.size() / 2);
}

TEST(BpeTrainer, Refusals) {
  const BpeTrainer empty;
  EXPECT_THAT(empty.Train(255).message(), HasSubstr("255 ranks, expected 256 to"));
  EXPECT_THAT(empty.Train((1 << 20) + 1).message(), HasSubstr("expected 256 to"));
  EXPECT_THAT(empty.Train(257).message(), HasSubstr("pairs for 256 ranks only"));
  EXPECT_TRUE(empty.Train(256).ok());
}

TEST(BpeTrainer, TimeIsNearLinear) {
  auto seconds = [](unsigned n) {
    BpeTrainer trainer;
    std::string text;
    for (unsigned i = 0; i < n; ++i) {
      text.push_back(' ');
      for (unsigned v = i * 2654435761u % 1000003; v > 0; v /= 26) {
        text.push_back(static_cast<char>('a' + v % 26));
      }
    }
    const std::clock_t start = std::clock();  // of this process: others do not count
    trainer.Add(text);
    EXPECT_TRUE(trainer.Train(1500).ok());
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  };
  seconds(5000);
  const double one = seconds(10000), four = seconds(40000);
  EXPECT_LT(four, 10 * one + 0.2) << "16 times would be quadratic";
}

}  // namespace
}  // namespace k3
