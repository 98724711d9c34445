#include "k3/model/generation_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temp_dir.h"

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(GenerationConfig, ReadsTheGoldenOne) {
  const auto r = ReadGenerationConfig(std::string(K3_SOURCE_DIR) + "/tests/golden/tiny-k3", 576);
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r->do_sample, true);
  EXPECT_EQ(r->temperature, 1.0f);
  EXPECT_EQ(r->top_p, 0.95f);
  EXPECT_FALSE(r->top_k.has_value());
  EXPECT_THAT(r->eos, ElementsAre(322));
}

TEST(GenerationConfig, AbsentFileIsAllDefaults) {
  const testing::TempDir dir;
  const auto r = ReadGenerationConfig(dir.path(), 10);
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_FALSE(r->temperature.has_value());
  EXPECT_THAT(r->eos, IsEmpty());
}

TEST(GenerationConfig, AllFields) {
  const auto r = ParseGenerationConfig(
      R"({"top_k":-1,"min_p":0.1,"repetition_penalty":1.1,"max_new_tokens":7,
          "eos_token_id":[1,2],"pad_token_id":"ignored"})",
      "g", 3);
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r->top_k, 0);
  EXPECT_EQ(r->min_p, 0.1f);
  EXPECT_EQ(r->repetition_penalty, 1.1f);
  EXPECT_EQ(r->max_new_tokens, 7);
  EXPECT_THAT(r->eos, ElementsAre(1, 2));
}

TEST(GenerationConfig, RefusesNamingTheKey) {
  const struct {
    const char *text, *words;
  } cases[] = {{"3", "g: is 3, expected an object"},
               {R"({"temperature":-1})", "temperature is -1"},
               {R"({"temperature":"hot"})", "temperature is \"hot\""},
               {R"({"top_p":1.5})", "top_p is 1.5"},
               {R"({"top_k":2.5})", "top_k is 2.5"},
               {R"({"max_new_tokens":0})", "max_new_tokens is 0"},
               {R"({"repetition_penalty":0})", "repetition_penalty is 0"},
               {R"({"do_sample":1})", "do_sample is 1"},
               {R"({"eos_token_id":3})", "eos_token_id is 3"},
               {R"({"eos_token_id":[0,3]})", "eos_token_id[1] is 3"},
               {R"({"top_p":1,"top_p":1})", "duplicate key"}};
  for (const auto& c : cases) {
    const auto r = ParseGenerationConfig(c.text, "g", 3);
    ASSERT_FALSE(r.ok()) << c.text;
    EXPECT_THAT(r.message(), HasSubstr(c.words));
  }
}

}  // namespace
}  // namespace k3
