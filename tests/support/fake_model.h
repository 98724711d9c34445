// A model for tests of the runtime: scores are a simple function of the last token and its
// position.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "k3/runtime/token_model.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::test {

/// Remembers every pass. By default each token is followed by the next byte of `script`, at the
/// absolute position where it stands.
class FakeModel final : public TokenModel {
 public:
  explicit FakeModel(std::string text, std::int64_t context = 1000)
      : script(std::move(text)), max(context) {}

  std::int64_t vocab() const override { return 260; }
  std::int64_t max_positions() const override { return max; }
  std::uint64_t fingerprint() const override { return print; }
  MathMode math() const override { return mode; }
  ModelState NewState() const override { return ModelState(config); }

  Status Forward(std::span<const SequenceInput> batch, std::vector<float>& logits) override {
    logits.clear();
    for (const SequenceInput& in : batch) {
      passes.emplace_back(in.state->position(),
                          std::vector<TokenId>(in.tokens.begin(), in.tokens.end()));
      if (on_forward) on_forward();
      const auto n = in.tokens.size();
      for (std::size_t i = 0; i < n; ++i) {
        const bool wanted =
            in.logits == LogitRows::kAll || (in.logits == LogitRows::kLast && i + 1 == n);
        if (wanted) AddRow(in.state->position() + static_cast<std::int64_t>(i), logits);
      }
      in.state->Advance(static_cast<std::int64_t>(n));
    }
    return fail;
  }

  /// The token that comes after the one at `position` is script[position], then `eos` for ever.
  void AddRow(std::int64_t position, std::vector<float>& logits) const {
    const auto at = static_cast<std::size_t>(position);
    const auto next = at < script.size()
                          ? static_cast<std::size_t>(static_cast<unsigned char>(script[at]))
                          : 257u;
    logits.resize(logits.size() + 260, 0.f);
    logits[logits.size() - 260 + next] = 5.f;
  }

  std::string script;
  std::int64_t max;
  std::uint64_t print = 1;
  MathMode mode = MathMode::kExact;
  ModelConfig config;
  Status fail;
  std::function<void()> on_forward;
  std::vector<std::pair<std::int64_t, std::vector<TokenId>>> passes;
};

/// Token i is byte i; 256 to 259 are control tokens, 257 ends a text.
inline Tokenizer ByteTokenizer() {
  static constexpr char kDigits[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string ranks;
  for (unsigned b = 0; b < 256; ++b) {
    ranks += {kDigits[b >> 2], kDigits[(b & 3) << 4], '=', '=', ' '};
    ranks += std::to_string(b) + "\n";
  }
  auto t = Tokenizer::Parse(ranks, "", "byte tokenizer");
  return std::move(t).value();
}

inline std::vector<TokenId> Bytes(std::string_view text) {
  std::vector<TokenId> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

}  // namespace k3::test
