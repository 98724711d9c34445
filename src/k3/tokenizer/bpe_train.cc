#include "k3/tokenizer/bpe_train.h"

#include <algorithm>
#include <queue>
#include <vector>

#include <fmt/format.h>

#include "k3/base/ids.h"
#include "k3/tokenizer/pre_tokenizer.h"
#include "k3/tokenizer/special_tokens.h"

namespace k3 {
namespace {

using Pair = std::uint64_t;  // left token << 32 | right token

Pair PairOf(TokenId a, TokenId b) {
  return static_cast<Pair>(static_cast<std::uint32_t>(a)) << 32 | static_cast<std::uint32_t>(b);
}

TokenId Left(Pair p) { return static_cast<TokenId>(p >> 32); }
TokenId Right(Pair p) { return static_cast<TokenId>(p & 0xFFFFFFFFu); }

/// A pair with the count it had when it was queued; stale ones are corrected when they come up.
struct Candidate {
  std::int64_t count;
  Pair pair;
  bool operator<(const Candidate& o) const {
    return count != o.count ? count < o.count : pair > o.pair;
  }
};

struct PairCount {
  std::int64_t count = 0;
  std::vector<std::uint32_t> words;  // where it stands or stood; some twice
};

class Merger {
 public:
  explicit Merger(std::vector<std::pair<std::string_view, std::int64_t>> pieces) {
    for (int b = 0; b < 256; ++b) AddToken(std::string(1, static_cast<char>(b)));
    for (const auto& [piece, count] : pieces) {
      Word w{{}, count};
      for (const char c : piece) w.tokens.push_back(static_cast<unsigned char>(c));
      words_.push_back(std::move(w));
    }
    for (std::uint32_t i = 0; i < words_.size(); ++i) {
      const std::vector<TokenId>& t = words_[i].tokens;
      for (std::size_t p = 0; p + 1 < t.size(); ++p) AddSeen(PairOf(t[p], t[p + 1]), i);
    }
    for (const auto& [pair, seen] : pairs_) queue_.push({seen.count, pair});
  }

  /// False when no pair is left.
  bool Next() {
    while (!queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      const auto it = pairs_.find(top.pair);
      if (it == pairs_.end() || it->second.count <= 0) continue;
      if (it->second.count != top.count) {
        queue_.push({it->second.count, top.pair});
        continue;
      }
      if (Join(top.pair, std::move(it->second.words))) return true;
    }
    return false;
  }

  const std::vector<std::string>& tokens() const { return tokens_; }

 private:
  struct Word {
    std::vector<TokenId> tokens;
    std::int64_t count;
  };

  TokenId AddToken(const std::string& bytes) {
    const auto [it, is_new] = ids_.emplace(bytes, static_cast<TokenId>(tokens_.size()));
    if (is_new) tokens_.push_back(bytes);
    return it->second;
  }

  void Add(Pair pair, std::int64_t count) { pairs_[pair].count += count; }
  void AddSeen(Pair pair, std::uint32_t index) {
    PairCount& seen = pairs_[pair];
    seen.count += words_[index].count;
    if (seen.words.empty() || seen.words.back() != index) seen.words.push_back(index);
  }

  /// Joins the pair in every word. False when that made no new token: its bytes had a rank, or are
  /// too many.
  bool Join(Pair pair, std::vector<std::uint32_t> where) {
    const std::string bytes = Bytes(Left(pair)) + Bytes(Right(pair));
    pairs_.erase(pair);
    if (bytes.size() > BpeTrainer::kMaxTokenBytes) return false;
    const std::size_t before = tokens_.size();
    const TokenId joined = AddToken(bytes);
    grown_.clear();
    for (const std::uint32_t index : where) JoinIn(index, pair, joined);
    pairs_.erase(pair);  // what JoinIn took away has entered it again
    std::sort(grown_.begin(), grown_.end());
    grown_.erase(std::unique(grown_.begin(), grown_.end()), grown_.end());
    for (const Pair p : grown_) {
      if (const auto it = pairs_.find(p); it != pairs_.end()) queue_.push({it->second.count, p});
    }
    return tokens_.size() > before;
  }

  /// Only pairs that touch a joined place change their counts, however long the word is.
  void JoinIn(std::uint32_t index, Pair pair, TokenId joined) {
    std::vector<TokenId>& tokens = words_[index].tokens;
    const std::int64_t count = words_[index].count;
    std::size_t to = 0;
    places_.clear();
    for (std::size_t i = 0, end = 0; i < tokens.size(); ++i) {
      const bool here = i + 1 < tokens.size() && PairOf(tokens[i], tokens[i + 1]) == pair;
      if (here) {
        // Between two joined places the pair has been counted down behind the first.
        const bool beside = !places_.empty() && i == end;
        if (i > 0 && !beside) Add(PairOf(tokens[i - 1], tokens[i]), -count);
        if (i + 2 < tokens.size()) Add(PairOf(tokens[i + 1], tokens[i + 2]), -count);
        places_.push_back(to);
        end = i + 2;
      }
      tokens[to++] = here ? joined : tokens[i];
      i += here;
    }
    tokens.resize(to);
    for (std::size_t n = 0; n < places_.size(); ++n) {
      const std::size_t at = places_[n];
      const bool beside = n > 0 && places_[n - 1] + 1 == at;
      if (at > 0 && !beside) Grow(PairOf(tokens[at - 1], joined), index);
      if (at + 1 < to) Grow(PairOf(joined, tokens[at + 1]), index);
    }
  }
  void Grow(Pair pair, std::uint32_t index) {
    AddSeen(pair, index);
    grown_.push_back(pair);
  }

