#include "k3/grammar/schema.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "k3/grammar/test_util.h"

namespace k3::grammar {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Row {
  const char* schema;
  std::vector<std::string> accepted, rejected;
};

void Check(const std::vector<Row>& rows, SchemaOptions options = {}) {
  for (const Row& row : rows) {
    SCOPED_TRACE(row.schema);
    const auto automaton = AutomatonOf(row.schema, options);
    if (automaton == nullptr) continue;
    for (const std::string& text : row.accepted) EXPECT_TRUE(Matches(automaton, text)) << text;
    for (const std::string& text : row.rejected) EXPECT_FALSE(Matches(automaton, text)) << text;
  }
}

TEST(Schema, Scalars) {
  Check({
      {R"({"type":"null"})", {"null"}, {"", "nul", "nulll", "0", "NULL", " null", "null "}},
      {R"({"type":"boolean"})", {"true", "false"}, {"True", "1", "truefalse", "\"true\""}},
      {R"({"type":"integer"})",
       {"0", "-1", "7", "10", "123456789012345678"},
       {"", "-", "00", "01", "-0", "1.0", "1e3", "+1", "1234567890123456789", "0x1"}},
      {R"({"type":"number"})",
       {"0", "-0", "-1.5", "0.10", "1e5", "1E-10", "2.5e+10", "123.456"},
       {"", ".5", "1.", "1e", "01.5", "1e400", "NaN", "--1", "1.5.2", "Infinity"}},
      {R"({"type":["integer","null"]})", {"5", "null"}, {"5.5", "\"5\"", "true"}},
      {R"({"type":"string","nullable":true})", {"null", "\"\""}, {"nil", "0"}},
      {R"({"enum":["a","ab",3,null,true,1.5,[1,{"x":2}]]})",
       {"\"a\"", "\"ab\"", "3", "null", "true", "1.5", "[1,{\"x\":2}]"},
       {"a", "\"abc\"", "4", "false", "[1, {\"x\": 2}]"}},
      {R"({"type":"string","enum":["x",1]})", {"\"x\""}, {"1"}},
      {R"({"const":"q\"\\\n\u00e9"})", {"\"q\\\"\\\\\\n\xC3\xA9\""}, {"\"q\""}},
      {R"({"const":{"b":1,"a":[]}})", {"{\"b\":1,\"a\":[]}"}, {"{\"a\":[],\"b\":1}"}},
      {"true", {"1", "{}", "[[],{}]", "\"\""}, {"", "}", "[,]"}},
      {"{}", {"1", "{\"a\":[1,{\"b\":null}]}", "-0.5e1"}, {"{a:1}", "[1,]", "{\"a\" :1}"}},
      {R"({"title":"t","description":"d","default":3,"examples":[]})", {"1", "\"x\""}, {"x"}},
  });
}

TEST(Schema, Strings) {
  Check({
      {R"({"type":"string"})",
       {"\"\"", "\"abc\"", "\"a\\n\\\"\\\\\\/\\b\\f\\r\\t\"", "\"\\u0041\\u00e9\\uFFff\"",
        "\"\xC3\xA9\xE6\xBC\xA2\xF0\x9F\x98\x80\"", "\"\\ud83d\\ude00\"", "\"\x7F\""},
       {"abc", "\"", "\"a", "\"a\"b\"", "\"a\nb\"", "\"\\x41\"", "\"\\u12\"", "\"\\ud83d\"",
        "\"\\ude00\\ud83d\"", "\"\\ud83dx\"", "\"\xC3\"", "\"\xC0\x80\"", "\"\xED\xA0\x80\"",
        "\"\xF4\x90\x80\x80\"", "\"\xFF\"", "\"\xE0\x80\x80\"", std::string("\"\0\"", 3)}},
      {R"({"type":"string","minLength":2,"maxLength":3})",
       {"\"ab\"", "\"abc\"", "\"\xE6\xBC\xA2\xF0\x9F\x98\x80\"", "\"\\n\\u0041\\ud83d\\ude00\""},
       {"\"a\"", "\"abcd\"", "\"\"", "\"\xE6\xBC\xA2\"", "\"\\ud83d\\ude00\""}},
      {R"({"type":"string","maxLength":0})", {"\"\""}, {"\"a\""}},
      {R"({"minLength":1})", {"\"a\""}, {"\"\"", "1"}},
      {R"({"type":"string","minLength":3})", {"\"abc\"", "\"abcdefgh\""}, {"\"ab\""}},
  });
}

