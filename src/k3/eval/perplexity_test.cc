#include "k3/eval/perplexity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "support/fake_model.h"

namespace k3 {
namespace {

using test::ByteTokenizer;
using test::FakeModel;

// The fake model gives the script's byte a score of 5 and all 259 others 0.
const double kHit = std::log(std::exp(5.0) + 259) - 5;
const double kMiss = std::log(std::exp(5.0) + 259);

Result<PerplexityResult> Score(FakeModel& model, const std::string& text,
                               const PerplexityOptions& options) {
  return Perplexity(model, ByteTokenizer(), text, "t.txt", options);
}

PerplexityOptions WithBos() {
  PerplexityOptions o;
  o.bos = 256;
  return o;
}

TEST(Perplexity, AgainstClosedForms) {
  FakeModel model("abcd");  // BOS stands at position 0 and is followed by 'a'
  const auto r = Score(model, std::string("abcd\0abxxabxx\0x", 15), WithBos());
  ASSERT_TRUE(r.ok()) << r.message();
  ASSERT_EQ(r->documents.size(), 3u);
  EXPECT_NEAR(r->documents[0].nats, kHit, 1e-12);
  EXPECT_NEAR(r->documents[1].nats, (2 * kHit + 6 * kMiss) / 8, 1e-12);
  EXPECT_NEAR(r->documents[2].nats, kMiss, 1e-12);
  EXPECT_EQ(r->documents[1].bytes, 8);
  const double a = r->documents[0].nats, b = r->documents[1].nats, c = r->documents[2].nats;
  const double mean = (a + b + c) / 3;
  EXPECT_NEAR(r->mean_nats, mean, 1e-12);
  const double var =
      ((a - mean) * (a - mean) + (b - mean) * (b - mean) + (c - mean) * (c - mean)) / 2;
  EXPECT_NEAR(r->stderr_nats, std::sqrt(var / 3), 1e-12);
  EXPECT_NEAR(r->bits_per_byte, (4 * a + 8 * b + c) / std::log(2.0) / 13, 1e-12);
}

TEST(Perplexity, CutsDocumentsAndCountsThem) {
  FakeModel model("abcd");
  PerplexityOptions o = WithBos();
  o.n_tokens = 2;
  o.n_docs = 2;
  const auto r = Score(model, std::string("\0abxx\0\0abyy\0abzz\0", 17), o);
  ASSERT_TRUE(r.ok());
  ASSERT_EQ(r->documents.size(), 2u);
  EXPECT_EQ(r->documents[0].tokens, 2);
  EXPECT_NEAR(r->documents[0].nats, kHit, 1e-12);
  for (const auto& pass : model.passes) EXPECT_LE(pass.second.size(), 2u);
}

TEST(Perplexity, WithoutBosTheFirstTokenIsNotScored) {
  FakeModel model("bcd");
  const auto r = Score(model, "abcd", {});
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->documents[0].tokens, 3);
  EXPECT_EQ(r->documents[0].bytes, 3);
  EXPECT_NEAR(r->documents[0].nats, kHit, 1e-12);
  EXPECT_TRUE(std::isnan(r->stderr_nats));
}

TEST(Perplexity, ByPositionInDoublingStretches) {
  FakeModel model(std::string(32, 'a') + std::string(68, 'b'));
  const std::string text = std::string(70, 'a') + std::string(1, '\0') + std::string(10, 'a');
  const auto r = Score(model, text, WithBos());
  ASSERT_TRUE(r.ok()) << r.message();
  ASSERT_EQ(r->by_position.size(), 3u);
  const auto& p = r->by_position;
  EXPECT_EQ(p[0].begin, 0);
  EXPECT_EQ(p[0].end, 32);
  EXPECT_EQ(p[0].tokens, 42);
  EXPECT_EQ(p[1].begin, 32);
  EXPECT_EQ(p[1].end, 64);
  EXPECT_EQ(p[1].tokens, 32);
  EXPECT_EQ(p[2].begin, 64);
  EXPECT_EQ(p[2].end, 128);
  EXPECT_EQ(p[2].tokens, 6);
  EXPECT_NEAR(p[0].nats, kHit, 1e-12);
  EXPECT_NEAR(p[1].nats, kMiss, 1e-12);
}

TEST(Perplexity, PiecesDoNotMatter) {
  const std::string text(100, 'a');
  FakeModel model(std::string(50, 'a'));
  PerplexityOptions o = WithBos();
  const double whole = Score(model, text, o)->mean_nats;
  for (const std::int64_t chunk : {1, 3, 64, 99, 100}) {
    o.chunk = chunk;
    EXPECT_EQ(Score(model, text, o)->mean_nats, whole);
  }
}

TEST(Perplexity, NothingToScoreIsAnError) {
  FakeModel model("abcd", 10);
  PerplexityOptions o = WithBos();
  o.n_tokens = 10;
  for (const std::string& text : {std::string(), std::string(3, '\0')}) {
    const auto r = Score(model, text, o);
    ASSERT_FALSE(r.ok());
    EXPECT_EQ(r.message(), "t.txt: no document with a token to score");
  }
  o.bos.reset();
  EXPECT_FALSE(Score(model, "a", o).ok());
  o.n_tokens = 11;
  EXPECT_NE(Score(model, "abc", o).message().find("11"), std::string::npos);
  o.n_tokens = 0;
  EXPECT_FALSE(Score(model, "abc", o).ok());
}

TEST(Perplexity, ErrorsNameTheDocument) {
  FakeModel model("abcd");
  model.fail = Error{Code::kNumeric, "not finite"};
  EXPECT_EQ(Score(model, "abc", WithBos()).message(), "t.txt: document 1: not finite");
  std::atomic<bool> cancel{true};
  PerplexityOptions o = WithBos();
  o.cancel = &cancel;
  EXPECT_EQ(Score(model, "abc", o).error().code, Code::kCancelled);
  EXPECT_EQ(Score(model, "abc", o).message(), "");
  // The same when the pass itself is stopped.
  model.fail = Error{Code::kCancelled, ""};
  EXPECT_EQ(Score(model, "abc", WithBos()).error().code, Code::kCancelled);
  EXPECT_EQ(Score(model, "abc", WithBos()).message(), "");
}

TEST(ComparePaired, MeanAndErrorOfTheDifferences) {
  PerplexityResult a, b;
  a.documents = {{10, 40, 3.0}, {20, 80, 2.0}, {5, 20, 4.0}};
  b.documents = {{10, 40, 3.1}, {20, 80, 2.3}, {5, 20, 4.2}};
  const auto d = ComparePaired(a, b);
  ASSERT_TRUE(d.ok());
  EXPECT_NEAR(d->mean, 0.2, 1e-12);
  EXPECT_NEAR(d->stderr_mean, 0.1 / std::sqrt(3.0), 1e-12);
  EXPECT_EQ(ComparePaired(a, a)->mean, 0.0);
  b.documents[1].tokens = 21;
  EXPECT_FALSE(ComparePaired(a, b).ok());
  b.documents.pop_back();
  EXPECT_FALSE(ComparePaired(a, b).ok());
  a.documents.resize(1), b.documents.resize(1);
  EXPECT_TRUE(std::isnan(ComparePaired(a, b)->stderr_mean));
}

}  // namespace
}  // namespace k3
