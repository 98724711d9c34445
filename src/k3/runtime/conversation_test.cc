#include "k3/runtime/conversation.h"

#include <gtest/gtest.h>

#include <atomic>

#include "k3/chat/render.h"
#include "support/fake_model.h"

namespace k3 {
namespace {

using test::ByteTokenizer;
using test::FakeModel;

/// Bytes, and the four control tokens as 256 to 259: open, end, close, sep.
Tokenizer ChatTokenizer() {
  static constexpr char kDigits[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string ranks;
  for (unsigned b = 0; b < 256; ++b) {
    ranks += {kDigits[b >> 2], kDigits[(b & 3) << 4], '=', '=', ' '};
    ranks += std::to_string(b) + "\n";
  }
  return std::move(Tokenizer::Parse(ranks,
                                    R"({"added_tokens_decoder":{"256":{"content":"<|open|>"},
    "257":{"content":"<|end_of_msg|>"},"258":{"content":"<|close|>"},
    "259":{"content":"<|sep|>"}}})",
                                    "test"))
      .value();
}

/// The last token decides the next: t -> t + step, from `start` on a separator; 257 after `last`.
class Counter final : public TokenModel {
 public:
  std::int64_t vocab() const override { return 260; }
  std::int64_t max_positions() const override { return max; }
  std::uint64_t fingerprint() const override { return 1; }
  MathMode math() const override { return MathMode::kExact; }
  ModelState NewState() const override { return ModelState(config); }
  Status Forward(std::span<const SequenceInput> batch, std::vector<float>& logits) override {
    for (const SequenceInput& in : batch) {
      read += static_cast<std::int64_t>(in.tokens.size());
      in.state->Advance(static_cast<std::int64_t>(in.tokens.size()));
      logits.assign(260, 0.f);
      const TokenId t = in.tokens.back();
      // Both 'a' and 'A' can begin; a small edge for 'a'.
      if (t > 256 || t == '\n' || t == '?') {
        logits['a'] = 50.1f;
        logits['A'] = 50.f;
      } else if (t == 'd' || t == 'D') {
        logits[257] = 90.f;
      } else {
        logits[static_cast<std::size_t>(t) + 1] = 90.f;
      }
    }
    return fail;
  }
  std::int64_t max = 5000, read = 0;
  ModelConfig config;
  Status fail;
};

struct Heard {
  std::string reasoning, content;
  ReplyEvents Events() {
    ReplyEvents e;
    e.on_reasoning = [this](std::string_view s) { return reasoning += s, Status(); };
    e.on_content = [this](std::string_view s) { return content += s, Status(); };
    return e;
  }
};

ConversationOptions Greedy(bool chat) {
  ConversationOptions o;
  o.chat_format = chat;
  o.thinking = false;
  o.generate.sampling.temperature = 0;
  if (!chat) o.generate.eos = {257};
  return o;
}

/// The tokens that rendering the messages gives, with the reply prompt left out.
std::vector<TokenId> Rendered(const Conversation& c, const Tokenizer& t, bool thinking) {
  chat::ChatOptions o;
  o.thinking = thinking;
  o.generation_prompt = false;
  return *chat::Encode(*chat::Render(c.messages(), o, nullptr), t);
}

TEST(Conversation, SequenceIsWhatRenderingGives) {
  const Tokenizer t = ChatTokenizer();
  for (const bool thinking : {false, true}) {
    Counter model;
    auto options = Greedy(true);
    options.thinking = thinking;
    auto c = Conversation::Create(model, t, options);
    ASSERT_TRUE(c.ok());
    ASSERT_TRUE(c->SetSystem("s").ok());
    Heard heard;
    for (const char* q : {"one", "two <|close|>"}) {
      const auto reply = c->Send(q, heard.Events());
      ASSERT_TRUE(reply.ok()) << reply.message();
      EXPECT_EQ(reply->finish, FinishReason::kStop);
    }
    EXPECT_EQ(thinking ? heard.reasoning : heard.content, "abcdabcd");
    EXPECT_EQ(c->messages().size(), 5u);
    EXPECT_EQ(c->state().tokens, Rendered(*c, t, thinking));
  }
}

