#include "k3/runtime/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "k3/runtime/stop.h"

namespace k3 {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// One call of Generate.
class Run {
 public:
  Run(TokenModel& model, const Tokenizer& tokenizer, SequenceState& state,
      const GenerateOptions& options, const GenerateEvents& events)
      : model_(model), tokenizer_(tokenizer), state_(state), options_(options), events_(events) {}

  Result<GenerateResult> Go();

 private:
  Status Check();
  bool Cancelled() const {
    return options_.cancel != nullptr && options_.cancel->load(std::memory_order_relaxed);
  }
  std::int64_t Length() const { return static_cast<std::int64_t>(state_.tokens.size()); }
  Status Prefill();
  Status Decode();
  Status Choose(bool& done);
  Status Forward(std::int64_t end, LogitRows rows);
  Status Emit(const std::string& text);
  Status End(FinishReason reason);

  TokenModel& model_;
  const Tokenizer& tokenizer_;
  SequenceState& state_;
  const GenerateOptions& options_;
  const GenerateEvents& events_;
  std::int64_t context_ = 0;
  StopMatcher stop_;
  Utf8Stream utf8_;
  std::vector<float> logits_;
  GenerateResult result_;
  bool finished_ = false;
};

Status Run::Check() {
  K3_TRY(options_.sampling.Validate(model_.vocab()));
  if (options_.max_tokens < 0) {
    return Error{Code::kInvalidArgument,
                 fmt::format("max_tokens: found {}, expected 0 or more", options_.max_tokens)};
  }
  context_ = model_.max_positions();
  if (options_.context > 0) context_ = std::min(context_, options_.context);
  if (Length() > context_) {
    return Error{Code::kInvalidArgument,
                 fmt::format("the prompt has {} tokens, the context holds {}", Length(), context_)};
  }
  if (state_.pending().empty() && options_.max_tokens > 0) {
    return Error{Code::kInvalidArgument, "there is no token to continue from"};
  }
  K3_ASSIGN(stop_, StopMatcher::Create(options_.stop));
  return {};
}

/// Runs the tokens up to `end`. A pass that was stopped inside ends the text and is no error.
Status Run::Forward(std::int64_t end, LogitRows rows) {
  const auto n = static_cast<std::size_t>(end - state_.model.position());
  const SequenceInput input{state_.pending().first(n), &state_.model, rows};
  const Status s = model_.Forward(std::span(&input, 1), logits_);
  if (s.ok() || s.error().code != Code::kCancelled) return s;
  result_.state_lost = true;
  return End(FinishReason::kCancelled);
}

/// Reads all pending tokens but the last piece, which Decode or a later call will read.
Status Run::Prefill() {
  const std::int64_t first = state_.model.position();
  while (!finished_) {
    const std::int64_t cut =
        NextCut(state_.model.position(), options_.prefill_chunk, model_.math());
    if (cut >= Length()) break;
    if (Cancelled()) return End(FinishReason::kCancelled);
    K3_TRY(Forward(cut, LogitRows::kNone));
    if (finished_) return {};
    if (events_.on_prefill) events_.on_prefill(cut - first, Length() - first);
  }
  return {};
}

Status Run::Emit(const std::string& text) {
  if (text.empty()) return {};
  result_.text += text;
  return events_.on_text ? events_.on_text(text) : Status();
}

Status Run::End(FinishReason reason) {
  finished_ = true;
  if (!stop_.stopped()) {
    // An unfinished character becomes U+FFFD, which may itself complete a stop string.
    K3_TRY(Emit(stop_.Push(utf8_.Finish())));
    K3_TRY(Emit(stop_.Finish()));
    if (stop_.stopped()) reason = FinishReason::kStop;
  }
  result_.matched_stop = stop_.matched();
  result_.finish = reason;
  return {};
}

/// Picks one token from the scores and deals with its text.
Status Run::Choose(bool& done) {
  done = true;
  K3_ASSIGN(SampleResult token,
            state_.sampler.Sample(logits_, options_.sampling, options_.top_logprobs));
  if (std::find(options_.eos.begin(), options_.eos.end(), token.token) != options_.eos.end()) {
    return End(FinishReason::kStop);
  }
  state_.sampler.Accept(token.token);
  state_.tokens.push_back(token.token);
  result_.ids.push_back(token.token);
  if (events_.on_token) K3_TRY(events_.on_token(token));
  const auto bytes = tokenizer_.Bytes(token.token);
  if (bytes.has_value() && !tokenizer_.IsSpecial(token.token)) {
    K3_TRY(Emit(stop_.Push(utf8_.Push(*bytes))));
  }
  if (options_.top_logprobs >= 0) result_.tokens.push_back(std::move(token));
  if (stop_.stopped()) return End(FinishReason::kStop);
  if (static_cast<std::int64_t>(result_.ids.size()) >= options_.max_tokens ||
      Length() >= context_) {
    return End(FinishReason::kLength);
  }
  done = false;
  return {};
}

Status Run::Decode() {
  const auto start = Clock::now();
  for (bool done = false; !done;) {
    if (Cancelled()) return End(FinishReason::kCancelled);
    const bool reads_prompt = result_.ids.empty();
    K3_TRY(Forward(Length(), LogitRows::kLast));
    if (finished_) return {};
    if (reads_prompt) result_.prefill_s += SecondsSince(start);
    K3_TRY(Choose(done));
  }
  return {};
}

Result<GenerateResult> Run::Go() {
  K3_TRY(Check());
  const auto start = Clock::now();
  result_.prefill_tokens = Length() - state_.model.position();
  if (options_.max_tokens > 0 && Length() == context_) {
    K3_TRY(End(FinishReason::kLength));
    return std::move(result_);
  }
  K3_TRY(Prefill());
  result_.prefill_s = SecondsSince(start);
  if (!finished_) {
    if (options_.max_tokens == 0) {
      K3_TRY(End(FinishReason::kLength));
    } else {
      K3_TRY(Decode());
    }
  }
  result_.decode_s = std::max(0.0, SecondsSince(start) - result_.prefill_s);
  return std::move(result_);
}

}  // namespace

std::string_view Name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
  }
  return "";
}

Result<GenerateResult> Generate(TokenModel& model, const Tokenizer& tokenizer, SequenceState& state,
                                const GenerateOptions& options, const GenerateEvents& events) {
  return Run(model, tokenizer, state, options, events).Go();
}

}  // namespace k3
