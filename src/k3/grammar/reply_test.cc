#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "k3/base/rng.h"
#include "k3/chat/parse.h"
#include "k3/chat/render.h"
#include "k3/grammar/constraint.h"
#include "k3/grammar/test_util.h"

namespace k3::grammar {
namespace {

using chat::Message;
using chat::Section;
using nlohmann::json;
using ::testing::HasSubstr;

const chat::Markup& Markup() {
  static const chat::Markup markup = *chat::FindMarkup(TinyTokenizer());
  return markup;
}

constexpr char kBook[] =
    R"({"type":"object","properties":{"city":{"type":"string"},"nights":{"type":"integer",
        "minimum":1},"note":{"anyOf":[{"type":"null"},{"type":"string","maxLength":3}]},
        "guests":{"type":"array","items":{"type":"string"}},"kind":{"enum":["a","b c"]}},
        "required":["city","nights"],"additionalProperties":false})";

ReplyOptions Options(Section inside = Section::kThink) {
  ReplyOptions options;
  options.inside = inside;
  options.tools = {{"book", kBook, true}, {"q \"&x", "", false}, {"any", "{}", false}};
  return options;
}

std::unique_ptr<TokenConstraint> Make(const ReplyOptions& options) {
  auto made = ReplyConstraint::Create(options, TinyVocabulary(), Markup());
  EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.message());
  return std::move(made).value();
}

/// "<o>", "<c>", "<s>", "<e>" are the control tokens.
std::vector<TokenId> Tokens(std::string_view text) {
  std::vector<TokenId> ids;
  while (!text.empty()) {
    const std::pair<std::string_view, TokenId> marks[] = {{"<o>", Markup().open},
                                                          {"<c>", Markup().close},
                                                          {"<s>", Markup().sep},
                                                          {"<e>", Markup().end}};
    bool control = false;
    for (const auto& [mark, id] : marks) {
      if (control || !text.starts_with(mark)) continue;
      ids.push_back(id);
      text.remove_prefix(mark.size());
      control = true;
    }
    if (control) continue;
    std::size_t end = std::min(text.find("<", 1), text.size());
    const auto part = TinyTokenizer().Encode(text.substr(0, end));
    ids.insert(ids.end(), part.begin(), part.end());
    text.remove_prefix(end);
  }
  return ids;
}

/// How many tokens are accepted, and whether that is all and the reply is over.
bool Accepts(const ReplyOptions& options, std::string_view reply) {
  const auto constraint = Make(options);
  std::vector<std::uint64_t> bits(TinyVocabulary()->mask_words());
  for (const TokenId id : Tokens(reply)) {
    constraint->Allowed(bits);
    const auto i = static_cast<std::size_t>(id);
    const bool allowed = (bits[i / 64] >> (i % 64) & 1) != 0;
    const bool accepted = constraint->Accept(id);
    EXPECT_EQ(allowed, accepted) << reply;
    if (!accepted) return false;
  }
  return constraint->finished();
}

TEST(ReplyConstraint, Text) {
  ReplyOptions o;
  EXPECT_TRUE(Accepts(o, "hm<c>think<s><o>response<s>4<c>response<s><c>message<s><e>"));
  EXPECT_TRUE(Accepts(o, "<c>think<s><o>response<s><c>response<s><c>message<s><e>"));
  EXPECT_FALSE(Accepts(o, "hm<c>think<s>4"));
  EXPECT_FALSE(Accepts(o, "hm<e>"));
  EXPECT_FALSE(Accepts(o, "hm<o>response<s>"));
  EXPECT_FALSE(Accepts(o, "hm<c>think<s><o>response<s>4<c>response<s><o>tools<s>"));
  o.inside = Section::kResponse;
  EXPECT_TRUE(Accepts(o, "4<c>response<s><c>message<s><e>"));
  EXPECT_FALSE(Accepts(o, "4<c>think<s>"));
}