TEST(Schema, Patterns) {
  Check({
      {R"({"pattern":"^[a-c]{2,3}$"})", {"\"ab\"", "\"cba\""}, {"\"a\"", "\"abca\"", "\"ad\""}},
      {R"({"pattern":"^(foo|ba[rz])+$"})",
       {"\"foo\"", "\"barbaz\"", "\"foofoobar\""},
       {"\"\"", "\"fo\"", "\"bax\"", "\"foob\""}},
      {R"({"pattern":"b"})", {"\"b\"", "\"abc\"", "\"\\u0041b\""}, {"\"\"", "\"aac\""}},
      {R"({"pattern":"^a|b$"})", {"\"a\"", "\"axx\"", "\"xxb\""}, {"\"xa\"", "\"bx\""}},
      {R"({"pattern":"^\\d+(?:\\.\\d{2})?$"})",
       {"\"1\"", "\"12.50\""},
       {"\"1.5\"", "\".50\"", "\"1.\""}},
      {R"({"pattern":"^[^\\s\"]*$"})",
       {"\"\"", "\"ab\xC3\xA9\"", "\"\\\\\""},
       {"\"a b\"", "\"\\\"\"", "\"\\n\""}},
      {R"({"pattern":"^\\w+?-\\W$"})", {"\"a_1-!\""}, {"\"-!\"", "\"a-b\""}},
      {R"({"pattern":"^\\u00e9\\x41\\u{1F600}[\\]\\-^]$"})",
       {"\"\xC3\xA9"
        "A\xF0\x9F\x98\x80]\"",
        "\"\xC3\xA9"
        "A\xF0\x9F\x98\x80-\""},
       {"\"\xC3\xA9"
        "A\"",
        "\"\xC3\xA9"
        "A\xF0\x9F\x98\x80x\""}},
      {R"({"pattern":"^.$"})", {"\"x\"", "\"\xE6\xBC\xA2\""}, {"\"\\n\"", "\"xy\""}},
      {R"({"pattern":"^(a*)*$"})", {"\"\"", "\"aaaa\""}, {"\"b\""}},
      {R"({"pattern":"^[a-z]+$","minLength":2,"maxLength":4})",
       {"\"ab\"", "\"abcd\""},
       {"\"a\"", "\"abcde\"", "\"AB\""}},
      {R"({"pattern":"^[A-Z]{3}$","maxLength":5})", {"\"ABC\""}, {"\"ABCD\""}},
      {R"({"pattern":"^[a-z]*$","maxLength":1000000})", {"\"\"", "\"abcd\""}, {"\"A\""}},
      {R"({"pattern":""})", {"\"\"", "\"x\""}, {"x"}},
  });
}

TEST(Schema, Formats) {
  Check({
      {R"({"format":"date"})",
       {"\"2024-02-29\"", "\"2023-12-31\"", "\"2000-02-29\"", "\"1999-04-30\""},
       {"\"2023-02-29\"", "\"1900-02-29\"", "\"2023-13-01\"", "\"2023-04-31\"", "\"2023-1-1\""}},
      {R"({"format":"date-time"})",
       {"\"2024-01-01T00:00:00Z\"", "\"2024-01-01T23:59:59.123+05:30\""},
       {"\"2024-01-01\"", "\"2024-01-01 00:00:00Z\"", "\"2024-01-01T24:00:00Z\""}},
      {R"({"format":"time"})", {"\"12:30:00Z\""}, {"\"12:30\"", "\"25:00:00Z\""}},
      {R"({"format":"uuid"})",
       {"\"123e4567-e89b-12d3-a456-426614174000\""},
       {"\"123e4567e89b12d3a456426614174000\"", "\"123e4567-e89b-12d3-a456-42661417400g\""}},
      {R"({"format":"email"})",
       {"\"a.b+c@x-y.example.org\""},
       {"\"a@b\"", "\"@x.org\"", "\"a..b@x.org\"", "\"a b@x.org\""}},
      {R"({"format":"ipv4"})",
       {"\"0.0.0.0\"", "\"255.10.199.249\""},
       {"\"256.0.0.0\"", "\"1.2.3\"", "\"01.2.3.4\""}},
      {R"({"format":"ipv6"})", {"\"2001:db8:0:0:0:0:0:1\""}, {"\"::g\""}},
      {R"({"format":"uri"})",
       {"\"https://example.org/a/b?q=1#f\"", "\"ftp://h:21\""},
       {"\"example.org\"", "\"http://\"", "\"http://a b\""}},
      {R"({"format":"hostname"})", {"\"a-b.example\"", "\"localhost\""}, {"\"-a\"", "\"a..b\""}},
      {R"({"format":"duration"})",
       {"\"P1Y2M3DT4H5M6S\"", "\"PT5M\"", "\"P2W\""},
       {"\"P\"", "\"PT\"", "\"5M\""}},
      {R"({"type":"integer","format":"int32"})",
       {"2147483647", "-2147483648", "0"},
       {"2147483648", "-2147483649"}},
      {R"({"type":"number","format":"double"})", {"1.5"}, {"\"1.5\""}},
  });
}

