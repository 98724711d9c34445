#include "k3/io/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace k3 {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(ParseJson, ReadsEveryKindOfValue) {
  const auto r = ParseJson(R"({"a":[1,-2,0.5,true,null,"x\u00e9"],"b":{"c":{}}})", "f");
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ(r->dump(), "{\"a\":[1,-2,0.5,true,null,\"x\xc3\xa9\"],\"b\":{\"c\":{}}}");
}

TEST(ParseJson, RefusesWithPlaceAndReason) {
  const std::string deep = std::string(65, '[') + std::string(65, ']');
  const struct {
    std::string text, words;
  } cases[] = {
      {"", "not valid JSON"},
      {"{", "not valid JSON"},
      {"{} x", "not valid JSON"},
      {"{\"a\":1,}", "not valid JSON"},
      {"[01]", "not valid JSON"},
      {"[NaN]", "not valid JSON"},
      {"[1e999]", "not valid JSON at byte 6: number overflow"},
      {"\"\xff\"", "not valid JSON"},
      {std::string("\"a\0b\"", 5), "not valid JSON"},
      {std::string("{}\0x", 4), "not valid JSON at byte 2"},
      {R"({"k":1,"k":1})", "duplicate key \"k\""},
      {R"([{"x":{"k":1,"j":2,"k":[]}}])", "duplicate key \"k\""},
      {R"({"k":1,"\u006b":1})", "duplicate key \"k\""},
      {deep, "nested over 64"},
  };
  for (const auto& c : cases) {
    const auto r = ParseJson(c.text, "the/file");
    ASSERT_FALSE(r.ok()) << c.text;
    EXPECT_THAT(r.message(), HasSubstr("the/file: "));
    EXPECT_THAT(r.message(), HasSubstr(c.words)) << c.text;
    EXPECT_THAT(r.message(), Not(HasSubstr("\n")));
    EXPECT_THAT(r.message(), Not(HasSubstr("json.exception")));
    EXPECT_LT(r.message().size(), 400u);
  }
}

TEST(ParseJson, DepthOf64IsFineAndManyValuesAreNot) {
  EXPECT_TRUE(ParseJson(std::string(64, '[') + std::string(64, ']'), "f").ok());
  std::string many = "[";
  for (std::size_t i = 0; i <= kMaxJsonValues; ++i) many += "1,";
  many.back() = ']';
  const auto r = ParseJson(many, "f");
  ASSERT_FALSE(r.ok());
  EXPECT_THAT(r.message(), HasSubstr("too many values"));
}

TEST(ParseJson, LongHostileTokenGivesAShortPrintableMessage) {
  const auto r = ParseJson("{\"" + std::string(100000, '\x1b'), "f");
  ASSERT_FALSE(r.ok());
  EXPECT_LT(r.message().size(), 400u);
  EXPECT_THAT(r.message(), Not(HasSubstr("\x1b")));
}

class JsonReaderTest : public ::testing::Test {
 protected:
  nlohmann::json j = nlohmann::json::parse(R"({"i":7,"neg":-1,"f":64.0,"half":0.5,
    "big":18446744073709551615,"huge":1e300,"s":"w","t":true,"n":null,"l":[1,2],"m":[1,2.5],
    "o":{"x":"y"}})");
  JsonReader r{j, "c.json"};
};

TEST_F(JsonReaderTest, ReadsInRange) {
  EXPECT_EQ(*r.Int("i", 0, 7), 7);
  EXPECT_EQ(*r.Int("absent", 0, 7, 3), 3);
  EXPECT_EQ(*r.Int("n", 0, 7, 3), 3);
  EXPECT_EQ(*r.Number("i", 0, 10), 7.0);
  EXPECT_EQ(*r.Number("half", 0, 1), 0.5);
  EXPECT_EQ(*r.Bool("t", false), true);
  EXPECT_EQ(*r.String("s"), "w");
  EXPECT_EQ(**r.OptIntList("l", 0, 2), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(**r.OptIntList("i", 0, 9, true), std::vector<std::int64_t>{7});
  EXPECT_FALSE(r.Has("n"));
}

TEST_F(JsonReaderTest, RefusesNamingTheKey) {
  const auto expect = [](const auto& result, const char* words) {
    ASSERT_FALSE(result.ok()) << words;
    EXPECT_THAT(result.message(), HasSubstr(words));
    EXPECT_THAT(result.message(), HasSubstr("c.json: "));
  };
  expect(r.Int("i", 0, 6), "i is 7, expected an integer from 0 to 6");
  expect(r.Int("neg", 0, 6), "neg is -1");
  expect(r.Int("f", 0, 100), "f is 64.0, expected an integer");
  expect(r.Int("big", 0, INT64_MAX), "big is 18446744073709551615");
  expect(r.Int("t", 0, 1), "t is true");
  expect(r.Int("absent", 0, 1), "key absent is missing");
  expect(r.Int("n", 0, 1), "key n is missing");
  expect(r.Number("huge", -1e30, 1e30), "huge is 1e+300");
  expect(r.Number("s", 0, 1), "s is \"w\", expected a number");
  expect(r.Number("t", 0, 1), "t is true");
  expect(r.Bool("i", true), "i is 7, expected true or false");
  expect(r.String("i"), "i is 7, expected a string");
  expect(r.OptIntList("m", 0, 9), "m[1] is 2.5");
  expect(r.OptIntList("i", 0, 9), "i is 7");
  expect(r.Object("l"), "l is a list of 2, expected an object");
  const auto nested = r.Object("o");
  ASSERT_TRUE(nested.ok());
  expect((**nested).Int("x", 0, 1), "o.x is \"y\"");
}

TEST(ParseOrderedJson, KeepsTheOrderAndRefusesWhatParseJsonDoes) {
  const auto r = ParseOrderedJson("{\"z\": 1, \"a\": {\"y\": 2, \"b\": 3}}", "c.json");
  ASSERT_TRUE(r.ok()) << r.message();
  EXPECT_EQ((*r).dump(), "{\"z\":1,\"a\":{\"y\":2,\"b\":3}}");
  for (const char* bad : {"", "{", "{\"a\":1,\"a\":2}", "[1] x"}) {
    EXPECT_FALSE(ParseOrderedJson(bad, "c.json").ok()) << bad;
  }
  const auto long_text = ParseOrderedJson(std::string((1 << 20) + 1, ' '), "c.json");
  EXPECT_THAT(long_text.message(), HasSubstr("expected at most 1048576"));
}

}  // namespace
}  // namespace k3
