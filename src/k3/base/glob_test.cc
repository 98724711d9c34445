#include "k3/base/glob.h"

#include <gtest/gtest.h>

#include <string>

namespace k3 {
namespace {

TEST(Glob, Matches) {
  EXPECT_TRUE(MatchesGlob("", ""));
  EXPECT_TRUE(MatchesGlob("*", ""));
  EXPECT_TRUE(MatchesGlob("*", "a.b"));
  EXPECT_TRUE(MatchesGlob("model.layers.?.self_attn.*", "model.layers.3.self_attn.q_proj.weight"));
  EXPECT_TRUE(MatchesGlob("*.q_proj.weight", "model.layers.13.self_attn.q_proj.weight"));
  EXPECT_TRUE(MatchesGlob("a*b*c", "aXbYbZc"));
  EXPECT_TRUE(MatchesGlob("**a**", "bab"));
  EXPECT_FALSE(MatchesGlob("", "a"));
  EXPECT_FALSE(MatchesGlob("?", ""));
  EXPECT_FALSE(MatchesGlob("a*b", "abc"));
  EXPECT_FALSE(MatchesGlob("a.c", "abc"));
}

TEST(Glob, ManyStarsAreNotSlow) {
  std::string pattern, text(20000, 'a');
  for (int i = 0; i < 200; ++i) pattern += "a*";
  EXPECT_FALSE(MatchesGlob(pattern + "b", text));
}

}  // namespace
}  // namespace k3