TEST(Schema, IntegerBoundsAreExact) {
  const std::pair<std::int64_t, std::int64_t> bounds[] = {
      {0, 0}, {0, 9}, {5, 5}, {7, 123}, {-5, 5}, {-123, -7}, {-1000, 999}, {99, 101}, {-1, 0}};
  for (const auto& [lo, hi] : bounds) {
    for (const bool exclusive : {false, true}) {
      const std::string e = exclusive ? "exclusiveM" : "m", capital = exclusive ? "M" : "m";
      const auto schema = R"({"type":"integer",")" + e + "inimum\":" + std::to_string(lo) + ",\"" +
                          e + "aximum\":" + std::to_string(hi) + "}";
      if (exclusive && hi - lo < 2) continue;
      const auto automaton = AutomatonOf(schema);
      ASSERT_NE(automaton, nullptr);
      for (std::int64_t n = -1100; n <= 1100; ++n) {
        const bool in = exclusive ? lo < n && n < hi : lo <= n && n <= hi;
        ASSERT_EQ(Matches(automaton, std::to_string(n)), in) << schema << " " << n;
      }
    }
  }
  Check({
      {R"({"type":"integer","minimum":100})", {"100", "99999999999"}, {"99", "-100"}},
      {R"({"type":"integer","maximum":-3})", {"-3", "-99999"}, {"-2", "0", "3"}},
      {R"({"type":"integer","minimum":0.5,"maximum":2.5})", {"1", "2"}, {"0", "3"}},
      {R"({"type":"integer","exclusiveMinimum":0.5,"exclusiveMaximum":3})", {"1", "2"}, {"0", "3"}},
      {R"({"type":"integer","minimum":-1e300,"maximum":1e300})", {"0", "-77"}, {"1.5"}},
      {R"({"type":"integer","minimum":3,"exclusiveMinimum":3})", {"4"}, {"3"}},
  });
}

TEST(Schema, NumberBounds) {
  Check({
      {R"({"type":"number","minimum":0})", {"0", "0.5", "17.25"}, {"-0.5", "-1"}},
      {R"({"type":"number","exclusiveMinimum":0})", {"0.5", "0.001", "3"}, {"0", "0.0", "-1"}},
      {R"({"type":"number","minimum":0,"maximum":1})",
       {"0", "0.999", "1", "1.0"},
       {"1.01", "2", "-0.1"}},
      {R"({"type":"number","minimum":0,"exclusiveMaximum":1})", {"0.99"}, {"1", "1.0"}},
      {R"({"type":"number","minimum":-2,"maximum":-1})",
       {"-2", "-2.0", "-1.5", "-1"},
       {"-2.1", "-0.9", "1.5", "0"}},
      {R"({"type":"number","exclusiveMinimum":-2,"exclusiveMaximum":2})",
       {"-1.9", "0", "1.99"},
       {"-2", "2", "2.0", "-2.0"}},
      {R"({"type":"number","minimum":5,"maximum":120})", {"5", "99.5", "120.00"}, {"4.9", "120.1"}},
      {R"({"type":"number","maximum":-10})", {"-10", "-10.5", "-11"}, {"-9.99", "0", "10"}},
  });
}

