// Continuing a sequence: prefill in pieces, then one token at a time until something ends it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/runtime/sampler.h"
#include "k3/runtime/sequence_state.h"
#include "k3/runtime/token_model.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {

struct GenerateOptions {
  SamplingParams sampling;           // its seed is not used here: the state has the stream
  std::int64_t max_tokens = 128;     // 0: only read the prompt
  std::vector<TokenId> eos;          // end the text; neither counted nor kept
  std::vector<std::string> stop;     // end the text before them
  std::int64_t top_logprobs = -1;    // < 0: none; else log-probabilities with that many others
  std::int64_t context = 0;          // most tokens of the sequence; 0: the model's limit
  std::int64_t prefill_chunk = 512;  // most tokens of one forward pass
  const std::atomic<bool>* cancel = nullptr;  // looked at before every forward pass
};

enum class FinishReason : std::uint8_t { kStop, kLength, kCancelled };
std::string_view Name(FinishReason reason);  // "stop", "length", "cancelled"

struct GenerateResult {
  FinishReason finish = FinishReason::kLength;
  std::vector<TokenId> ids;          // generated, the tokens of a stop string included
  std::string text;                  // of ids, cut before a stop string; valid UTF-8
  std::vector<SampleResult> tokens;  // with top_logprobs >= 0: one for each id
  std::string matched_stop;          // the stop string that ended it, if one did
  std::int64_t prefill_tokens = 0;   // pending tokens read before the first choice
  bool state_lost = false;           // kCancelled inside a forward pass, by Exec::cancel
  double prefill_s = 0, decode_s = 0;
};

/// Told while Generate runs, from its thread. Any may be empty. Returning an error from on_text or
/// on_token ends generation with that error (a closed connection, say).
struct GenerateEvents {
  std::function<void(std::int64_t done, std::int64_t total)> on_prefill;
  std::function<Status(std::string_view text)> on_text;  // never empty, never part of a stop string
  std::function<Status(const SampleResult& token)> on_token;  // before the text it made certain
};

/// Continues `state`. Control tokens other than `eos` give ids but no text.
/// A prompt is read in pieces cut at absolute multiples of prefill_chunk, so one that arrives in
/// parts is computed like one that arrives whole. With max_tokens 0 the last piece stays pending.
/// Generation that fills the context ends with kLength; a prompt that does not fit is an error with
/// both numbers, before any work. After an error the state must be discarded; after kCancelled it
/// is whole and may be continued, unless state_lost.
Result<GenerateResult> Generate(TokenModel& model, const Tokenizer& tokenizer, SequenceState& state,
                                const GenerateOptions& options, const GenerateEvents& events = {});

}  // namespace k3