TEST(ReplyConstraint, CallsWhenTheModelLikes) {
  ReplyOptions o = Options(Section::kResponse);
  const std::string end = "<c>tools<s><c>message<s><e>";
  const std::string call =
      "<o>call tool=\"book\" index=\"1\"<s><o>argument key=\"city\" type=\"string\"<s>Oslo \"\n{"
      "<c>argument<s><o>argument key=\"nights\" type=\"number\"<s>3<c>argument<s>";
  EXPECT_TRUE(Accepts(o, "Yes<c>response<s><c>message<s><e>"));
  EXPECT_TRUE(Accepts(o, "I call<c>response<s><o>tools<s>" + call + "<c>call<s>" + end));
  EXPECT_TRUE(
      Accepts(o, "<c>response<s><o>tools<s>" + call +
                     "<o>argument key=\"note\" type=\"null\"<s>null<c>argument<s>"
                     "<o>argument key=\"guests\" type=\"array\"<s>[\"A\", \"B\"]<c>argument<s>"
                     "<o>argument key=\"kind\" type=\"string\"<s>b c<c>argument<s>"
                     "<c>call<s><o>call tool=\"q &quot;&amp;x\" index=\"2\"<s><c>call<s>" +
                     end));
  const std::string in = "<c>response<s><o>tools<s>";
  // No call, an unknown tool, a wrong index, a missing or unknown argument, a wrong type or value.
  EXPECT_FALSE(Accepts(o, in + end));
  EXPECT_FALSE(Accepts(o, in + "<o>call tool=\"boo\" index=\"1\"<s>"));
  EXPECT_FALSE(Accepts(o, in + "<o>call tool=\"book\" index=\"2\"<s>"));
  EXPECT_FALSE(Accepts(o, in + "<o>call tool=\"book\" index=\"1\"<s><c>call<s>"));
  EXPECT_FALSE(Accepts(o, in + call + "<o>argument key=\"x\" type=\"null\"<s>"));
  EXPECT_FALSE(Accepts(o, in + call + "<o>argument key=\"note\" type=\"string\"<s>four<c>"));
  EXPECT_FALSE(Accepts(o, in + call + "<o>argument key=\"note\" type=\"number\"<s>"));
  EXPECT_FALSE(Accepts(o, in + call + "<o>argument key=\"kind\" type=\"string\"<s>c"));
  EXPECT_FALSE(Accepts(o, in + call + "<o>argument key=\"guests\" type=\"array\"<s>[1"));
  EXPECT_FALSE(Accepts(o, in + "<o>call tool=\"book\" index=\"1\"<s><o>argument key=\"city\" "
                               "type=\"string\"<s><c>argument<s><o>argument key=\"nights\" "
                               "type=\"number\"<s>0<c>"));
  o.tool_choice = chat::ToolChoice::kNone;
  EXPECT_FALSE(Accepts(o, in));
  o.tool_choice = chat::ToolChoice::kAuto;
  o.parallel_calls = false;
  EXPECT_FALSE(Accepts(o, in + call + "<c>call<s><o>"));
}

TEST(ReplyConstraint, ARequiredCallComesAfterThinking) {
  ReplyOptions o = Options();
  o.tool_choice = chat::ToolChoice::kRequired;
  const std::string start = "I think.<c>think<s><o>response<s><c>response<s>";
  const std::string tools = "<o>tools<s><o>call tool=\"any\" index=\"1\"<s><c>call<s><c>tools<s>";
  EXPECT_TRUE(Accepts(o, start + tools + "<c>message<s><e>"));
  EXPECT_FALSE(Accepts(o, start + "<c>message"));
  EXPECT_FALSE(Accepts(o, "I think.<c>think<s><o>response<s>no"));
  o.forced_tool = "book";
  EXPECT_FALSE(Accepts(o, start + tools));
  o.inside = Section::kResponse;
  EXPECT_TRUE(Accepts(
      o,
      "<c>response<s><o>tools<s><o>call tool=\"book\" index=\"1\"<s><o>argument key=\"city\" "
      "type=\"string\"<s>x<c>argument<s><o>argument key=\"nights\" "
      "type=\"number\"<s>1<c>argument<s>"
      "<c>call<s><c>tools<s><c>message<s><e>"));
}

TEST(ReplyConstraint, ResponseFormat) {
  ReplyOptions o;
  o.response_format = chat::ResponseFormat::kJsonSchema;
  o.response_schema = R"({"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]})";
  const std::string start = "{\"not\": json}<c>think<s><o>response<s>";
  EXPECT_TRUE(Accepts(o, start + "{\"a\":1}<c>response<s><c>message<s><e>"));
  EXPECT_FALSE(Accepts(o, start + "{\"a\":<c>"));
  EXPECT_FALSE(Accepts(o, start + "<c>response<s>"));
  EXPECT_FALSE(Accepts(o, start + "{\"a\":1}<c>response<s><o>tools"));
  EXPECT_FALSE(Accepts(o, start + "{\"a\": 1"));
  o.tools = Options().tools;
  EXPECT_TRUE(Accepts(o, start + "{\"a\":1}<c>response<s><c>message<s><e>"));
  EXPECT_TRUE(Accepts(o, start + "<c>response<s><o>tools<s><o>call tool=\"any\" index=\"1\"<s>"
                                 "<c>call<s><c>tools<s><c>message<s><e>"));
  EXPECT_FALSE(Accepts(o, start + "<c>response<s><c>message"));
  o.response_format = chat::ResponseFormat::kJsonObject;
  EXPECT_TRUE(Accepts(o, start + "{\"z\":[1,2]}<c>response<s><c>message<s><e>"));
  EXPECT_FALSE(Accepts(o, start + "[1]"));
}

