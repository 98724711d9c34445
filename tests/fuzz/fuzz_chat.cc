// The reply parser and the message parser on arbitrary bytes. The first byte chooses which.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "k3/chat/openai.h"
#include "k3/chat/parse.h"
#include "k3/io/json.h"

namespace {

using k3::chat::Message;
using k3::chat::ReplyDelta;
using k3::chat::ReplyParser;

/// Bytes 0 to 255 as tokens, then the control tokens.
const k3::Tokenizer& ByteTokenizer() {
  static const k3::Tokenizer tokenizer = [] {
    static constexpr char kDigits[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string ranks;
    for (unsigned b = 0; b < 256; ++b) {
      ranks += {kDigits[b >> 2], kDigits[(b & 3) << 4], '=', '=', ' '};
      ranks += std::to_string(b) + "\n";
    }
    constexpr std::string_view kConfig =
        R"({"added_tokens_decoder":{"256":{"content":"<|open|>"},"257":{"content":"<|close|>"},)"
        R"("258":{"content":"<|sep|>"},"259":{"content":"<|end_of_msg|>"}}})";
    return std::move(k3::Tokenizer::Parse(ranks, kConfig, "fuzz")).value();
  }();
  return tokenizer;
}

struct Joined {
  std::string reasoning, content, calls;
  void Add(const ReplyDelta& d) {
    reasoning += d.reasoning;
    content += d.content;
    for (const auto& c : d.tool_calls) {
      if (!c.id.empty()) calls += "\n" + c.id + " " + c.name + " ";
      calls += c.arguments;
    }
  }
};

/// The bytes 1 to 4 stand for control tokens. `by_token`: one token at a time, else whole texts.
std::string Run(std::string_view reply, bool think, bool ended, bool by_token) {
  ReplyParser parser(ByteTokenizer(), *k3::chat::FindMarkup(ByteTokenizer()),
                     think ? k3::chat::Section::kThink : k3::chat::Section::kResponse);
  Joined joined;
  while (!reply.empty()) {
    const auto first = static_cast<unsigned char>(reply[0]);
    std::size_t n = 1;
    if (first >= 1 && first <= 4) {
      joined.Add(parser.Push(255 + first));
    } else if (by_token) {
      joined.Add(parser.Push(first));
    } else {
      n = std::min(reply.size(), reply.find_first_of("\1\2\3\4"));
      joined.Add(parser.PushText(reply.substr(0, n)));
    }
    reply.remove_prefix(n);
  }
  joined.Add(parser.Finish(ended));
  const Message& m = parser.message();
  if (m.reasoning_content != joined.reasoning || m.Text() != joined.content) __builtin_trap();
  for (const auto& call : m.tool_calls) {
    if (joined.calls.find(call.arguments) == std::string::npos) __builtin_trap();
  }
  // A reply survives being written down and read back: text is UTF-8.
  std::vector<Message> back;
  const std::string text = k3::chat::MessagesText(std::span(&m, 1));
  const auto error = k3::chat::ParseMessages(nlohmann::json::parse(text), back);
  if (!error.has_value() && back[0].Text() != m.Text()) __builtin_trap();
  return joined.reasoning + "\n|" + joined.content + "\n|" + joined.calls;
}

void Messages(std::string_view text) {
  const auto json = k3::ParseJson(text, "fuzz");
  if (!json.ok()) return;
  std::vector<Message> messages;
  k3::chat::ChatOptions options;
  if (const auto error = k3::chat::ParseChatFields(*json, messages, options)) {
    if (error->message.empty() || error->message.find('\n') != std::string::npos) __builtin_trap();
    return;
  }
  const k3::chat::Bodies bodies{"{}", "{}", "{}", "a", "b", "c", "{}"};
  const auto segments = k3::chat::Render(messages, options, &bodies);
  if (!segments.ok()) __builtin_trap();  // what the parser accepts can be rendered
  if (!k3::chat::Encode(*segments, ByteTokenizer()).ok()) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data + 1), size - 1);
  if (data[0] % 2 == 1) {
    Messages(rest);
    return 0;
  }
  const bool think = (data[0] & 2) != 0, ended = (data[0] & 4) != 0;
  if (Run(rest, think, ended, true) != Run(rest, think, ended, false)) __builtin_trap();
  return 0;
}