TEST(Schema, Objects) {
  Check({
      {R"({"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"boolean"}},
           "required":["b"]})",
       {R"({"b":1})", R"({"b":1,"a":true})"},
       {"{}", R"({"a":true})", R"({"a":true,"b":1})", R"({"b":1,"b":2})", R"({"b":1,"c":2})",
        R"({"b":1,})", R"({ "b":1})", R"({"b": 1})"}},
      {R"({"properties":{"a":{},"b":{},"c":{}}})",
       {"{}", R"({"a":1})", R"({"b":2})", R"({"c":3})", R"({"a":1,"c":3})",
        R"({"a":1,"b":2,"c":3})"},
       {R"({"c":3,"a":1})", R"({,"a":1})", R"({"a":1"b":2})", R"({"d":1})"}},
      {R"({"properties":{"a":{"type":"null"}},"additionalProperties":{"type":"integer"}})",
       {"{}", R"({"a":null})", R"({"x":1})", R"({"a":null,"x":1,"ab":2,"":3})",
        "{\"\xC3\xA9\":1,\"\\n\":2}"},
       {R"({"a":1})", R"({"x":1,"a":null})", R"({"\u0061":1})", R"({"x":null})", "{\"\xC3\":1}"}},
      {R"({"properties":{"ab":{},"abc":{},"é":{},"q\"":{}},"required":["ab","abc","é","q\""],
           "additionalProperties":true})",
       {"{\"ab\":1,\"abc\":2,\"\xC3\xA9\":3,\"q\\\"\":4,\"a\":5,\"abcd\":6,\"\xC3\xA8\":7,\"q\":"
        "8}"},
       {"{\"ab\":1,\"abc\":2,\"\xC3\xA9\":3,\"q\\\"\":4,\"\xC3\xA9\":5}",
        "{\"ab\":1,\"abc\":2,\"\xC3\xA9\":3,\"q\\\"\":4,\"q\\\"\":5}",
        "{\"ab\":1,\"abc\":2,\"\xC3\xA9\":3,\"q\\\"\":4,\"abc\":5}"}},
      {R"({"type":"object","additionalProperties":false})", {"{}"}, {R"({"a":1})"}},
      {R"({"type":"object"})", {"{}", R"({"a":1})"}, {"[]"}},
      {R"({"required":["x"],"additionalProperties":{"type":"integer"}})",
       {R"({"x":1})", R"({"x":1,"y":2})"},
       {"{}", R"({"y":2})", R"({"x":null})"}},
      {R"({"additionalProperties":{"type":"integer"},"minProperties":1,"maxProperties":2})",
       {R"({"x":1})", R"({"x":1,"y":2})"},
       {"{}", R"({"x":1,"y":2,"z":3})"}},
      {R"({"properties":{"a":false,"b":{}}})", {"{}", R"({"b":1})"}, {R"({"a":1})"}},
      {R"({"type":"object","maxProperties":0})", {"{}"}, {R"({"a":1})"}},
      {R"({"type":"object","minProperties":2})", {R"({"a":1,"b":2})"}, {"{}", R"({"a":1})"}},
  });
  Check({{R"({"properties":{"a":{"type":"integer"}}})",
          {R"({"a":1})", R"({"a":1,"z":2})", R"({"z":{"a":[]}})"},
          {R"({"a":"1"})", R"({"z":1,"a":2})"}}},
        {.strict = false});
  Check({{R"({"properties":{"a":{"type":"array","items":{"type":"integer"}},"b":{}}})",
          {R"({"a": [1, 2], "b": {"x": 1}})", R"({"b": []})"},
          {R"({"a":[1]})", R"({"a": [1,2]})", R"({"b": {"x":1}})"}}},
        {.spacing = Spacing::kSpaced});
}