TEST(ReplyConstraint, FreeArgumentNames) {
  ReplyOptions o = Options(Section::kResponse);
  o.tools = {{"t", R"({"properties":{"a":{"type":"integer"}}})", false}};
  const std::string in = "<c>response<s><o>tools<s><o>call tool=\"t\" index=\"1\"<s>";
  const std::string end = "<c>argument<s><c>call<s><c>tools<s><c>message<s><e>";
  EXPECT_TRUE(Accepts(o, in + "<o>argument key=\"ab&quot;\" type=\"boolean\"<s>true" + end));
  EXPECT_TRUE(Accepts(o, in + "<o>argument key=\"a\" type=\"number\"<s>1" + end));
  EXPECT_FALSE(Accepts(o, in + "<o>argument key=\"a\" type=\"string\"<s>"));
  EXPECT_FALSE(Accepts(o, in + "<o>argument key=\"\" type=\"string\"<s>"));
  EXPECT_FALSE(Accepts(o, in + "<o>argument key=\"a&b\" type=\"string\"<s>"));
}

/// What the format writes for a message is what the constraint allows.
TEST(ReplyConstraint, AcceptsWhatRenderWrites) {
  Message m;
  m.role = chat::Role::kAssistant;
  m.reasoning_content = "hm <|sep|> \xC3\xA9";
  m.content = {"see \xE6\xBC\xA2 <|close|>response"};
  m.tool_calls = {
      {"call_0", "book",
       R"({"city":"two\nlines","nights":12,"note":null,"guests":["a","b"],"kind":"a"})"},
      {"call_1", "q \"&x", "{}"},
      {"call_2", "any", R"({"x":{"y":[1,2,{"z":-1.5}]},"a & \"b\"":true,"n":1e22})"}};
  chat::ChatOptions options;
  options.generation_prompt = false;
  const auto segments = chat::Render(std::span(&m, 1), options, nullptr);
  ASSERT_TRUE(segments.ok());
  const auto ids = chat::Encode(*segments, TinyTokenizer());
  const auto prompt = chat::Encode(chat::GenerationPrompt(true), TinyTokenizer());
  ASSERT_TRUE(ids.ok() && prompt.ok());
  const auto constraint = Make(Options());
  for (std::size_t i = prompt->size(); i < ids->size(); ++i) {
    ASSERT_TRUE(constraint->Accept((*ids)[i])) << TinyTokenizer().Decode(
        {ids->begin(), ids->begin() + static_cast<std::ptrdiff_t>(i) + 1});
  }
  EXPECT_TRUE(constraint->finished());
}

TEST(ReplyConstraint, RandomWalksGiveCallsThatParse) {
  ReplyOptions o = Options();
  o.tool_choice = chat::ToolChoice::kRequired;
  const auto prototype = Make(o);
  Rng rng(5);
  std::vector<std::uint64_t> bits(TinyVocabulary()->mask_words());
  int calls = 0;
  for (int walk = 0; walk < 100; ++walk) {
    const auto constraint = prototype->Clone();
    chat::ReplyParser parser(TinyTokenizer(), Markup(), Section::kThink);
    int n = 0;
    for (; n < 3000 && !constraint->finished(); ++n) {
      constraint->Allowed(bits);
      std::vector<TokenId> ids, controls;
      for (TokenId id = 0; id < static_cast<TokenId>(TinyVocabulary()->vocab_size()); ++id) {
        const auto i = static_cast<std::size_t>(id);
        if ((bits[i / 64] >> (i % 64) & 1) == 0) continue;
        ids.push_back(id);
        if (TinyTokenizer().IsSpecial(id)) controls.push_back(id);
      }
      ASSERT_FALSE(ids.empty());
      TokenId id = ids[rng.Next() % ids.size()];
      if (!controls.empty() && rng.Next() % 4 == 0) id = controls[rng.Next() % controls.size()];
      if (n > 60) {  // out of everything
        std::vector<TokenId> closing = controls;
        for (const TokenId t : ids) {
          const auto bytes = TinyVocabulary()->Bytes(t);
          if (bytes == "]" || bytes == "}" || bytes == "\"") closing.push_back(t);
        }
        if (!closing.empty()) id = closing[rng.Next() % closing.size()];
      }
      ASSERT_TRUE(constraint->Accept(id));
      parser.Push(id);
    }
    ASSERT_TRUE(constraint->finished()) << walk;
    parser.Finish(true);
    EXPECT_EQ(parser.finish_reason(), "tool_calls");
    for (const auto& call : parser.message().tool_calls) {
      const json arguments = json::parse(call.arguments, nullptr, false);
      ASSERT_TRUE(arguments.is_object()) << call.arguments;
      ++calls;
      if (call.name != "book") continue;
      EXPECT_TRUE(arguments.at("city").is_string());
      EXPECT_GE(arguments.at("nights").get<std::int64_t>(), 1);
    }
  }
  EXPECT_GE(calls, 100);
}

