#include "k3/chat/parse.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "k3/base/rng.h"

namespace k3::chat {
namespace {

using nlohmann::json;

const Tokenizer& Tiny() {
  static const Tokenizer tokenizer = [] {
    return std::move(Tokenizer::Load(K3_SOURCE_DIR "/tests/golden/tiny-k3")).value();
  }();
  return tokenizer;
}

struct Reply {
  std::string reasoning, content;
  std::vector<ToolCall> calls;
  std::string finish;
  bool operator==(const Reply&) const = default;
};

void PrintTo(const Reply& r, std::ostream* out) {
  *out << "[" << r.reasoning << "|" << r.content << "|" << r.finish;
  for (const ToolCall& c : r.calls) *out << "|" << c.id << " " << c.name << c.arguments;
  *out << "]";
}

void Join(const ReplyDelta& d, Reply& reply) {
  reply.reasoning += d.reasoning;
  reply.content += d.content;
  for (const ToolCallDelta& c : d.tool_calls) {
    if (c.index == reply.calls.size()) reply.calls.emplace_back();
    ASSERT_EQ(c.index, reply.calls.size() - 1);
    EXPECT_EQ(c.id.empty(), c.name.empty());
    reply.calls.back().id += c.id;
    reply.calls.back().name += c.name;
    reply.calls.back().arguments += c.arguments;
  }
}

/// "<o>" "<c>" "<s>" "<e>" are the control tokens of a piece list.
std::vector<json> Pieces(std::string_view text) {
  std::vector<json> out;
  while (!text.empty()) {
    const std::string_view marks[] = {"<o>", "<c>", "<s>", "<e>"};
    const std::string_view names[] = {kOpen, kClose, kSep, kEnd};
    bool found = false;
    for (std::size_t i = 0; i < 4 && !found; ++i) {
      if (!text.starts_with(marks[i])) continue;
      out.push_back({"ctl", names[i]});
      text.remove_prefix(3);
      found = true;
    }
    if (found) continue;
    std::size_t end = 1;
    while (end < text.size() &&
           !(text[end] == '<' && end + 2 < text.size() && text[end + 2] == '>')) {
      ++end;
    }
    out.push_back({"text", text.substr(0, end)});
    text.remove_prefix(end);
  }
  return out;
}

/// Feeds text through the tokenizer (cut_seed 0), whole (19), or cut at random bytes.
Reply Parse(const std::vector<json>& pieces, Section inside, bool ended, std::uint64_t cut_seed,
            std::vector<Segment>* closing = nullptr) {
  ReplyParser parser(Tiny(), *FindMarkup(Tiny()), inside);
  Reply reply;
  Rng rng(cut_seed);
  for (const json& piece : pieces) {
    const auto text = piece[1].get<std::string>();
    if (piece[0] == "ctl") {
      Join(parser.Push(*Tiny().SpecialId(text)), reply);
    } else if (cut_seed == 0) {
      for (const TokenId id : Tiny().Encode(text)) Join(parser.Push(id), reply);
    } else {
      std::string_view rest = text;
      while (!rest.empty()) {
        const auto n =
            cut_seed == 19 ? rest.size() : std::min<std::size_t>(rest.size(), 1 + rng.Next() % 7);
        Join(parser.PushText(rest.substr(0, n)), reply);
        rest.remove_prefix(n);
      }
    }
  }
  if (closing != nullptr) *closing = parser.Closing();
  Join(parser.Finish(ended), reply);
  reply.finish = parser.finish_reason();
  const Message& m = parser.message();
  EXPECT_EQ(reply.reasoning, m.reasoning_content);
  EXPECT_EQ(reply.content, m.Text());
  EXPECT_EQ(reply.calls, m.tool_calls);
  return reply;
}

/// However it is cut, the same comes out.
Reply Parse(std::string_view text, Section inside, bool ended = true) {
  const auto pieces = Pieces(text);
  const Reply reply = Parse(pieces, inside, ended, 0);
  for (std::uint64_t seed = 1; seed < 20; ++seed) {
    EXPECT_EQ(Parse(pieces, inside, ended, seed), reply) << "seed " << seed;
  }
  return reply;
}

TEST(ReplyParser, ServerReplies) {
  std::ifstream in(K3_SOURCE_DIR "/tests/cases/server/xtml_replies.json");
  const json file = json::parse(in);
  ASSERT_EQ(file["rows"].size(), 6u);
  for (const json& row : file["rows"]) {
    SCOPED_TRACE(row["name"].get<std::string>());
    const bool cut = row.value("limit_reached", false);
    const auto inside = row["inside"] == "think" ? Section::kThink : Section::kResponse;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const Reply reply = Parse(row["reply"].get<std::vector<json>>(), inside, !cut, seed);
      const json& expected = row["expect"];
      EXPECT_EQ(reply.reasoning, expected.value("reasoning_content", ""));
      EXPECT_EQ(reply.content, expected["content"].get<std::string>());
      EXPECT_EQ(reply.finish, expected["finish_reason"].get<std::string>());
      ASSERT_EQ(reply.calls.size(), expected["tool_calls"].size());
      for (std::size_t i = 0; i < reply.calls.size(); ++i) {
        EXPECT_EQ(reply.calls[i].name, expected["tool_calls"][i]["name"].get<std::string>());
        EXPECT_EQ(json::parse(reply.calls[i].arguments), expected["tool_calls"][i]["arguments"]);
      }
    }
  }
}

TEST(ReplyParser, IsTheInverseOfRender) {
  Message m;
  m.role = Role::kAssistant;
  m.reasoning_content = "hm <|sep|> é";
  m.content = {"see 漢字 <|close|>response"};
  m.tool_calls = {
      {"call_0", "a \"b\" & &amp;", R"({"x": 1.5, "s": "two\nlines \"q\"", "z": null})"},
      {"call_1", "raw", "not json"},
      {"call_2", "empty", "{}"}};
  ChatOptions options;
  options.generation_prompt = false;
  const auto segments = Render(std::span(&m, 1), options, nullptr);
  ASSERT_TRUE(segments.ok());
  std::vector<json> pieces;
  const auto prompt = GenerationPrompt(true).size();
  for (std::size_t i = prompt; i < segments->size(); ++i) {
    pieces.push_back({(*segments)[i].is_markup ? "ctl" : "text", (*segments)[i].text});
  }
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Reply reply = Parse(pieces, Section::kThink, true, seed);
    EXPECT_EQ(reply, (Reply{m.reasoning_content, m.content[0], m.tool_calls, "tool_calls"}));
  }
}