TEST(Conversation, UndoAndRetryReadNothingAgain) {
  const Tokenizer t = ChatTokenizer();
  Counter model;
  auto c = Conversation::Create(model, t, Greedy(true));
  ASSERT_TRUE(c.ok());
  ASSERT_TRUE(c->Send("one", {}).ok());
  const auto after_one = c->state().tokens;
  ASSERT_TRUE(c->Send("two", {}).ok());
  const auto after_two = c->state().tokens;
  model.read = 0;
  Heard heard;
  const auto again = c->Retry(heard.Events());
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->prompt_tokens_read, 1);
  EXPECT_EQ(model.read, 5);  // the pending token and the four of the reply
  EXPECT_EQ(heard.content, "abcd");
  EXPECT_EQ(c->state().tokens, after_two);
  model.read = 0;
  ASSERT_TRUE(c->Undo());
  EXPECT_EQ(model.read, 0);
  EXPECT_EQ(c->state().tokens, after_one);
  EXPECT_EQ(c->messages().size(), 2u);
  ASSERT_TRUE(c->Undo());
  EXPECT_TRUE(c->state().tokens.empty());
  EXPECT_FALSE(c->Undo());
  EXPECT_FALSE(c->Retry({}).ok());
}

TEST(Conversation, UndoBeyondTheSnapshotsReadsAgain) {
  const Tokenizer t = ChatTokenizer();
  Counter model;
  auto options = Greedy(true);
  options.snapshots = 1;
  auto c = Conversation::Create(model, t, options);
  ASSERT_TRUE(c->Send("one", {}).ok());
  const auto after_one = c->state().tokens;
  ASSERT_TRUE(c->Send("two", {}).ok());
  const auto after_two = c->state().tokens;
  ASSERT_TRUE(c->Send("three", {}).ok());
  ASSERT_TRUE(c->Undo());
  EXPECT_EQ(c->state().tokens, after_two);
  ASSERT_TRUE(c->Undo());
  EXPECT_EQ(c->state().tokens, after_one);
  EXPECT_EQ(c->state().pending().size(), after_one.size());
  ASSERT_TRUE(c->Retry({}).ok());
  EXPECT_EQ(c->state().tokens, after_one);
}

TEST(Conversation, RetryGoesOnInTheRandomStream) {
  const Tokenizer t = ChatTokenizer();
  Counter model;
  auto options = Greedy(true);
  options.generate.sampling.temperature = 1;
  auto c = Conversation::Create(model, t, options);
  Heard heard;
  ASSERT_TRUE(c->Send("q", heard.Events()).ok());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(c->Retry(heard.Events()).ok());
  EXPECT_NE(heard.content.find("abcd"), std::string::npos);
  EXPECT_NE(heard.content.find("ABCD"), std::string::npos);
}

TEST(Conversation, UndoGoesOnInTheRandomStream) {
  const Tokenizer t = ChatTokenizer();
  Counter model;
  auto options = Greedy(true);
  options.generate.sampling.temperature = 1;
  auto c = Conversation::Create(model, t, options);
  Heard heard;
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(c->Send("q", heard.Events()).ok());
    ASSERT_TRUE(c->Undo());
  }
  EXPECT_NE(heard.content.find("abcd"), std::string::npos);
  EXPECT_NE(heard.content.find("ABCD"), std::string::npos);
}

TEST(Conversation, SystemTextAndLoadKeepWhatWasSaid) {
  const Tokenizer t = ChatTokenizer();
  Counter model;
  auto c = Conversation::Create(model, t, Greedy(true));
  ASSERT_TRUE(c->Send("one", {}).ok());
  ASSERT_TRUE(c->SetSystem("new").ok());
  EXPECT_EQ(c->messages().size(), 3u);
  EXPECT_EQ(c->state().tokens, Rendered(*c, t, false));
  ASSERT_TRUE(c->Send("two", {}).ok());
  EXPECT_EQ(c->state().tokens, Rendered(*c, t, false));
  const auto messages = c->messages();
  const auto tokens = c->state().tokens;
  auto other = Conversation::Create(model, t, Greedy(true));
  ASSERT_TRUE(other->Load(messages).ok());
  EXPECT_EQ(other->state().tokens, tokens);
  EXPECT_EQ(other->n_turns(), 2u);
  ASSERT_TRUE(c->Reset().ok());
  EXPECT_EQ(c->messages().size(), 1u);
  std::vector<chat::Message> bad(1);
  bad[0].role = chat::Role::kTool;
  EXPECT_FALSE(other->Load(bad).ok());
  EXPECT_EQ(other->state().tokens, tokens);
  auto plain = Conversation::Create(model, t, Greedy(false));
  EXPECT_FALSE(plain->SetSystem("x").ok());
}

TEST(Conversation, PlainTextGoesOnWithLineEndsBetween) {
  const Tokenizer t = ChatTokenizer();
  Counter model;
  auto options = Greedy(false);
  options.bos = 256;
  auto c = Conversation::Create(model, t, options);
  Heard heard;
  ASSERT_TRUE(c->Send("x?", heard.Events()).ok());
  ASSERT_TRUE(c->Send("y?", heard.Events()).ok());
  EXPECT_EQ(heard.content, "abcdabcd");
  std::vector<TokenId> expected = test::Bytes("x?abcd\ny?abcd");
  expected.insert(expected.begin(), 256);
  EXPECT_EQ(c->state().tokens, expected);
  ASSERT_TRUE(c->SetSystem("").ok() == false);
  ASSERT_TRUE(c->Load(c->messages()).ok());
  EXPECT_EQ(c->state().tokens, expected);
}

