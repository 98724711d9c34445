// The grammar of a reply, when the request asks for a form.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "k3/chat/format.h"
#include "k3/chat/message.h"
#include "k3/grammar/token_constraint.h"
#include "k3/grammar/vocabulary.h"
#include "k3/serve/api_error.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::serve {

struct ConstraintRequest {
  bool chat = false;  // the whole reply is in the chat format; false: the whole text is JSON
  chat::ChatOptions options;
  bool response_strict = true;
  bool parallel_calls = true;
  std::vector<TokenId> eos;  // plain text
};

/// Makes constraints and keeps the compiled ones: clients send the same schema again and again.
/// Any thread.
class ConstraintCache {
 public:
  ConstraintCache(const Tokenizer& tokenizer, std::optional<chat::Markup> markup)
      : vocabulary_(std::make_shared<const grammar::VocabularyTrie>(tokenizer)), markup_(markup) {}

  /// Null when nothing is asked for. With tools every call is one of a known tool with arguments of
  /// its schema; a schema that cannot be compiled is refused, unless calls are neither required nor
  /// strict: then the reply is free.
  [[nodiscard]] ApiStatus Make(const ConstraintRequest& request,
                               std::shared_ptr<const TokenConstraint>& out);

 private:
  Result<std::shared_ptr<const TokenConstraint>> Compile(const ConstraintRequest& request) const;

  std::shared_ptr<const grammar::VocabularyTrie> vocabulary_;
  std::optional<chat::Markup> markup_;
  std::mutex mutex_;
  // Newest first; guarded by mutex_.
  std::list<std::pair<std::string, std::shared_ptr<const TokenConstraint>>> kept_;
};

}  // namespace k3::serve
