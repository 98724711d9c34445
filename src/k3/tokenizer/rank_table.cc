#include "k3/tokenizer/rank_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>

namespace k3 {
namespace {

constexpr std::size_t kMaxLine = (RankTable::kMaxTokenBytes + 2) / 3 * 4 + 16;
/// A look-up may pass this many slots. Honest files stay below 100; one whose tokens were chosen to
/// collide is refused instead of loading for hours.
constexpr std::size_t kMaxProbe = 4096;

/// One line of the file: the token's bytes are arena[offset, offset + length).
struct Line {
  std::uint32_t rank, offset, length;
};

std::uint64_t Load64(const char* p) {
  std::uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}

std::uint64_t Mix(std::uint64_t a, std::uint64_t b) {
  a = (a ^ (b * 0x9E3779B97F4A7C15ull)) * 0xD6E8FEB86659FD93ull;
  return a ^ (a >> 32);
}

std::uint64_t Hash(std::string_view s) {
  const std::size_t n = s.size();
  std::uint64_t h = n * 0xBF58476D1CE4E5B9ull;
  if (n >= 8) {
    for (std::size_t i = 0; i + 8 < n; i += 8) h = Mix(h, Load64(s.data() + i));
    return Mix(h, Load64(s.data() + n - 8));
  }
  std::uint64_t tail = 0;
  for (std::size_t i = 0; i < n; ++i) tail = tail << 8 | static_cast<unsigned char>(s[i]);
  return Mix(h, tail);
}

constexpr std::array<std::int8_t, 256> MakeBase64() {
  std::array<std::int8_t, 256> t{};
  for (auto& v : t) v = -1;
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (std::size_t i = 0; i < kAlphabet.size(); ++i) {
    t[static_cast<unsigned char>(kAlphabet[i])] = static_cast<std::int8_t>(i);
  }
  return t;
}
constexpr std::array<std::int8_t, 256> kBase64 = MakeBase64();

/// Appends the decoded bytes; false unless `s` is the one padded standard form of some bytes.
bool AppendBase64(std::string_view s, std::string& out) {
  if (s.empty() || s.size() % 4 != 0) return false;
  std::size_t pad = s.back() != '=' ? 0 : s[s.size() - 2] != '=' ? 1 : 2;
  const std::size_t digits = s.size() - pad;
  std::uint32_t bits = 0;
  int held = 0;
  for (std::size_t i = 0; i < digits; ++i) {
    const int v = kBase64[static_cast<unsigned char>(s[i])];
    if (v < 0) return false;
    bits = bits << 6 | static_cast<std::uint32_t>(v);
    held += 6;
    if (held >= 8) {
      held -= 8;
      out.push_back(static_cast<char>(bits >> held & 0xFFu));
    }
  }
  return (bits & ((1u << held) - 1u)) == 0;
}

/// Untrusted bytes as printable text, shortened.
std::string Shown(std::string_view s) {
  std::string out = "\"";
  for (const char c : s.substr(0, 40)) {
    const auto u = static_cast<unsigned char>(c);
    if (u >= 0x20 && u < 0x7F && c != '"' && c != '\\') {
      out.push_back(c);
    } else {
      out += fmt::format("\\x{:02x}", u);
    }
  }
  return out + (s.size() > 40 ? "...\"" : "\"");
}

Error Corrupt(std::string_view where, const std::string& what) {
  return Error{Code::kCorrupt, fmt::format("{}: {}", where, what)};
}

/// Parses one line into `arena`; a message when it is malformed.
std::optional<std::string> ParseLine(std::string_view line, std::string& arena, Line& out) {
  if (line.back() == '\r') return "line ends in CR LF, expected LF";
  if (line.size() > kMaxLine) {
    return fmt::format("line of {} bytes, at most {} expected", line.size(), kMaxLine);
  }
  const std::size_t space = line.find(' ');
  if (space == std::string_view::npos) {
    return fmt::format("found {}, expected \"base64 rank\"", Shown(line));
  }
  const std::string_view code = line.substr(0, space), number = line.substr(space + 1);
  out.offset = static_cast<std::uint32_t>(arena.size());
  if (!AppendBase64(code, arena)) return fmt::format("{} is not base64", Shown(code));
  out.length = static_cast<std::uint32_t>(arena.size()) - out.offset;
  if (out.length > RankTable::kMaxTokenBytes) {
    return fmt::format("token of {} bytes, at most {} expected", out.length,
                       RankTable::kMaxTokenBytes);
  }
  const char* end = number.data() + number.size();
  const auto [stop, error] = std::from_chars(number.data(), end, out.rank);
  if (error != std::errc() || stop != end || out.rank > 0x3FFFFFFF) {
    return fmt::format("{} is not a rank", Shown(number));
  }
  return std::nullopt;
}

Result<std::vector<Line>> ParseLines(std::string_view text, std::string_view where,
                                     std::string& arena) {
  if (text.empty()) return Corrupt(where, "the file is empty, expected \"base64 rank\" lines");
  if (text.starts_with("\xEF\xBB\xBF")) {
    return Corrupt(where, "the file starts with a byte order mark, expected \"base64 rank\" lines");
  }
  if (text.size() > 0x3FFFFFFF) return Corrupt(where, "the file is larger than 1 GiB");
  std::vector<Line> lines;
  arena.reserve(text.size() / 2);
  for (std::size_t number = 1; !text.empty(); ++number) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.empty()) continue;
    Line parsed{};
    if (const auto problem = ParseLine(line, arena, parsed)) {
      return Corrupt(where, fmt::format("line {}: {}", number, *problem));
    }
    lines.push_back(parsed);
  }
  if (lines.empty()) return Corrupt(where, "the file holds no rank");
  return lines;
}

