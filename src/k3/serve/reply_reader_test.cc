#include "k3/serve/reply_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "k3/serve/serve_test_util.h"

namespace k3::serve {
namespace {

using nlohmann::json;

struct Collected {
  std::string reasoning, content;
  std::vector<chat::ToolCall> calls;
  std::string finish;
};

void Add(Collected& c, const Piece& p) {
  c.reasoning += p.delta.reasoning;
  c.content += p.delta.content;
  for (const auto& d : p.delta.tool_calls) {
    if (d.index >= c.calls.size()) c.calls.resize(d.index + 1);
    if (!d.id.empty()) c.calls[d.index] = {d.id, d.name, ""};
    c.calls[d.index].arguments += d.arguments;
  }
}

Collected Read(ReplyReader::Options options, const std::vector<TokenId>& ids, EngineFinish finish) {
  const Tokenizer tokenizer = test::ChatTokenizer();
  ServedModel model;
  model.tokenizer = &tokenizer;
  model.markup = chat::FindMarkup(tokenizer);
  auto reader = ReplyReader::Create(model, std::move(options));
  EXPECT_TRUE(reader.ok());
  Collected c;
  for (const TokenId id : ids) {
    if (id == test::kEnd) break;  // the engine ends there
    if (reader->done()) break;
    Add(c, reader->Push({id, -1, {}}));
  }
  Add(c, reader->Finish(reader->done() ? EngineFinish::kStop : finish));
  c.finish = reader->finish_reason();
  return c;
}

TEST(ReplyReader, RepliesOfTheCases) {
  std::ifstream file(K3_SOURCE_DIR "/tests/cases/server/xtml_replies.json");
  const json rows = json::parse(file)["rows"];
  ASSERT_GE(rows.size(), 6u);
  for (const json& row : rows) {
    std::vector<TokenId> ids;
    for (const json& part : row["reply"]) {
      const std::string text = part[1];
      if (part[0] == "ctl") {
        ids.push_back(*test::ChatTokenizer().SpecialId(text));
      } else {
        for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
      }
    }
    ReplyReader::Options o;
    o.chat = true;
    o.thinking = row["inside"] == "think";
    const bool limit = row.value("limit_reached", false);
    const auto c = Read(o, ids, limit ? EngineFinish::kLength : EngineFinish::kStop);
    const json& e = row["expect"];
    EXPECT_EQ(c.content, e["content"]) << row["name"];
    EXPECT_EQ(c.reasoning, e.value("reasoning_content", "")) << row["name"];
    EXPECT_EQ(c.finish, e["finish_reason"]) << row["name"];
    ASSERT_EQ(c.calls.size(), e["tool_calls"].size()) << row["name"];
    for (std::size_t i = 0; i < c.calls.size(); ++i) {
      EXPECT_EQ(c.calls[i].name, e["tool_calls"][i]["name"]);
      EXPECT_EQ(json::parse(c.calls[i].arguments), e["tool_calls"][i]["arguments"]);
    }
  }
}

TEST(ReplyReader, StopTextInsideTheReasoningEndsTheReply) {
  ReplyReader::Options o;
  o.chat = o.thinking = true;
  o.stop = {"two"};
  const auto c = Read(o, test::Ids("one two three{close}think{sep}"), EngineFinish::kStop);
  EXPECT_EQ(c.reasoning, "one ");
  EXPECT_EQ(c.content, "");
  EXPECT_EQ(c.finish, "stop");
}

TEST(ReplyReader, StopTextDoesNotSpanReasoningAndAnswer) {
  ReplyReader::Options o;
  o.chat = o.thinking = true;
  o.stop = {"ab"};
  const auto c =
      Read(o, test::Ids("a{close}think{sep}{open}response{sep}b"), EngineFinish::kLength);
  EXPECT_EQ(c.reasoning, "a");
  EXPECT_EQ(c.content, "b");
  EXPECT_EQ(c.finish, "length");
}

TEST(ReplyReader, HalfAStopTextComesAtTheEnd) {
  ReplyReader::Options o;
  o.stop = {"stop!"};
  const auto c = Read(o, test::Ids("do not stop"), EngineFinish::kStop);
  EXPECT_EQ(c.content, "do not stop");
}

TEST(ReplyReader, CutCharacterBecomesAReplacement) {
  const auto c = Read({}, {0xE2, 0x82}, EngineFinish::kLength);
  EXPECT_EQ(c.content, "\xEF\xBF\xBD");
}

TEST(ReplyReader, ThoughtsThatAreCutOffAreNoAnswer) {
  ReplyReader::Options o;
  o.chat = o.thinking = true;
  const auto c = Read(o, test::Ids("well, "), EngineFinish::kLength);
  EXPECT_EQ(c.reasoning, "well, ");
  EXPECT_EQ(c.content, "");
  EXPECT_EQ(c.finish, "length");
}

TEST(ReplyReader, RefusesAnEmptyStopText) {
  const Tokenizer tokenizer = test::ChatTokenizer();
  ServedModel model;
  model.tokenizer = &tokenizer;
  ReplyReader::Options o;
  o.stop = {""};
  EXPECT_FALSE(ReplyReader::Create(model, o).ok());
}

}  // namespace
}  // namespace k3::serve
