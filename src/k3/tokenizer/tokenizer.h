// Byte-pair encoding on tiktoken ranks with the Kimi pre-tokenizer (spec section 12).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"

namespace k3 {

/// Immutable after Load; safe from many threads.
///
/// Text and markup are different calls: Encode treats "<|open|>" in a user's text as ordinary
/// characters; only SpecialId, called by whoever renders markup, gives a control token.
class Tokenizer {
 public:
  /// Reads DIR/tiktoken.model and, when present, DIR/tokenizer_config.json. The files are
  /// untrusted: rank_table.h and special_tokens.h say what is refused.
  static Result<Tokenizer> Load(const std::string& dir);
  /// From file contents; `where` starts every message, an empty config means no file. For tests and
  /// fuzzing.
  static Result<Tokenizer> Parse(std::string_view ranks, std::string_view tokenizer_config,
                                 std::string_view where);

  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  /// Ids of ordinary text; never a control token. Any bytes are accepted: what is not UTF-8 becomes
  /// byte tokens, so Decode gives the exact bytes back; the stretches between such bytes get the
  /// ids they have alone. Time is near linear in the text's length.
  std::vector<TokenId> Encode(std::string_view text) const;

  /// Exact bytes of one token; a special token's name; nullopt for an id outside the vocabulary.
  std::optional<std::string_view> Bytes(TokenId id) const;
  /// Bytes of all ids in order; special tokens appear by name when `with_special`, ids outside the
  /// vocabulary never.
  std::string Decode(const std::vector<TokenId>& ids, bool with_special = true) const;

  std::optional<TokenId> SpecialId(std::string_view name) const;
  bool IsSpecial(TokenId id) const;

  std::size_t n_ranks() const;
  std::size_t vocab_size() const;  // ranks and specials
  /// tokenizer_config.json says add_bos_token: prepend BOS to plain text.
  bool add_bos() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

/// The pre-tokenizer alone: byte ranges of the pieces of `text`, in order, covering all of it. A
/// byte that is not UTF-8 is a piece by itself. The cuts of very long texts (pre_tokenizer.h),
/// which only Encode makes, are not in it.
std::vector<std::string_view> SplitPieces(std::string_view text);

/// Turns token bytes into printable text piece by piece. Holds back the start of a character until
/// it is complete; a byte that can never start or continue one becomes U+FFFD.
class Utf8Stream {
 public:
  /// Text that became certain by appending `bytes`.
  std::string Push(std::string_view bytes);
  /// What is left at the end: U+FFFD for an unfinished character, or nothing.
  std::string Finish();

 private:
  std::string pending_;
};

}  // namespace k3