TEST(Conversation, FailureAndCancelLeaveItAsItWas) {
  const Tokenizer t = ChatTokenizer();
  Counter model;
  std::atomic<bool> cancel{false};
  auto options = Greedy(true);
  options.generate.cancel = &cancel;
  auto c = Conversation::Create(model, t, options);
  ASSERT_TRUE(c->Send("one", {}).ok());
  const auto tokens = c->state().tokens;
  model.fail = Error{Code::kNumeric, "broken"};
  EXPECT_FALSE(c->Send("two", {}).ok());
  model.fail = Status();
  EXPECT_EQ(c->state().tokens, tokens);
  model.max = static_cast<std::int64_t>(tokens.size()) + 5;
  EXPECT_FALSE(c->Send("two", {}).ok());
  model.max = 5000;
  EXPECT_EQ(c->state().tokens, tokens);
  cancel = true;
  const auto stopped = c->Send("two", {});
  ASSERT_TRUE(stopped.ok());
  EXPECT_EQ(stopped->finish, FinishReason::kCancelled);
  EXPECT_EQ(c->state().tokens, tokens);
  EXPECT_EQ(c->messages().size(), 2u);
  cancel = false;
  ReplyEvents stop_early;
  stop_early.on_content = [&](std::string_view) { return cancel = true, Status(); };
  ASSERT_TRUE(c->Send("two", stop_early).ok());
  EXPECT_EQ(c->messages().back().Text(), "a");
  EXPECT_EQ(c->state().tokens, Rendered(*c, t, false)) << "the cut reply was closed";
}

TEST(Conversation, RetryCancelledBeforeItsFirstTokenKeepsTheOldReply) {
  const Tokenizer t = ChatTokenizer();
  Counter model;
  std::atomic<bool> cancel{false};
  for (const bool chat : {true, false}) {
    auto options = Greedy(chat);
    options.generate.cancel = &cancel;
    auto c = Conversation::Create(model, t, options);
    ASSERT_TRUE(c->Send("one?", {}).ok());
    const std::string reply = c->messages().back().Text();
    ASSERT_FALSE(reply.empty());
    cancel = true;
    EXPECT_EQ(c->Retry({})->finish, FinishReason::kCancelled);
    cancel = false;
    ASSERT_EQ(c->messages().size(), 2u);
    EXPECT_EQ(c->messages().back().Text(), reply);
    EXPECT_TRUE(c->Send("two?", {}).ok());
  }
}

TEST(Conversation, PlainTextRefusesWhatOnlyTheChatFormatCanSay) {
  const Tokenizer t = ChatTokenizer();
  Counter model;
  auto options = Greedy(false);
  options.effort = chat::Effort::kLow;
  EXPECT_NE(Conversation::Create(model, t, options).message().find("effort"), std::string::npos);
  auto c = Conversation::Create(model, t, Greedy(false));
  ASSERT_TRUE(c->Send("one?", {}).ok());
  chat::Message system, user, call;
  system.role = chat::Role::kSystem;
  call.role = chat::Role::kAssistant;
  call.tool_calls.emplace_back();
  EXPECT_EQ(c->Load({system}).message().substr(0, 29), "messages[0]: found a system m");
  EXPECT_EQ(c->Load({user, call}).message().substr(0, 29), "messages[1]: found a tool cal");
  EXPECT_EQ(c->messages().size(), 2u);
  EXPECT_TRUE(c->Load({user}).ok());
}

TEST(Conversation, ChatFormatNeedsItsTokensAndEffortItsText) {
  Counter model;
  const Tokenizer bytes = ByteTokenizer();
  EXPECT_FALSE(Conversation::Create(model, bytes, Greedy(true)).ok());
  EXPECT_TRUE(Conversation::Create(model, bytes, Greedy(false)).ok());
  auto options = Greedy(true);
  options.thinking = true;
  options.effort = chat::Effort::kLow;
  const Tokenizer t = ChatTokenizer();
  EXPECT_FALSE(Conversation::Create(model, t, options).ok());
  options.bodies = chat::Bodies{"{}", "{}", "think {}", "a", "b", "c", "{}"};
  const auto c = Conversation::Create(model, t, options);
  ASSERT_TRUE(c.ok());
  EXPECT_NE(t.Decode(c->state().tokens).find("think low"), std::string::npos);
}

}  // namespace
}  // namespace k3