TEST(ReplyParser, MissingClosingsAreRecovered) {
  EXPECT_EQ(Parse("hm<o>response<s>yes<c>response<s><c>message<s><e>", Section::kThink),
            (Reply{"hm", "yes", {}, "stop"}));
  EXPECT_EQ(Parse("hm<e>", Section::kThink), (Reply{"hm", "", {}, "stop"}));
  EXPECT_EQ(Parse("hm<c>think<o>response<s>yes<c>response<c>message<e>", Section::kThink),
            (Reply{"hm", "yes", {}, "stop"}));
  for (const char* close : {"", "<c>", "<c>think", "<c>think<s>"}) {
    EXPECT_EQ(Parse("hm" + std::string(close) + "<o>tools<s><o>call tool=\"f\" index=\"1\"<s>" +
                        "<c>call<s><c>tools<s><c>message<s><e>",
                    Section::kThink),
              (Reply{"hm", "", {{"call_0", "f", "{}"}}, "tool_calls"}))
        << close;
  }
  EXPECT_EQ(Parse("yes<e>no", Section::kResponse), (Reply{"", "yes", {}, "stop"}));
  EXPECT_EQ(Parse("hm<c>think<s> plain answer <c>message<s><e>", Section::kThink),
            (Reply{"hm", " plain answer ", {}, "stop"}));
  EXPECT_EQ(Parse("hm<c>think<s> \n <o>response<s>a<c>response<s>\n tail", Section::kThink),
            (Reply{"hm", "a", {}, "stop"}));
  const std::string call = "<o>tools<s><o>call tool=\"f\" index=\"1\"<s>";
  EXPECT_EQ(Parse(call + "<o>argument key=\"k\" type=\"string\"<s>v<e>", Section::kResponse),
            (Reply{"", "", {{"call_0", "f", R"({"k": "v"})"}}, "tool_calls"}));
  EXPECT_EQ(Parse("<o>call tool=\"f\"<s><o>argument key=\"a\" type=\"number\"<s>1"
                  "<o>argument key=\"b\" type=\"null\"<s>null<o>call tool=\"g\"<s><c>tools<s><e>",
                  Section::kResponse),
            (Reply{"",
                   "",
                   {{"call_0", "f", R"({"a": 1, "b": null})"}, {"call_1", "g", "{}"}},
                   "tool_calls"}));
}

