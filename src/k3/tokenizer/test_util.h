// Helpers of the tokenizer's tests. Not part of the library.
#pragma once

#include <cstdint>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace k3 {

inline std::string ReadText(const std::string& path) {
  std::ifstream in(std::string(K3_SOURCE_DIR "/") + path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

inline nlohmann::json ReadJson(const std::string& path) {
  return nlohmann::json::parse(ReadText(path));
}

/// A member of the file's object, by value: a loop over `ReadJson(path)[key]` would run over a
/// document that is already gone.
inline nlohmann::json ReadJson(const std::string& path, const char* key) {
  return ReadJson(path).at(key);
}

inline std::string FromHex(std::string_view hex) {
  std::string out;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    out.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  return out;
}

inline std::string ToHex(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    out.push_back(kDigits[static_cast<unsigned char>(c) >> 4]);
    out.push_back(kDigits[static_cast<unsigned char>(c) & 15]);
  }
  return out;
}

/// Encodes any value below 0x110000, surrogates too.
inline std::string ToUtf8(std::uint32_t c) {
  const auto tail = [c](int shift) { return static_cast<char>(0x80u | ((c >> shift) & 0x3Fu)); };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xC0u | c >> 6), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xE0u | c >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xF0u | c >> 18), tail(12), tail(6), tail(0)};
}

inline std::string ToBase64(std::string_view s) {
  constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < s.size(); i += 3) {
    std::uint32_t v = 0;
    for (std::size_t j = 0; j < 3; ++j) {
      v = v << 8 | (i + j < s.size() ? static_cast<unsigned char>(s[i + j]) : 0u);
    }
    for (std::size_t j = 0; j < 4; ++j) {
      out.push_back(i + j <= s.size() ? kAlphabet[v >> (18 - 6 * j) & 63u] : '=');
    }
  }
  return out;
}

/// One line of a rank file.
inline std::string RankLine(std::string_view token, std::size_t rank) {
  return ToBase64(token) + " " + std::to_string(rank) + "\n";
}

/// The 256 single bytes as ranks 0..255.
inline std::string ByteRanks() {
  std::string out;
  for (std::size_t b = 0; b < 256; ++b) out += RankLine(std::string(1, static_cast<char>(b)), b);
  return out;
}

}  // namespace k3
