#include "k3/runtime/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "support/fake_model.h"

namespace k3 {
namespace {

using test::Bytes;
using test::ByteTokenizer;
using test::FakeModel;

/// Position p of the script is what follows p + 1 tokens, so a prompt of n tokens is continued from
/// script[n - 1] on.
std::string After(std::string_view prompt, const std::string& text) {
  return std::string(prompt.size() - 1, '.') + text;
}

GenerateOptions Greedy() {
  GenerateOptions o;
  o.sampling.temperature = 0;
  o.eos = {257};
  return o;
}

struct Outcome {
  GenerateResult result;
  std::vector<std::string> pieces;
  SequenceState state;
};

Outcome Continue(FakeModel& model, std::string_view prompt, const GenerateOptions& options) {
  Outcome out;
  out.state = NewSequence(model, 1);
  AppendPrompt(out.state, Bytes(prompt));
  GenerateEvents events;
  events.on_text = [&](std::string_view text) {
    out.pieces.emplace_back(text);
    return Status();
  };
  auto r = Generate(model, ByteTokenizer(), out.state, options, events);
  EXPECT_TRUE(r.ok()) << r.message();
  if (r.ok()) out.result = std::move(r).value();
  std::string joined;
  for (const auto& p : out.pieces) joined += p;
  EXPECT_EQ(joined, out.result.text);
  return out;
}

TEST(Generate, EndsAtTheEndToken) {
  FakeModel model(After("hi", " there"));
  const Outcome out = Continue(model, "hi", Greedy());
  EXPECT_EQ(out.result.text, " there");
  EXPECT_EQ(out.result.ids, Bytes(" there"));
  EXPECT_EQ(out.result.finish, FinishReason::kStop);
  EXPECT_EQ(out.pieces.size(), 6u) << "text comes token by token";
  // The sequence is prompt and text; nothing is read twice.
  EXPECT_EQ(out.state.tokens, Bytes("hi there"));
  std::vector<TokenId> read;
  for (const auto& [position, tokens] : model.passes) {
    EXPECT_EQ(position, static_cast<std::int64_t>(read.size()));
    read.insert(read.end(), tokens.begin(), tokens.end());
  }
  EXPECT_EQ(read, Bytes("hi there"));
}

TEST(Generate, ControlTokensAreNoText) {
  FakeModel model(After("hi", "ab"));
  GenerateOptions o = Greedy();
  o.eos = {};
  o.max_tokens = 4;
  const Outcome out = Continue(model, "hi", o);
  EXPECT_EQ(out.result.ids, (std::vector<TokenId>{'a', 'b', 257, 257}));
  EXPECT_EQ(out.result.text, "ab");
}

TEST(Generate, StopsAfterMaxTokensWithTheLastOnePending) {
  FakeModel model(After("hi", "abcdef"));
  GenerateOptions o = Greedy();
  o.max_tokens = 3;
  const Outcome out = Continue(model, "hi", o);
  EXPECT_EQ(out.result.text, "abc");
  EXPECT_EQ(out.result.finish, FinishReason::kLength);
  ASSERT_EQ(out.state.pending().size(), 1u);
  EXPECT_EQ(out.state.pending()[0], 'c');
}

TEST(Generate, InPartsGivesTheSameAsAtOnce) {
  FakeModel model(After("hi", "abcdefgh"));
  GenerateOptions o = Greedy();
  o.max_tokens = 3;
  Outcome out = Continue(model, "hi", o);
  o.max_tokens = 100;
  const auto rest = Generate(model, ByteTokenizer(), out.state, o);
  ASSERT_TRUE(rest.ok());
  EXPECT_EQ(out.result.text + rest->text, "abcdefgh");
}

TEST(Generate, PromptPiecesAreCutAtAbsoluteMultiples) {
  const std::string prompt(21, 'x');
  GenerateOptions o = Greedy();
  o.prefill_chunk = 8;
  FakeModel whole(After(prompt, "yes"));
  EXPECT_EQ(Continue(whole, prompt, o).result.text, "yes");
  ASSERT_GE(whole.passes.size(), 3u);
  EXPECT_EQ(whole.passes[0].second.size(), 8u);
  EXPECT_EQ(whole.passes[1].second.size(), 8u);
  EXPECT_EQ(whole.passes[2].second.size(), 5u);

  // The same prompt in two parts, the first read ahead with max_tokens 0.
  FakeModel parts(After(prompt, "yes"));
  SequenceState state = NewSequence(parts, 1);
  AppendPrompt(state, Bytes(prompt.substr(0, 11)));
  o.max_tokens = 0;
  const auto read = Generate(parts, ByteTokenizer(), state, o);
  ASSERT_TRUE(read.ok());
  EXPECT_TRUE(read->ids.empty());
  EXPECT_EQ(state.model.position(), 8);
  AppendPrompt(state, Bytes(prompt.substr(11)));
  o.max_tokens = 100;
  EXPECT_EQ(Generate(parts, ByteTokenizer(), state, o)->text, "yes");
  EXPECT_EQ(parts.passes, whole.passes);
}

TEST(Generate, FastModeCutsOnTheGrid) {
  const std::string prompt(200, 'x');
  FakeModel model(After(prompt, "y"));
  model.mode = MathMode::kFast;
  GenerateOptions o = Greedy();
  o.prefill_chunk = 70;  // rounded up to 128
  Continue(model, prompt, o);
  EXPECT_EQ(model.passes[0].second.size(), 128u);
  EXPECT_EQ(model.passes[1].second.size(), 72u);
}

TEST(Generate, StopStringsAreHeldBackAndNotGivenOut) {
  FakeModel model(After("p", "one END two"));
  GenerateOptions o = Greedy();
  o.stop = {"END", "never"};
  const Outcome out = Continue(model, "p", o);
  EXPECT_EQ(out.result.text, "one ");
  EXPECT_EQ(out.result.finish, FinishReason::kStop);
  EXPECT_EQ(out.result.matched_stop, "END");
  EXPECT_EQ(out.result.ids, Bytes("one END"));
  // What only looked like a stop string comes out in the end.
  FakeModel close(After("p", "an EN"));
  EXPECT_EQ(Continue(close, "p", o).result.text, "an EN");
}

TEST(Generate, CharactersComeWholeAndABrokenOneBecomesTheReplacement) {
  FakeModel model(After("p", "né\xe6\x97"));
  const Outcome out = Continue(model, "p", Greedy());
  EXPECT_EQ(out.result.text, "né\xef\xbf\xbd");
  EXPECT_EQ(out.pieces, (std::vector<std::string>{"n", "é", "\xef\xbf\xbd"}));
  // The replacement may be what ends the text.
  GenerateOptions o = Greedy();
  o.stop = {"\xef\xbf\xbd"};
  o.max_tokens = 4;
  FakeModel again(After("p", "né\xe6\x97"));
  const Outcome stopped = Continue(again, "p", o);
  EXPECT_EQ(stopped.result.text, "né");
  EXPECT_EQ(stopped.result.finish, FinishReason::kStop);
  EXPECT_EQ(stopped.result.matched_stop, "\xef\xbf\xbd");
}

TEST(Generate, FillingTheContextIsLengthATooLongPromptAnError) {
  FakeModel model(After("abcd", "efghijkl"), 6);
  const Outcome out = Continue(model, "abcd", Greedy());
  EXPECT_EQ(out.result.text, "ef");
  EXPECT_EQ(out.result.finish, FinishReason::kLength);
  EXPECT_EQ(Continue(model, "abcdef", Greedy()).result.finish, FinishReason::kLength);

  model.passes.clear();
  SequenceState state = NewSequence(model, 1);
  AppendPrompt(state, Bytes("abcdefg"));
  const auto r = Generate(model, ByteTokenizer(), state, Greedy());
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.message(), "the prompt has 7 tokens, the context holds 6");
  EXPECT_TRUE(model.passes.empty());
  GenerateOptions small = Greedy();
  small.context = 3;
  SequenceState four = NewSequence(model, 1);
  AppendPrompt(four, Bytes("abcd"));
  EXPECT_FALSE(Generate(model, ByteTokenizer(), four, small).ok());
}

TEST(Generate, CancellingLeavesAStateThatContinues) {
  for (int passes = 1; passes <= 6; ++passes) {
    FakeModel model(After("abcdefghij", "klmno"));
    std::atomic<bool> cancel{false};
    int seen = 0;
    model.on_forward = [&] { cancel = ++seen == passes; };
    GenerateOptions o = Greedy();
    o.prefill_chunk = 4;
    o.cancel = &cancel;
    Outcome out = Continue(model, "abcdefghij", o);
    EXPECT_EQ(out.result.finish, FinishReason::kCancelled) << passes;
    model.on_forward = nullptr;
    cancel = false;
    const auto rest = Generate(model, ByteTokenizer(), out.state, o);
    ASSERT_TRUE(rest.ok());
    EXPECT_EQ(out.result.text + rest->text, "klmno") << passes;
  }
}

TEST(Generate, APassStoppedInsideEndsTheTextAndLosesTheState) {
  for (int passes = 1; passes <= 5; ++passes) {
    FakeModel model(After("abcdefghij", "klmno"));
    int seen = 0;
    model.on_forward = [&] {
      if (++seen == passes) model.fail = Error{Code::kCancelled, ""};
    };
    GenerateOptions o = Greedy();
    o.prefill_chunk = 4;
    const Outcome out = Continue(model, "abcdefghij", o);
    EXPECT_EQ(out.result.finish, FinishReason::kCancelled) << passes;
    EXPECT_TRUE(out.result.state_lost) << passes;
    EXPECT_EQ(out.result.ids.size(), static_cast<std::size_t>(std::max(0, passes - 3))) << passes;
    EXPECT_EQ(seen, passes);
  }
}

TEST(Generate, ErrorsAreReported) {
  FakeModel model("x");
  SequenceState empty = NewSequence(model, 1);
  EXPECT_FALSE(Generate(model, ByteTokenizer(), empty, Greedy()).ok());

  model.fail = Error{Code::kNumeric, "bad"};
  SequenceState state = NewSequence(model, 1);
  AppendPrompt(state, Bytes("p"));
  EXPECT_EQ(Generate(model, ByteTokenizer(), state, Greedy()).message(), "bad");

  FakeModel fine(After("p", "abc"));
  SequenceState closed = NewSequence(fine, 1);
  AppendPrompt(closed, Bytes("p"));
  GenerateEvents events;
  events.on_text = [](std::string_view) { return Status(Error{Code::kIo, "closed"}); };
  EXPECT_EQ(Generate(fine, ByteTokenizer(), closed, Greedy(), events).message(), "closed");

  GenerateOptions bad = Greedy();
  bad.max_tokens = -1;
  EXPECT_FALSE(Generate(fine, ByteTokenizer(), closed, bad).ok());
  bad = Greedy();
  bad.stop = {""};
  EXPECT_FALSE(Generate(fine, ByteTokenizer(), closed, bad).ok());
  bad = Greedy();
  bad.sampling.top_p = 2;
  EXPECT_FALSE(Generate(fine, ByteTokenizer(), closed, bad).ok());
}

TEST(Generate, LogprobsOnePerToken) {
  FakeModel model(After("p", "ab"));
  GenerateOptions o = Greedy();
  o.top_logprobs = 2;
  const Outcome out = Continue(model, "p", o);
  ASSERT_EQ(out.result.tokens.size(), 2u);
  EXPECT_EQ(out.result.tokens[1].token, 'b');
  EXPECT_EQ(out.result.tokens[1].top.size(), 2u);
  EXPECT_EQ(out.result.tokens[1].top[0].id, 'b');
}

TEST(Generate, AForkGoesItsOwnWay) {
  FakeModel model(After("p", "abcdef"));
  GenerateOptions o = Greedy();
  o.max_tokens = 2;
  Outcome out = Continue(model, "p", o);
  SequenceState fork = out.state;
  const auto a = Generate(model, ByteTokenizer(), out.state, o);
  const auto b = Generate(model, ByteTokenizer(), fork, o);
  EXPECT_EQ(a->text, "cd");
  EXPECT_EQ(b->text, "cd");
  EXPECT_EQ(fork.tokens, out.state.tokens);
}

TEST(NextCut, IsAnchoredAtZero) {
  EXPECT_EQ(NextCut(0, 8, MathMode::kExact), 8);
  EXPECT_EQ(NextCut(7, 8, MathMode::kExact), 8);
  EXPECT_EQ(NextCut(8, 8, MathMode::kExact), 16);
  EXPECT_EQ(NextCut(3, 1, MathMode::kExact), 4);
  EXPECT_EQ(NextCut(3, 1, MathMode::kFast), 64);
  EXPECT_EQ(NextCut(64, 65, MathMode::kFast), 128);
  EXPECT_GT(NextCut(5, INT64_MAX, MathMode::kFast), 5);
  EXPECT_GT(NextCut(5, -1, MathMode::kExact), 5);
}

}  // namespace
}  // namespace k3