TEST(ReplyParser, BadTypesAndNamesAndTags) {
  const auto arguments = [](const std::string& elements) {
    const Reply r =
        Parse("<o>tools<s><o>call tool=\"f\"<s>" + elements + "<c>call<s><e>", Section::kResponse);
    return r.calls.size() == 1 ? r.calls[0].arguments : "?";
  };
  const auto typed = [&](const std::string& type, const std::string& value) {
    return arguments("<o>argument key=\"k\" type=\"" + type + "\"<s>" + value + "<c>argument<s>");
  };
  EXPECT_EQ(typed("number", "1e999"), R"({"k": "1e999"})");
  EXPECT_EQ(typed("number", "true"), R"({"k": "true"})");
  EXPECT_EQ(typed("object", "{\"a\":"), R"({"k": "{\"a\":"})");
  EXPECT_EQ(typed("array", "[1, {}]"), R"({"k": [1, {}]})");
  EXPECT_EQ(typed("boolean", ""), R"({"k": ""})");
  EXPECT_EQ(typed("colour", "red"), R"({"k": "red"})");
  EXPECT_EQ(arguments("<o>argument<s>v<c>argument<s>"), R"({"": "v"})");
  EXPECT_EQ(arguments("<o>argument key=\"a\"<s>1<o>argument key=\"a\"<s>2<o>json<s>{}"),
            R"({"a": "1"})");
  EXPECT_EQ(arguments("<o>json type=\"object\"<s>{\"q\": 1}<c>json<s><o>argument key=\"a\"<s>1"),
            R"({"q": 1})");
  EXPECT_EQ(
      Parse("<o>call index=\"1\"<s><o>argument key=\"k\"<s>v<c>argument<s><e>", Section::kResponse),
      (Reply{"", "", {}, "stop"}));
  EXPECT_EQ(Parse("a<o>b<s>c<c>b<s>d<c><c>think<s><s>e<o>argument<s>f<e>", Section::kResponse),
            (Reply{"", "acdef", {}, "stop"}));
  EXPECT_EQ(Parse("a<o>message role=\"user\"<s>forged<e>", Section::kResponse),
            (Reply{"", "a", {}, "stop"}));
}

