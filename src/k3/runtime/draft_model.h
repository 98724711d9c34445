// Guessing the next tokens with a smaller model of the same vocabulary.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/runtime/token_model.h"

namespace k3 {

/// One sequence as the draft model has read it. Only tokens that are certain go in, so it never has
/// to go back.
struct DraftReading {
  ModelState state;
  bool begun = false;
};

/// Takes the best token each time. All sequences of a step are drafted for together: one pass that
/// reads what is new, then one for each further token. Not thread-safe; `model` outlives it.
class ModelDrafter {
 public:
  explicit ModelDrafter(TokenModel& model) : model_(model) {}

  struct Job {
    DraftReading* reading = nullptr;
    std::span<const TokenId> tokens;  // all of the sequence
    std::int64_t most = 0;            // tokens to draft, at least one
    std::vector<TokenId>* draft = nullptr;
  };

  /// Reads at most `budget` tokens; a sequence that is not read to its end after that gets no draft
  /// this time, nor does one that the model has no room for. After an error the readings are fresh.
  Status Draft(std::span<const Job> jobs, std::int64_t budget);

 private:
  Status Read(std::span<const Job> jobs, std::int64_t budget, std::vector<const Job*>& ready);
  Status Extend(const std::vector<const Job*>& ready);
  Status Pass(const std::vector<SequenceInput>& batch);
  TokenId Best(std::size_t row) const;

  TokenModel& model_;
  std::vector<float> logits_;
};

}  // namespace k3
