// Many requests at once on one model: continuous batching, prefix reuse, speculation.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/runtime/engine_stats.h"
#include "k3/runtime/sampler.h"
#include "k3/runtime/token_model.h"

namespace k3 {

class PrefixCache;      // k3/runtime/prefix_cache.h
class TokenConstraint;  // k3/grammar/token_constraint.h

using RequestId = std::uint64_t;

/// One continuation of one prompt. n answers are n requests that differ in their seed; the engine
/// reads a prompt that several of them share once.
struct EngineRequest {
  EngineRequest();
  EngineRequest(EngineRequest&&) noexcept;
  EngineRequest& operator=(EngineRequest&&) noexcept;
  ~EngineRequest();

  std::vector<TokenId> prompt;     // at least one token
  SamplingParams sampling;         // with its seed
  std::int64_t max_tokens = 128;   // 0: only read the prompt
  std::vector<TokenId> eos;        // end the text; neither counted nor given to OnToken
  std::int64_t top_logprobs = -1;  // < 0: none; else log-probabilities with that many others
  bool prompt_logprobs = false;    // of the prompt too, with max(0, top_logprobs) others
  int priority = 0;                // larger goes first
  std::optional<std::chrono::steady_clock::time_point> deadline;
  std::unique_ptr<TokenConstraint> constraint;  // may be empty
  bool prefix_cache = true;                     // may use snapshots and leave some
  bool speculate = true;                        // may be drafted for
  /// Numbers of prompt tokens after which others are likely to differ: the end of the system text,
  /// before the last question. Out of range ones are ignored.
  std::vector<std::int64_t> snapshot_at;
};

struct EngineResult {
  EngineFinish finish = EngineFinish::kStop;
  Status status;  // with kError
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_tokens = 0;  // <= prompt_tokens: not read again for this request
  std::int64_t completion_tokens = 0;
  std::int64_t drafted = 0, accepted = 0;  // tokens of drafts; how many of them were right
  std::int64_t preemptions = 0;
  double queue_s = 0;    // from Submit to the start
  double prefill_s = 0;  // from the start to the first token
  double decode_s = 0;   // from the first token to the end
};

/// Told about one request, from the engine's thread: must not block and not call Drain or destroy
/// the engine. Calls come in the order of the methods; OnFinish exactly once, whatever happens.
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  /// The request left the queue; `cached_tokens` of its prompt need not be read.
  virtual void OnStart(std::int64_t cached_tokens) { (void)cached_tokens; }
  /// Entry i is about prompt token i + 1 given those before it. May come in several parts.
  virtual void OnPromptLogprobs(std::span<const SampleResult> tokens) { (void)tokens; }
  /// False: end the text here (a stop string, a reply that is complete); kStop follows.
  virtual bool OnToken(const SampleResult& token) = 0;
  virtual void OnFinish(const EngineResult& result) = 0;
};

struct EngineOptions {
  std::int64_t context = 0;  // most tokens of a sequence; 0: the model's limit
  std::int64_t max_running = 64;
  std::int64_t max_waiting = 256;
  std::int64_t prefill_tokens_per_step = 512;  // of all prompts together; fast mode: at least 64
  std::int64_t state_bytes = std::int64_t{1} << 30;  // of all running sequences
  std::int64_t reserve_tokens = 128;  // a sequence is planned for this many more than it has

  bool prefix_cache = true;
  std::int64_t cache_bytes = std::int64_t{256} << 20;  // snapshots, and states of the preempted
  std::string spill_dir;                               // evicted snapshots go there; empty: nowhere
  std::int64_t spill_bytes = std::int64_t{1} << 30;

  bool speculate = true;
  std::int64_t max_draft = 8;  // most tokens of a draft
  bool adaptive_draft = true;  // draft only where it pays; else always the most (for tests)
};

/// Owns a thread that alone touches the model and every state.
///
/// Each step is one Forward over every decoding sequence and some prompt tokens, which are shared
/// out fairly, so that neither a long prompt nor many short ones stop the others. Requests start by
/// priority, then in the order they came, as long as the bytes planned for the running ones fit;
/// when those grow beyond, the youngest of the lowest priority gives way and goes on later.
///
/// In exact mode a request gets the same tokens whether it runs alone, in a batch, from a snapshot,
/// after a preemption or with drafts. In fast mode too: prompts are cut, and snapshots taken, only
/// where the arithmetic allows (token_model.h), and drafts are short enough to keep the one-token
/// form.
///
/// All methods may be called from any thread but the engine's own, Submit, Cancel, UseCache and
/// stats from that one too (in a sink).
class Engine {
 public:
  /// `model` outlives the engine and is used by nobody else; so does `draft`, a smaller model that
  /// drafts where the text itself gives nothing. Refuses options that make no sense and a draft
  /// model of another vocabulary.
  static Result<std::unique_ptr<Engine>> Create(TokenModel& model, const EngineOptions& options,
                                                TokenModel* draft = nullptr);
  /// As Drain with no time.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Refused at once, and the sink is not told:
  ///   kResource         the queue is full: try later (429)
  ///   kCancelled        the engine is draining (503)
  ///   kInvalidArgument  an empty prompt, one longer than the context, one whose state with
  ///                     max_tokens can never fit (both numbers named), a token id outside the
  ///                     vocabulary, bad sampling values (400)
  /// A max_tokens beyond the context is allowed: the text then ends with kLength.
  Result<RequestId> Submit(EngineRequest request, std::shared_ptr<RequestSink> sink);

  /// Unknown and finished ids are ignored. OnFinish(kCancelled) follows within one step.
  void Cancel(RequestId id);

  /// Calls `use` once on the engine's thread, between two steps, with the prefix cache; with
  /// nullptr when the engine ends before. Must not block. Not with EngineOptions::prefix_cache off,
  /// for then what it inserts is never looked for.
  void UseCache(std::function<void(PrefixCache*)> use);

  /// Accepts nothing new and waits until all requests are done; what is left after `timeout` ends
  /// with kShutdown. Returns when the engine's thread has ended; may be called again.
  void Drain(std::chrono::milliseconds timeout);

  /// A copy, not older than one step.
  EngineStats stats() const;
  /// Most tokens, prompt and answer, that a request can have.
  std::int64_t context() const;
  /// Most sequences of `tokens` tokens that run at once: what to print at the start.
  std::int64_t capacity(std::int64_t tokens) const;

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