TEST(ReplyParser, CutOffRepliesStayAsTheyAre) {
  EXPECT_EQ(Parse("hm<c>thi", Section::kThink, false), (Reply{"hm", "", {}, "length"}));
  EXPECT_EQ(Parse("<o>call tool=\"f\"<s><o>argument key=\"k\" type=\"string\"<s>v",
                  Section::kResponse, false),
            (Reply{"", "", {{"call_0", "f", R"({"k": "v)"}}, "length"}));
}

TEST(ReplyParser, HalfCharactersAreReplaced) {
  EXPECT_EQ(Parse("a\xe6\xbc<c>response<s>", Section::kResponse).content, "a\xef\xbf\xbd");
  EXPECT_EQ(Parse("a\xe6\xbc", Section::kResponse, false).content, "a\xef\xbf\xbd");
}

TEST(ReplyParser, ClosingMakesTheMessageWhole) {
  const std::string whole[] = {
      "hm<c>think<s><o>response<s>yes<c>response<s><o>tools<s><o>call tool=\"f\" index=\"1\"<s>"
      "<o>argument key=\"k\" "
      "type=\"string\"<s>v<c>argument<s><c>call<s><c>tools<s><c>message<s><e>",
      "hm<c>think<s><o>response<s>yes<c>response<s><c>message<s><e>"};
  for (const std::string& text : whole) {
    const auto pieces = Pieces(text);
    for (std::size_t n = 0; n <= pieces.size(); ++n) {
      auto cut = std::vector<json>(pieces.begin(), pieces.begin() + static_cast<long>(n));
      std::vector<Segment> closing;
      const Reply before = Parse(cut, Section::kThink, true, 0, &closing);
      for (const Segment& s : closing) cut.push_back({s.is_markup ? "ctl" : "text", s.text});
      std::vector<Segment> rest;
      const Reply after = Parse(cut, Section::kThink, true, 0, &rest);
      EXPECT_TRUE(rest.empty()) << n;
      EXPECT_EQ(before, after) << n;
      if (n + 1 >= pieces.size()) {
        EXPECT_EQ(cut, pieces);
      }
    }
  }
}

TEST(ReplyParser, LongArgumentsComeWhole) {
  std::string text;
  while (text.size() < 200000) text += "a line < b && \"c\"\n\t\\ <|close|>argument<|sep|> é\n";
  const std::string call = "<o>argument key=\"k\" type=\"string\"<s>";
  auto pieces = Pieces("<o>tools<s><o>call tool=\"f\" index=\"1\"<s>" + call);
  pieces.push_back({"text", text});
  for (const json& p : Pieces("<c>argument<s><c>call<s><o>call tool=\"g\" index=\"2\"<s>" + call +
                              "x\n<c>argument<s><c>call<s><c>tools<s><c>message<s><e>")) {
    pieces.push_back(p);
  }
  const Reply reply = Parse(pieces, Section::kResponse, true, 0);
  ASSERT_EQ(reply.calls.size(), 2u);
  EXPECT_EQ(json::parse(reply.calls[0].arguments), json({{"k", text}}));
  EXPECT_EQ(json::parse(reply.calls[1].arguments), json({{"k", "x\n"}}));
  for (const std::uint64_t seed : {1u, 19u}) {
    EXPECT_EQ(Parse(pieces, Section::kResponse, true, seed), reply);
  }
}

TEST(ReplyParser, AnyMixtureOfTagsIsTheSameForEveryCut) {
  const char* kParts[] = {"<o>",
                          "<c>",
                          "<s>",
                          "<e>",
                          "think",
                          "response",
                          "tools",
                          "call tool=\"f\"",
                          "argument key=\"k\" type=\"number\"",
                          "json",
                          "message",
                          " ",
                          "x\n",
                          "\xc3",
                          "\xa9",
                          "1",
                          "<|sep|>"};
  Rng rng(5);
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (std::uint64_t n = rng.Next() % 40; n > 0; --n) text += kParts[rng.Next() % 17];
    SCOPED_TRACE(text);
    Parse(text, round % 2 == 0 ? Section::kThink : Section::kResponse, round % 3 == 0);
  }
}

TEST(ReplyParser, OtherSpecialTokensAreNoText) {
  ReplyParser parser(Tiny(), FindMarkup(Tiny()).value(), Section::kResponse);
  for (const char* name : {"[EOT]", "[BOS]", "<|media_begin|>"}) {
    const auto id = Tiny().SpecialId(name);
    ASSERT_TRUE(id.has_value()) << name;
    EXPECT_EQ(parser.Push(*id).content, "") << name;
  }
  EXPECT_EQ(parser.message().Text(), "");
}

}  // namespace
}  // namespace k3::chat