TEST(Schema, Arrays) {
  Check({
      {R"({"type":"array"})", {"[]", "[1]", "[[],{}]"}, {"[1,]", "[", "[1 ,2]"}},
      {R"({"items":{"type":"integer"}})", {"[]", "[1]", "[1,2,3]"}, {"[null]", "[1,\"2\"]"}},
      {R"({"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":3})",
       {"[1,2]", "[1,2,3]"},
       {"[]", "[1]", "[1,2,3,4]"}},
      {R"({"type":"array","minItems":1})", {"[1]", "[{},[]]"}, {"[]"}},
      {R"({"type":"array","maxItems":0})", {"[]"}, {"[1]"}},
      {R"({"type":"array","maxItems":1})", {"[]", "[1]"}, {"[1,2]"}},
      {R"({"prefixItems":[{"type":"string"},{"type":"integer"}],"items":false})",
       {"[]", "[\"a\"]", "[\"a\",1]"},
       {"[1]", "[\"a\",1,2]", "[\"a\",\"b\"]"}},
      {R"({"prefixItems":[{"type":"string"},{"type":"integer"}],"items":{"type":"null"},
           "minItems":2,"maxItems":4})",
       {"[\"a\",1]", "[\"a\",1,null]", "[\"a\",1,null,null]"},
       {"[\"a\"]", "[\"a\",1,2]", "[\"a\",1,null,null,null]"}},
      {R"({"prefixItems":[{"const":1}],"minItems":3})", {"[1,{},2]"}, {"[1,2]", "[2,2,2]"}},
      {R"({"type":"array","items":{"type":"array","items":{"enum":[0,1]},"minItems":2,"maxItems":2},
           "minItems":2,"maxItems":2})",
       {"[[0,1],[1,0]]"},
       {"[[0,1]]", "[[0],[1,0]]", "[[0,1,1],[1,0]]"}},
  });
}

TEST(Schema, Choices) {
  Check({
      {R"({"anyOf":[{"type":"integer"},{"type":"string"}]})", {"1", "\"x\""}, {"null", "1.5"}},
      {R"({"oneOf":[{"const":1},{"const":2}]})", {"1", "2"}, {"3"}},
      {R"({"type":"object","properties":{"k":{"type":"string"}},"required":["k"],
           "anyOf":[{"properties":{"k":{"const":"a"},"x":{"type":"integer"}},"required":["x"]},
                    {"properties":{"k":{"const":"b"},"y":{"type":"null"}},"required":["y"]}]})",
       {R"({"k":"a","x":1})", R"({"k":"b","y":null})"},
       {R"({"k":"a","y":null})", R"({"k":"b","x":1})", R"({"k":"c"})", R"({"k":"a"})"}},
      {R"({"allOf":[{"properties":{"a":{"type":"integer"}},"required":["a"]},
                    {"properties":{"b":{"type":"string"}},"required":["b"]}]})",
       {R"({"a":1,"b":"x"})"},
       {R"({"a":1})", R"({"b":"x"})", R"({"a":1,"b":2})"}},
      {R"({"allOf":[{"type":["string","integer"]},{"type":["number","null"]}]})",
       {"1"},
       {"\"x\"", "null", "1.5"}},
      {R"({"allOf":[{"type":"integer","minimum":3},{"maximum":5},{"minimum":4}]})",
       {"4", "5"},
       {"3", "6"}},
      {R"({"allOf":[{"enum":[1,2,3]},{"enum":[2,3,4]},{"const":3}]})", {"3"}, {"2", "1"}},
      {R"({"allOf":[{"properties":{"a":{},"b":{}}},
                    {"properties":{"a":{"type":"null"}},"additionalProperties":false}]})",
       {"{}", R"({"a":null})"},
       {R"({"b":1})", R"({"a":1})"}},
      {R"({"allOf":[{"$ref":"#/$defs/base"},{"properties":{"y":{"type":"integer"}}}],
           "$defs":{"base":{"properties":{"x":{"type":"integer"}},"required":["x"]}}})",
       {R"({"x":1})", R"({"x":1,"y":2})"},
       {R"({"y":2})"}},
      {R"({"anyOf":[{"type":"string"}],"nullable":true})", {"null", "\"x\""}, {"1"}},
      {R"({"anyOf":[{"anyOf":[{"const":1},{"const":2}]},{"type":"null"}]})", {"1", "null"}, {"3"}},
      {R"({"anyOf":[{"const":1},{"const":2}],"oneOf":[{"const":2},{"const":3}]})",
       {"2"},
       {"1", "3"}},
  });
}