  const std::string& Bytes(TokenId id) const { return tokens_[static_cast<std::size_t>(id)]; }
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, TokenId> ids_;
  std::vector<Word> words_;
  std::unordered_map<Pair, PairCount> pairs_;
  std::priority_queue<Candidate> queue_;
  std::vector<Pair> grown_;          // by the join that runs
  std::vector<std::size_t> places_;  // of joined tokens in the word at hand
};

std::string Base64(std::string_view s) {
  constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < s.size(); i += 3) {
    std::uint32_t v = 0;
    for (std::size_t j = i; j < i + 3; ++j) {
      v = v << 8 | (j < s.size() ? static_cast<unsigned char>(s[j]) : 0u);
    }
    for (std::size_t j = 0; j < 4; ++j) {
      out.push_back(i + j <= s.size() ? kAlphabet[v >> (18 - 6 * j) & 63u] : '=');
    }
  }
  return out;
}

/// The names of the release at the places it gives them (spec section 12).
std::string Config(std::size_t n_ranks) {
  constexpr std::pair<std::size_t, const char*> kNames[] = {{0, "[BOS]"},
                                                            {1, "[EOS]"},
                                                            {2, "<|end_of_msg|>"},
                                                            {3, "<|open|>"},
                                                            {4, "<|close|>"},
                                                            {5, "<|sep|>"},
                                                            {6, "[start_header_id]"},
                                                            {7, "[end_header_id]"},
                                                            {9, "[EOT]"},
                                                            {18, "<|media_begin|>"},
                                                            {19, "<|media_content|>"},
                                                            {20, "<|media_end|>"},
                                                            {21, "<|media_pad|>"},
                                                            {kSpecialTokens - 2, "[UNK]"},
                                                            {kSpecialTokens - 1, "[PAD]"}};
  std::string json = "{\n \"added_tokens_decoder\": {";
  for (const auto& [offset, name] : kNames) {
    json += fmt::format(
        "{}\n  \"{}\": {{\"content\": \"{}\", \"lstrip\": false, \"normalized\": false, "
        "\"rstrip\": false, \"single_word\": false, \"special\": true}}",
        offset == 0 ? "" : ",", n_ranks + offset, name);
  }
  return json +
         "\n },\n \"bos_token\": \"[BOS]\",\n \"eos_token\": \"[EOS]\",\n \"pad_token\": \"[PAD]\","
         "\n \"unk_token\": \"[UNK]\",\n \"tokenizer_class\": \"TikTokenTokenizer\",\n "
         "\"add_bos_token\": true\n}\n";
}

}  // namespace

void BpeTrainer::Add(std::string_view text) {
  const auto add = [this](std::string_view piece) {
    const auto it = pieces_.find(piece);
    it == pieces_.end() ? void(pieces_.emplace(piece, 1)) : void(++it->second);
  };
  const auto on_part = [&](std::string_view part) {
    const char* end = part.data() + part.size();
    for (const char* p = part.data(); p != end;) {
      const char* q = PieceEnd(p, end);
      add(std::string_view(p, static_cast<std::size_t>(q - p)));
      p = q;
    }
  };
  ForEachStretch(
      text, [&](std::string_view stretch) { ForEachPart(stretch, on_part); },
      [](std::string_view) {});  // a byte that is no text has its rank already
}

Result<TokenizerFiles> BpeTrainer::Train(std::size_t n_ranks) const {
  if (n_ranks < kMinRanks || n_ranks > kMaxRanks) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{} ranks, expected {} to {}", n_ranks, kMinRanks, kMaxRanks)};
  }
  std::vector<std::pair<std::string_view, std::int64_t>> pieces;
  for (const auto& [piece, count] : pieces_) {
    if (piece.size() > 1) pieces.emplace_back(piece, count);
  }
  std::sort(pieces.begin(), pieces.end());  // the map's order is no property of the texts
  Merger merger(std::move(pieces));
  while (merger.tokens().size() < n_ranks && merger.Next()) {
  }
  const std::vector<std::string>& tokens = merger.tokens();
  if (tokens.size() < n_ranks) {
    return Error{Code::kInvalidArgument,
                 fmt::format("the text has pairs for {} ranks only, expected {}; give more text or "
                             "ask for fewer",
                             tokens.size(), n_ranks)};
  }
  TokenizerFiles files;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    files.ranks += Base64(tokens[i]) + " " + std::to_string(i) + "\n";
  }
  files.config = Config(n_ranks);
  return files;
}

}  // namespace k3
