// How well a model predicts text: mean negative log-likelihood of the tokens of documents.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/runtime/token_model.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {

struct PerplexityOptions {
  std::int64_t n_docs = 0;      // the first so many documents; 0: all
  std::int64_t n_tokens = 512;  // tokens scored of each, fewer if it is shorter
  std::optional<TokenId> bos;   // precedes each document; absent: its first token is not scored
  std::int64_t chunk = 128;     // most positions of one forward pass
  const std::atomic<bool>* cancel = nullptr;
};

/// Mean over the scored tokens at places [begin, end) of their documents; the first place is 0.
struct PositionScore {
  std::int64_t begin = 0, end = 0;
  std::int64_t tokens = 0;
  double nats = 0;
};

struct DocumentScore {
  std::int64_t tokens = 0;  // scored
  std::int64_t bytes = 0;   // of the text of these tokens
  double nats = 0;          // mean negative log-likelihood of a token
};

struct PerplexityResult {
  std::vector<DocumentScore> documents;
  double mean_nats = 0;      // mean over documents of their means
  double stderr_nats = 0;    // standard error of that mean; NaN with one document
  double bits_per_byte = 0;  // all nats over all bytes of the scored text
  /// By doubling stretches: [0, 32), [32, 64), [64, 128), ... as far as there are tokens.
  std::vector<PositionScore> by_position;
};

/// How much worse (in nats per token) `b` is than `a` on the same documents: mean over documents of
/// the difference of their means, and its standard error (NaN with one document). What documents
/// have in common cancels, so it is far smaller than the error of either mean.
struct PairedDifference {
  double mean = 0, stderr_mean = 0;
};
/// Error when they are not about documents of the same lengths.
Result<PairedDifference> ComparePaired(const PerplexityResult& a, const PerplexityResult& b);

/// Documents of `text` are separated by NUL bytes; empty ones are left out and not counted. Each
/// document is encoded whole, then cut to n_tokens. Log-softmax in double; documents one after the
/// other, so nothing depends on threads or on the other documents.
/// Errors: no document with a token to score; n_tokens beyond the context; cancelled.
Result<PerplexityResult> Perplexity(
    TokenModel& model, const Tokenizer& tokenizer, std::string_view text, std::string_view where,
    const PerplexityOptions& options,
    const std::function<void(std::int64_t done, std::int64_t total)>& progress = {});

}  // namespace k3