TEST(Schema, References) {
  Check({
      {R"({"$ref":"#/$defs/n","$defs":{"n":{"type":"integer"}}})", {"1"}, {"\"1\""}},
      {R"({"$ref":"#/definitions/a~1b~0c","definitions":{"a/b~c":{"const":1}}})", {"1"}, {"2"}},
      {R"({"type":"object","properties":{"v":{"type":"integer"},
           "next":{"anyOf":[{"type":"null"},{"$ref":"#"}]}},"required":["v","next"]})",
       {R"({"v":1,"next":null})", R"({"v":1,"next":{"v":2,"next":{"v":3,"next":null}}})"},
       {R"({"v":1,"next":{}})", R"({"v":1})"}},
      {R"({"$defs":{"tree":{"type":"object","properties":{"l":{"$ref":"#/$defs/tree"},
           "r":{"$ref":"#/$defs/tree"}}}},"$ref":"#/$defs/tree"})",
       {"{}", R"({"l":{"r":{}},"r":{"l":{"l":{}}}})"},
       {R"({"l":1})", R"({"r":{},"l":{}})"}},
      {R"({"properties":{"a":{"type":"integer"},"b":{"$ref":"#/properties/a"}}})",
       {R"({"a":1,"b":2})"},
       {R"({"b":"x"})"}},
      {R"({"prefixItems":[{"const":7},{"$ref":"#/prefixItems/0"}]})", {"[7,7]"}, {"[7,8]"}},
      {R"({"$ref":"#/$defs/s","description":"said beside","$defs":{"s":{"type":"string"}}})",
       {"\"x\""},
       {"1"}},
      {R"({"$ref":"#/$defs/s","maxLength":2,"$defs":{"s":{"type":"string"}}})",
       {"\"xy\""},
       {"\"xyz\"", "1"}},
      // A branch that can never end is not begun.
      {R"({"anyOf":[{"type":"null"},{"$ref":"#/$defs/loop"}],
           "$defs":{"loop":{"type":"array","items":{"$ref":"#/$defs/loop"},"minItems":1}}})",
       {"null"},
       {"[", "[[]]", "[[[[]]]]"}},
      {R"({"type":"array","items":{"$ref":"#"}})", {"[]", "[[],[[]]]"}, {"[1]"}},
  });
}

TEST(Schema, NestingStopsWhereNothingReadsIt) {
  const auto automaton = AutomatonOf("{}");
  const auto nested = [](std::size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_TRUE(Matches(automaton, nested(kMaxNesting)));
  EXPECT_FALSE(Matches(automaton, nested(kMaxNesting + 1)));
  // What has to follow is taken into account: the innermost list needs one more object.
  const auto list = AutomatonOf(R"({"$ref":"#/$defs/l","$defs":{"l":{"type":"array",
      "items":{"anyOf":[{"$ref":"#/$defs/l"},{"type":"object","maxProperties":0}]},
      "minItems":1}}})");
  Matcher m(list);
  EXPECT_TRUE(m.Accept(std::string(kMaxNesting - 1, '[')));
  EXPECT_FALSE(m.CanAccept('['));
  EXPECT_TRUE(m.Accept("{}" + std::string(kMaxNesting - 1, ']')));
  EXPECT_TRUE(m.MayEnd());
  EXPECT_FALSE(m.MayGoOn());
}

