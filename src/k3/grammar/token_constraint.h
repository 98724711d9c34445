// Which tokens may come next in a text that has to have a certain form.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "k3/base/ids.h"

namespace k3 {

/// Follows one text token by token. Part of a sequence's state: it is copied, kept and taken back
/// together with the rest of it. A constraint and its clones may be used from different threads,
/// each from one thread at a time. Making one, not using one, is where errors happen.
///
/// Whatever has been accepted so far, some allowed text ends in a complete one: a text cannot run
/// into a dead end.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;

  /// An independent copy at the same place of the text. Cheap: what was compiled is shared.
  virtual std::unique_ptr<TokenConstraint> Clone() const = 0;

  /// Bit id%64 of bits[id/64] becomes 1 when token `id` may come next, else 0; all words are
  /// written. `bits` has at least (vocabulary + 63) / 64 words, the vocabulary being the
  /// tokenizer's; bits beyond it (a padded output layer) become 0. An end token's bit is set when
  /// the text may end here. false: everything is allowed now and `bits` is untouched.
  virtual bool Allowed(std::span<std::uint64_t> bits) = 0;

  /// Appends a token. false: it is not allowed here, and nothing changed. True for every token
  /// whose bit Allowed sets, and (but for a search cut short, docs/structured-output.md) for no
  /// other.
  virtual bool Accept(TokenId token) = 0;

  /// Nothing but an end token may follow, or one came already: generation can stop here.
  virtual bool finished() const = 0;
};

}  // namespace k3
