// The first byte chooses what the rest is: a rank file, a tokenizer_config.json, or text to encode.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "k3/tokenizer/tokenizer.h"

namespace {

void Require(bool ok) {
  if (!ok) std::abort();
}

/// "base64 rank" of a token of one to three bytes.
std::string RankLine(std::string_view token, int rank) {
  constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::uint32_t v = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    v = v << 8 | (i < token.size() ? static_cast<unsigned char>(token[i]) : 0u);
  }
  std::string out;
  for (std::size_t i = 0; i < 4; ++i) {
    out.push_back(i <= token.size() ? kAlphabet[v >> (18 - 6 * i) & 63u] : '=');
  }
  return out + " " + std::to_string(rank) + "\n";
}

const std::string& BuiltInRanks() {
  static const std::string ranks = [] {
    std::string text;
    int rank = 0;
    for (; rank < 256; ++rank) text += RankLine(std::string(1, static_cast<char>(rank)), rank);
    for (const char* token : {"aa", "  ", "ab", "he", "the", " a", "\n\n", "\xE4\xB8", "aaa", "'s",
                              "12", "123", "ba", " th", "\xE4\xB8\xAD", "\r\n"}) {
      text += RankLine(token, rank++);
    }
    return text;
  }();
  return ranks;
}

const k3::Tokenizer& BuiltIn() {
  static const auto tokenizer = k3::Tokenizer::Parse(BuiltInRanks(), "", "built-in");
  Require(tokenizer.ok());
  return *tokenizer;
}

void RoundTrip(const k3::Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.Encode(text);
  for (const k3::TokenId id : ids)
    Require(tokenizer.Bytes(id).has_value() && !tokenizer.IsSpecial(id));
  Require(tokenizer.Decode(ids) == text);
}

void CheckText(std::string_view text) {
  RoundTrip(BuiltIn(), text);
  std::size_t at = 0;
  for (const std::string_view piece : k3::SplitPieces(text)) {
    Require(!piece.empty() && piece.data() == text.data() + at);
    at += piece.size();
  }
  Require(at == text.size());
  // The stream gives the same text however the bytes are cut, and never anything but UTF-8.
  k3::Utf8Stream whole, bytewise;
  std::string a = whole.Push(text), b;
  a += whole.Finish();
  for (std::size_t i = 0; i < text.size(); ++i) b += bytewise.Push(text.substr(i, 1));
  b += bytewise.Finish();
  Require(a == b);
  k3::Utf8Stream again;
  Require(again.Push(a) == a && again.Finish().empty());
}

void CheckMessage(const std::string& message) {
  Require(message.rfind("input: ", 0) == 0 && message.find('\n') == std::string::npos);
  Require(message.size() < 1000);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 'r' || data[0] == 'R') {  // 'R': the rest comes behind the built-in ranks
    const std::string ranks = (data[0] == 'R' ? BuiltInRanks() : "") + std::string(input);
    const auto tokenizer = k3::Tokenizer::Parse(ranks, "", "input");
    if (tokenizer.ok()) {
      RoundTrip(*tokenizer, input);
    } else {
      CheckMessage(tokenizer.message());
    }
  } else if (data[0] == 'c') {
    const auto tokenizer = k3::Tokenizer::Parse(BuiltInRanks(), input, "input");
    if (tokenizer.ok()) {
      const auto id = static_cast<k3::TokenId>(tokenizer->n_ranks());
      Require(tokenizer->SpecialId(*tokenizer->Bytes(id)) == id);
    } else {
      CheckMessage(tokenizer.message());
    }
  } else {
    CheckText(input);
  }
  return 0;
}