TEST(Schema, RefusalsNamePlaceAndKeyword) {
  const std::pair<const char*, std::vector<const char*>> rows[] = {
      {R"({"properties":{"a":{"type":"string","format":"color"}}})",
       {"#/properties/a/format", "color", "uuid"}},
      {R"({"not":{}})", {"#/not", "not supported"}},
      {R"({"if":{},"then":{}})", {"#/if"}},
      {R"({"items":{"uniqueItems":true}})", {"#/items/uniqueItems"}},
      {R"({"patternProperties":{}})", {"#/patternProperties"}},
      {R"({"type":"number","multipleOf":2})", {"#/multipleOf"}},
      {R"({"type":"number","minimum":0.5})", {"#/minimum", "whole"}},
      {R"({"anyOf":[{"type":"foo"}]})", {"#/anyOf/0/type", "foo"}},
      {R"({"type":3})", {"#/type"}},
      {R"({"type":"string","minLength":-1})", {"#/minLength"}},
      {R"({"type":"string","maxLength":1e10})", {"#/maxLength"}},
      {R"({"type":"string","maxLength":"3"})", {"#/maxLength"}},
      {R"({"properties":[]})", {"#/properties"}},
      {R"({"required":"a"})", {"#/required"}},
      {R"({"anyOf":[]})", {"#/anyOf"}},
      {R"({"allOf":{}})", {"#/allOf"}},
      {R"({"enum":3})", {"#/enum"}},
      {R"({"enum":[1],"minimum":0})", {"#/minimum", "enum"}},
      {R"({"items":[{}]})", {"#/items", "prefixItems"}},
      {R"({"$ref":"#/$defs/x"})", {"#/$ref", "not in the schema"}},
      {R"({"$ref":"http://example.org/s"})", {"#/$ref", "example.org"}},
      {R"({"$ref":3})", {"#/$ref"}},
      {R"({"properties":{"a/b":5}})", {"#/properties/a~1b", "expected a schema"}},
      {R"_({"pattern":"(?=a)"})_", {"look-ahead"}},
      {R"_({"pattern":"(?<!a)"})_", {"look-behind"}},
      {R"({"pattern":"(a)\\1"})", {"\\1"}},
      {R"({"pattern":"\\bx"})", {"\\b"}},
      {R"({"pattern":"\\p{L}"})", {"\\p"}},
      {R"_({"pattern":"a(^b)"})_", {"anchor"}},
      {R"({"pattern":"a{2000}"})", {"1000"}},
      {R"({"pattern":"(a"})", {"without )"}},
      {R"_({"pattern":"a)"})_", {"unexpected )"}},
      {R"({"pattern":"[b-a]"})", {"wrong order"}},
      {R"({"pattern":"*"})", {"nothing to repeat"}},
      {R"({"pattern":"a**"})", {"nothing to repeat"}},
      {R"({"pattern":"[a"})", {"without ]"}},
      {R"({"pattern":"\\"})", {"backslash"}},
      {R"({"pattern":"^(ab)+$","maxLength":5})", {"pattern together with"}},
      {R"({"pattern":"a","format":"date"})", {"#/format"}},
      {R"({"properties":{"a":{},"b":{}},"minProperties":1})", {"#/minProperties"}},
      {R"({"allOf":[{"pattern":"a"},{"pattern":"b"}]})", {"pattern", "at once"}},
      {R"([])", {"expected a schema"}},
      {R"(3)", {"expected a schema"}},
      {R"(false)", {"no text"}},
      {R"({"enum":[]})", {"no text"}},
      {R"({"type":"integer","minimum":3,"maximum":2})", {"no text"}},
      {R"({"type":"array","minItems":3,"maxItems":2})", {"no text"}},
      {R"({"required":["a"],"additionalProperties":false})", {"no text"}},
      {R"({"type":"array","items":{"$ref":"#"},"minItems":1})", {"no text"}},
      {"{", {"not valid JSON"}},
      {R"({"a":1,"a":2})", {"duplicate key"}},
  };
  for (const auto& [schema, words] : rows) {
    const std::string error = ErrorOf(schema);
    EXPECT_FALSE(error.empty()) << schema;
    EXPECT_THAT(error, HasSubstr("schema: ")) << schema;
    EXPECT_EQ(error.find('\n'), error.npos) << error;
    for (const char* word : words) EXPECT_THAT(error, HasSubstr(word)) << schema;
  }
  EXPECT_THAT(ErrorOf(std::string_view("{}\0{", 4)), HasSubstr("NUL byte"));
}

TEST(Schema, Cycles) {
  // SV-11 and its relatives.
  for (const char* schema :
       {R"({"$ref":"#/$defs/A","$defs":{"A":{"$ref":"#/$defs/A"}}})", R"({"$ref":"#"})",
        R"({"$ref":"#/$defs/A","$defs":{"A":{"$ref":"#/$defs/B"},"B":{"$ref":"#/$defs/A"}}})",
        R"({"anyOf":[{"type":"null"},{"$ref":"#"}]})", R"({"allOf":[{"$ref":"#"}]})",
        R"({"$ref":"#","type":"object"})",
        R"({"$ref":"#/$defs/A","$defs":{"A":{"allOf":[{"$ref":"#/$defs/A"},{"type":"object"}]}}})",
        R"({"type":"object","anyOf":[{"$ref":"#"}]})"}) {
    EXPECT_THAT(ErrorOf(schema), HasSubstr("refers to itself")) << schema;
  }
  const auto result = CompileJsonSchema(R"({"$ref":"#"})", {}, "schema");
  EXPECT_EQ(result.error().code, Code::kInvalidArgument);
}

}  // namespace
}  // namespace k3::grammar
