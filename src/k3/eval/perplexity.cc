#include "k3/eval/perplexity.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "k3/runtime/sampler.h"

namespace k3 {
namespace {

/// The first documents of a file, without empty ones. n = 0: all.
std::vector<std::string_view> Documents(std::string_view text, std::int64_t n) {
  std::vector<std::string_view> docs;
  while (!text.empty() && (n == 0 || static_cast<std::int64_t>(docs.size()) < n)) {
    const std::size_t end = std::min(text.find('\0'), text.size());
    if (end > 0) docs.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return docs;
}

/// Rows of scores of a big vocabulary are large: at most about 64 MiB of them at once.
std::int64_t PieceLimit(std::int64_t chunk, std::int64_t vocab) {
  return std::clamp<std::int64_t>(chunk, 1, std::max<std::int64_t>(1, (1 << 24) / vocab));
}

/// Adds the score of the token at `place`; sums, not yet means.
void AddAt(std::vector<PositionScore>& all, std::int64_t place, double nats) {
  constexpr std::int64_t kFirst = 32;
  std::size_t i = 0;
  while (kFirst << i <= place) ++i;
  while (all.size() <= i) {
    const std::int64_t begin = all.empty() ? 0 : all.back().end;
    all.push_back({begin, all.empty() ? kFirst : 2 * begin, 0, 0});
  }
  all[i].tokens += 1, all[i].nats += nats;
}

/// Sum of the negative log-likelihoods of ids[1..], each given all before it.
Result<double> ScoreIds(TokenModel& model, const std::vector<TokenId>& ids,
                        const PerplexityOptions& options, std::vector<PositionScore>& by_position) {
  ModelState state = model.NewState();
  const auto n = static_cast<std::int64_t>(ids.size()) - 1;  // the last id is only predicted
  const std::int64_t limit = PieceLimit(options.chunk, model.vocab());
  const auto vocab = static_cast<std::size_t>(model.vocab());
  std::vector<float> logits;
  double nats = 0;
  for (std::int64_t at = 0; at < n;) {
    if (options.cancel != nullptr && options.cancel->load(std::memory_order_relaxed)) {
      return Error{Code::kCancelled, ""};
    }
    const std::int64_t end = std::min(n, NextCut(at, limit, model.math()));
    const SequenceInput input{
        std::span(ids).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(end - at)),
        &state, LogitRows::kAll};
    K3_TRY(model.Forward(std::span(&input, 1), logits));
    for (std::int64_t t = at; t < end; ++t) {
      const auto row = std::span(logits).subspan(static_cast<std::size_t>(t - at) * vocab, vocab);
      const double one = -LogSoftmaxAt(row, ids[static_cast<std::size_t>(t + 1)]);
      AddAt(by_position, options.bos.has_value() ? t : t + 1, one);
      nats += one;
    }
    at = end;
  }
  if (!std::isfinite(nats)) return Error{Code::kNumeric, "a log-likelihood is not finite"};
  return nats;
}

void Summarise(PerplexityResult& r) {
  const auto n = static_cast<double>(r.documents.size());
  double sum = 0, squares = 0, nats = 0, bytes = 0;
  for (const DocumentScore& d : r.documents) {
    sum += d.nats;
    nats += d.nats * static_cast<double>(d.tokens);
    bytes += static_cast<double>(d.bytes);
  }
  r.mean_nats = sum / n;
  for (PositionScore& p : r.by_position) {
    if (p.tokens > 0) p.nats /= static_cast<double>(p.tokens);
  }
  for (const DocumentScore& d : r.documents) {
    squares += (d.nats - r.mean_nats) * (d.nats - r.mean_nats);
  }
  r.stderr_nats =
      n > 1 ? std::sqrt(squares / (n - 1) / n) : std::numeric_limits<double>::quiet_NaN();
  r.bits_per_byte = nats / std::numbers::ln2 / bytes;
}

}  // namespace

Result<PairedDifference> ComparePaired(const PerplexityResult& a, const PerplexityResult& b) {
  bool same = a.documents.size() == b.documents.size() && !a.documents.empty();
  for (std::size_t i = 0; same && i < a.documents.size(); ++i) {
    same = a.documents[i].tokens == b.documents[i].tokens;
  }
  if (!same) {
    return Error{Code::kInvalidArgument,
                 fmt::format("results about {} and {} documents, or of other lengths, cannot be "
                             "compared in pairs",
                             a.documents.size(), b.documents.size())};
  }
  const auto n = static_cast<double>(a.documents.size());
  PairedDifference d;
  for (std::size_t i = 0; i < a.documents.size(); ++i) {
    d.mean += (b.documents[i].nats - a.documents[i].nats) / n;
  }
  double squares = 0;
  for (std::size_t i = 0; i < a.documents.size(); ++i) {
    const double off = b.documents[i].nats - a.documents[i].nats - d.mean;
    squares += off * off;
  }
  d.stderr_mean =
      n > 1 ? std::sqrt(squares / (n - 1) / n) : std::numeric_limits<double>::quiet_NaN();
  return d;
}

Result<PerplexityResult> Perplexity(
    TokenModel& model, const Tokenizer& tokenizer, std::string_view text, std::string_view where,
    const PerplexityOptions& options,
    const std::function<void(std::int64_t done, std::int64_t total)>& progress) {
  if (options.n_tokens < 1 || options.n_tokens > model.max_positions()) {
    return Error{Code::kInvalidArgument,
                 fmt::format("tokens of a document: found {}, expected 1 to {} (the context)",
                             options.n_tokens, model.max_positions())};
  }
  const auto docs = Documents(text, options.n_docs);
  PerplexityResult result;
  for (std::size_t i = 0; i < docs.size(); ++i) {
    std::vector<TokenId> ids = tokenizer.Encode(docs[i]);
    ids.resize(std::min(ids.size(), static_cast<std::size_t>(options.n_tokens)));
    if (options.bos.has_value()) ids.insert(ids.begin(), *options.bos);
    if (ids.size() < 2) continue;
    DocumentScore score;
    score.tokens = static_cast<std::int64_t>(ids.size()) - 1;
    score.bytes = static_cast<std::int64_t>(
        tokenizer.Decode(std::vector<TokenId>(ids.begin() + 1, ids.end())).size());
    auto nats = ScoreIds(model, ids, options, result.by_position);
    if (!nats.ok()) {
      if (nats.error().code == Code::kCancelled) return nats.error();
      return Error{nats.error().code,
                   fmt::format("{}: document {}: {}", where, i + 1, nats.message())};
    }
    score.nats = *nats / static_cast<double>(score.tokens);
    result.documents.push_back(score);
    if (progress) {
      progress(static_cast<std::int64_t>(i + 1), static_cast<std::int64_t>(docs.size()));
    }
  }
  if (result.documents.empty()) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: no document with a token to score", where)};
  }
  Summarise(result);
  return result;
}

}  // namespace k3