/// Sorts by rank and requires 0..n-1.
Status SortByRank(std::vector<Line>& lines, std::string_view where) {
  const auto by_rank = [](const Line& a, const Line& b) { return a.rank < b.rank; };
  if (!std::is_sorted(lines.begin(), lines.end(), by_rank)) {
    std::sort(lines.begin(), lines.end(), by_rank);
  }
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::uint32_t rank = lines[i].rank;
    if (rank == i) continue;
    if (rank < i) return Corrupt(where, fmt::format("rank {} appears twice", rank));
    return Corrupt(where, fmt::format("rank {} is missing: {} ranks, the highest is {}", i,
                                      lines.size(), lines.back().rank));
  }
  return {};
}

}  // namespace

Result<RankTable> RankTable::Parse(std::string_view text, std::string_view where) {
  RankTable table;
  std::string raw;
  K3_ASSIGN(std::vector<Line> lines, ParseLines(text, where, raw));
  K3_TRY(SortByRank(lines, where));
  table.arena_.reserve(raw.size());
  table.offsets_.reserve(lines.size() + 1);
  table.offsets_.push_back(0);
  for (const Line& line : lines) {
    table.arena_.append(raw, line.offset, line.length);
    table.offsets_.push_back(static_cast<std::uint32_t>(table.arena_.size()));
    table.longest_ = std::max<std::size_t>(table.longest_, line.length);
  }
  K3_TRY(table.Index(where));
  return table;
}

Status RankTable::Index(std::string_view where) {
  slots_.resize(std::bit_ceil(size() * 2));
  bytes_.fill(kNone);
  pairs_.assign(65536, kNone);
  const std::size_t mask = slots_.size() - 1;
  for (TokenId id = 0; static_cast<std::size_t>(id) < size(); ++id) {
    const std::string_view bytes = Bytes(id);
    const std::uint64_t hash = Hash(bytes);
    const auto tag = static_cast<std::uint32_t>(hash >> 32);
    std::size_t at = hash & mask, passed = 0;
    for (; slots_[at].id != kNone; at = (at + 1) & mask) {
      if (slots_[at].tag == tag && Bytes(slots_[at].id) == bytes) {
        return Corrupt(where, fmt::format("token {} has the ranks {} and {}", Shown(bytes),
                                          slots_[at].id, id));
      }
      if (++passed > kMaxProbe) return Corrupt(where, "too many tokens share one hash value");
    }
    slots_[at] = {tag, id};
    const auto first = static_cast<unsigned char>(bytes[0]);
    if (bytes.size() == 1) bytes_[first] = id;
    if (bytes.size() == 2) {
      pairs_[static_cast<std::size_t>(first) << 8 | static_cast<unsigned char>(bytes[1])] = id;
    }
  }
  const auto missing = std::find(bytes_.begin(), bytes_.end(), kNone);
  if (missing != bytes_.end()) {
    return Corrupt(where, fmt::format("the single byte 0x{:02x} has no rank, all 256 are needed",
                                      missing - bytes_.begin()));
  }
  return {};
}

TokenId RankTable::Find(std::string_view bytes) const {
  if (bytes.size() > longest_) return kNone;
  const std::size_t mask = slots_.size() - 1;
  const std::uint64_t hash = Hash(bytes);
  const auto tag = static_cast<std::uint32_t>(hash >> 32);
  for (std::size_t at = hash & mask; slots_[at].id != kNone; at = (at + 1) & mask) {
    if (slots_[at].tag == tag && Bytes(slots_[at].id) == bytes) return slots_[at].id;
  }
  return kNone;
}

}  // namespace k3
