#include "k3/runtime/stop.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

StopMatcher Make(std::vector<std::string> stops) {
  auto m = StopMatcher::Create(std::move(stops));
  EXPECT_TRUE(m.ok());
  return std::move(m).value();
}

TEST(Stop, HoldsBackExactlyWhatCouldBecomeAStop) {
  StopMatcher m = Make({"</s>"});
  EXPECT_EQ(m.Push("one <"), "one ");
  EXPECT_EQ(m.Push("/"), "");
  EXPECT_EQ(m.Push("b> <<"), "</b> <");
  EXPECT_EQ(m.Push("/s"), "");
  EXPECT_EQ(m.Finish(), "</s");
  EXPECT_FALSE(m.stopped());
}

TEST(Stop, NeverGivesOutTheStopNorWhatFollows) {
  StopMatcher m = Make({"END"});
  EXPECT_EQ(m.Push("the EN"), "the ");
  EXPECT_EQ(m.Push("D and more"), "");
  EXPECT_TRUE(m.stopped());
  EXPECT_EQ(m.matched(), "END");
  EXPECT_EQ(m.Push("later"), "");
  EXPECT_EQ(m.Finish(), "");
}

TEST(Stop, SeveralStopsTheFirstToEndWinsAndTheLongestOnATie) {
  StopMatcher a = Make({"abcd", "bc"});
  EXPECT_EQ(a.Push("xabcd"), "xa");
  EXPECT_EQ(a.matched(), "bc");
  StopMatcher b = Make({"b", "ab"});
  EXPECT_EQ(b.Push("xab"), "x");
  EXPECT_EQ(b.matched(), "ab");
  StopMatcher c = Make({"same", "same"});
  EXPECT_EQ(c.Push("same"), "");
  EXPECT_TRUE(c.stopped());
}

TEST(Stop, SelfOverlappingStops) {
  StopMatcher m = Make({"aab"});
  EXPECT_EQ(m.Push("aaa"), "a");
  EXPECT_EQ(m.Push("a"), "a");
  EXPECT_EQ(m.Push("b!"), "");
  EXPECT_TRUE(m.stopped());
  StopMatcher n = Make({"abab!"});
  EXPECT_EQ(n.Push("ababab"), "ab");
  EXPECT_EQ(n.Push("!"), "");
  EXPECT_TRUE(n.stopped());
}

// Every way to cut a text gives what one look at the whole gives.
TEST(Stop, CutsDoNotMatter) {
  const std::vector<std::vector<std::string>> sets{
      {"\n\n"}, {"aba", "bab"}, {"é!", "日本"}, {"aaaa", "aa b"}};
  const std::vector<std::string> texts{"x\n\ny", "aabb aba", "日 é! 日本", "aaa aa aa b", "né", ""};
  for (const auto& set : sets) {
    for (const auto& text : texts) {
      std::size_t first_end = text.size() + 1, cut = text.size();
      for (const auto& stop : set) {
        const auto at = text.find(stop);
        if (at == std::string::npos) continue;
        const auto end = at + stop.size();
        if (end < first_end || (end == first_end && at < cut)) first_end = end, cut = at;
      }
      for (std::size_t step = 1; step <= text.size() + 1; ++step) {
        StopMatcher m = Make(set);
        std::string out;
        for (std::size_t i = 0; i < text.size(); i += step) out += m.Push(text.substr(i, step));
        out += m.Finish();
        EXPECT_EQ(out, text.substr(0, cut)) << text << " step " << step;
        EXPECT_EQ(m.stopped(), first_end <= text.size());
      }
    }
  }
}

TEST(Stop, BehindAUtf8StreamOnlyWholeCharactersComeOut) {
  const std::string text = "né日!";
  Utf8Stream utf8;
  StopMatcher m = Make({"日?"});
  std::string out;
  for (const char c : text) {
    const std::string piece = m.Push(utf8.Push(std::string_view(&c, 1)));
    Utf8Stream whole;
    EXPECT_EQ(whole.Push(piece), piece) << "half a character came out";
    out += piece;
  }
  out += m.Push(utf8.Finish()) + m.Finish();
  EXPECT_EQ(out, text);
}

TEST(Stop, EmptyAndBrokenStopsAreRefused) {
  EXPECT_FALSE(StopMatcher::Create({"a", ""}).ok());
  EXPECT_EQ(StopMatcher::Create({"a", ""}).message(), "stop string 2 is empty");
  EXPECT_FALSE(StopMatcher::Create({"\xff"}).ok());
  EXPECT_FALSE(StopMatcher::Create({"\xe6\xad"}).ok());
  StopMatcher none = Make({});
  EXPECT_EQ(none.Push("anything"), "anything");
}

}  // namespace
}  // namespace k3
