#include "k3/serve/token_text.h"

#include <fmt/format.h>

#include "k3/tokenizer/utf8.h"

namespace k3::serve {
namespace {

Json Entry(TokenId id, double logprob, const Tokenizer& tokenizer) {
  const std::string_view bytes = tokenizer.Bytes(id).value_or("");
  Json list = Json::array();
  for (const char c : bytes) list.push_back(static_cast<unsigned char>(c));
  return {
      {"token", std::string(bytes)}, {"logprob", LogprobJson(logprob)}, {"bytes", std::move(list)}};
}

}  // namespace

Json ChatLogprobs(const std::vector<SampleResult>& tokens, const Tokenizer& tokenizer) {
  Json content = Json::array();
  for (const SampleResult& t : tokens) {
    Json one = Entry(t.token, t.logprob, tokenizer);
    one["top_logprobs"] = Json::array();
    for (const TokenLogprob& other : t.top) {
      one["top_logprobs"].push_back(Entry(other.id, other.logprob, tokenizer));
    }
    content.push_back(std::move(one));
  }
  return content;
}

std::string TokenName(TokenId id, const Tokenizer& tokenizer) {
  const std::string_view bytes = tokenizer.Bytes(id).value_or("");
  if (utf8::ValidPrefix(bytes) == bytes.size()) return std::string(bytes);
  std::string name = "bytes:";
  for (const char c : bytes) name += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return name;
}

}  // namespace k3::serve