TEST(ReplyConstraint, Refusals) {
  const auto error = [](const ReplyOptions& o) {
    const auto made = ReplyConstraint::Create(o, TinyVocabulary(), Markup());
    return made.ok() ? std::string() : made.message();
  };
  ReplyOptions o = Options();
  o.tools[0].parameters = R"({"properties":{"a":{"type":"string","format":"color"}}})";
  EXPECT_THAT(error(o), HasSubstr("tools[0].function.parameters: #/properties/a/format"));
  o.tools[0].parameters = R"({"type":"string"})";
  EXPECT_THAT(error(o), HasSubstr("#/type: the parameters of a tool are an object"));
  o.tools[0].parameters = R"({"$ref":"#"})";
  EXPECT_THAT(error(o), HasSubstr("refers to itself"));
  o.tools[0].parameters = "\"x\"";
  EXPECT_THAT(error(o), HasSubstr("#: expected a schema"));
  o.tools[0].parameters = "[";
  EXPECT_THAT(error(o), HasSubstr("tools[0].function.parameters: not valid JSON"));
  o.tools.clear();
  EXPECT_EQ(error(o), "");
  o.tool_choice = chat::ToolChoice::kRequired;
  EXPECT_THAT(error(o), HasSubstr("no tools"));
  o = Options();
  o.tool_choice = chat::ToolChoice::kRequired;
  o.forced_tool = "nothing";
  EXPECT_THAT(error(o), HasSubstr("\"nothing\" is not among the tools"));
  o = {};
  o.response_format = chat::ResponseFormat::kJsonSchema;
  o.response_schema = R"({"not":{}})";
  EXPECT_THAT(error(o), HasSubstr("response_format.json_schema.schema: #/not"));
}

TEST(ReplyConstraint, BooleanParameters) {
  ReplyOptions o = Options(Section::kResponse);
  o.tools = {{"t", "true", true}, {"u", "false", true}};
  const std::string in = "<c>response<s><o>tools<s><o>call tool=";
  EXPECT_TRUE(Accepts(o, in + "\"t\" index=\"1\"<s><o>argument key=\"x\" type=\"null\"<s>null"
                              "<c>argument<s><c>call<s><c>tools<s><c>message<s><e>"));
  EXPECT_FALSE(Accepts(o, in + "\"u"));  // it can never be called
}

TEST(ReplyConstraint, ManyTools) {
  ReplyOptions o;
  for (int i = 0; i < 128; ++i) {
    o.tools.push_back({"tool_number_" + std::to_string(i), kBook, false});
  }
  const auto made = ReplyConstraint::Create(o, TinyVocabulary(), Markup());
  ASSERT_TRUE(made.ok()) << made.message();
}

TEST(ReplyTools, FromDeclarations) {
  const chat::ToolDeclaration declarations[] = {
      {"a", R"({"function":{"name":"a","parameters":{"type":"object"},"strict":true}})"},
      {"b", R"({"function":{"name":"b"}})"}};
  const auto tools = ReplyTools(declarations);
  ASSERT_TRUE(tools.ok());
  EXPECT_EQ((*tools)[0].parameters, R"({"type":"object"})");
  EXPECT_TRUE((*tools)[0].strict);
  EXPECT_EQ((*tools)[1].parameters, "");
  EXPECT_FALSE((*tools)[1].strict);
}

}  // namespace
}  // namespace k3::grammar
