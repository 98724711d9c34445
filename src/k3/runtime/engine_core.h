// The engine without its thread: every state, one step at a time. Not part of the interface.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "k3/grammar/token_constraint.h"
#include "k3/runtime/draft.h"
#include "k3/runtime/draft_model.h"
#include "k3/runtime/engine.h"
#include "k3/runtime/prefix_cache.h"
#include "k3/runtime/scheduler.h"

namespace k3 {

using EngineClock = std::chrono::steady_clock;
inline double Seconds(EngineClock::duration d) { return std::chrono::duration<double>(d).count(); }

/// One request and everything that advances with its tokens.
struct Sequence {
  RequestId id = 0;
  EngineRequest request;
  std::shared_ptr<RequestSink> sink;
  EnginePhase phase = EnginePhase::kWaiting;
  bool started = false, done = false;

  ModelState state;  // meaningful with has_state
  bool has_state = false;
  std::int64_t parked = 0;  // bytes of the state while preempted with it
  Sampler sampler;
  std::vector<TokenId> tokens;  // prompt and answer
  std::int64_t prompt = 0;      // how many of them are prompt
  std::int64_t limit = 0;       // most there can be
  std::vector<float> ready;     // scores after the prompt, known without reading it

  std::vector<std::int64_t> snapshots;  // where to keep a copy while reading
  std::int64_t scored = 1;              // prompt tokens whose log-probabilities were given
  std::uint64_t last_step = 0;          // when some of the prompt was read last
  bool alone = false;                   // a batch with it failed: run by itself until it passes
  RequestId waits_for = 0;              // another one is reading the same prompt
  std::int64_t waits_until = 0;         // up to here

  NgramDrafter drafter;
  DraftPolicy policy;
  DraftReading reading;  // by the draft model
  DraftPolicy model_policy;
  std::vector<TokenId> draft;
  bool by_model = false;                      // who made the draft
  std::optional<Result<SampleResult>> ahead;  // the next draw, made already
  std::optional<EngineFinish> ending;         // decided in this step

  EngineClock::time_point submitted, began, first_token, last_token;
  EngineResult result;

  Rank rank() const { return {request.priority, id}; }
  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t pending() const { return length() - state.position(); }
  std::span<const TokenId> first(std::int64_t n) const {
    return std::span(tokens).first(static_cast<std::size_t>(n));
  }
};

class EngineCore {
 public:
  EngineCore(TokenModel& model, const EngineOptions& options, std::unique_ptr<PrefixCache> cache,
             TokenModel* draft = nullptr);

  /// Checks everything that can be known of a request before it runs.
  Status Check(const EngineRequest& request) const;
  /// Without its id.
  std::unique_ptr<Sequence> NewSequence(EngineRequest request,
                                        std::shared_ptr<RequestSink> sink) const;

  void Add(std::unique_ptr<Sequence> sequence) { waiting_.push_back(std::move(sequence)); }
  void Cancel(RequestId id);
  /// Ends what has to end, starts what can start.
  void Schedule();
  /// One forward pass over what runs.
  void Pass();
  void Step() { Schedule(), Pass(); }
  /// Ends everything.
  void EndAll(EngineFinish finish, const Status& status);
  PrefixCache& cache() { return *cache_; }
  void SpillCache() { cache_->SpillAll(); }

  bool idle() const { return waiting_.empty() && active_.empty(); }
  /// Requests that have not started.
  std::int64_t queued() const;
  std::int64_t context() const { return context_; }
  std::int64_t capacity(std::int64_t tokens) const;
  /// With the gauges brought up to date.
  const EngineStats& stats();

 private:
  /// One sequence's share of a forward pass.
  struct Item {
    Sequence* sequence = nullptr;
    std::vector<TokenId> run;
    LogitRows rows = LogitRows::kNone;
    std::int64_t drafted = 0;          // of `run`, at its end
    std::optional<ModelState> backup;  // before the run, when there is a draft
    std::size_t first_row = 0;         // in the scores
  };

  // engine_core.cc: life of a request
  void Sweep();
  void Admit();
  void GiveWay();
  bool MakeRoomFor(const Sequence& s);
  bool WaitsForPrefix(Sequence& s);
  std::int64_t Borrow(Sequence& reader, const Sequence& s, std::int64_t own);
  void Start(Sequence& s);
  void Restore(Sequence& s);
  void CountLookup(const Sequence& s, const CacheMatch& match);
  void Preempt(Sequence& s);
  void ReleaseParked(Sequence& s);
  void Finish(Sequence& s, EngineFinish finish, Status status = {});
  void Clean();
  void Keep(Sequence& s, std::span<const float> logits);
  std::int64_t Planned(const Sequence& s) const;
  std::int64_t PlannedSum() const;
  Sequence* Youngest(const Rank& above) const;
  bool UsesCache(const Sequence& s) const;

  // engine_step.cc: one forward pass
  void SampleReady();
  std::vector<Item> Build();
  void AddDecodes(std::vector<Item>& items);
  void AddPrompts(std::vector<Item>& items);
  Item PromptPiece(Sequence& s, std::int64_t share) const;
  Item DecodePiece(Sequence& s) const;
  void MakeDrafts();
  std::int64_t DraftLimit(const Sequence& s) const;
  bool DraftFromText(Sequence& s, std::int64_t rows);
  void DraftByModel(const std::vector<Sequence*>& sequences, std::int64_t rows);
  void TrimDraft(Sequence& s) const;
  Status Forward(std::vector<Item>& items);
  void Failed(std::vector<Item>& items, const Status& status);
  void DrawAhead(std::vector<Item>& items);
  void AfterPrompt(Item& item);
  void AfterDecode(Item& item);
  void GivePromptLogprobs(Item& item);
  void Choose(Sequence& s, std::span<const float> logits, TokenId& token);
  void GiveToken(Sequence& s, const SampleResult& token);
  std::span<const float> Row(const Item& item, std::int64_t i) const;
  std::optional<std::int64_t> FirstChoice(const Item& item) const;
  void OnThreads(std::int64_t n, const std::function<void(std::int64_t)>& f);

  TokenModel& model_;
  const EngineOptions options_;
  const MathMode math_;
  const StateSize size_;  // of a state of the model
  StateSize plan_;        // of all that a sequence takes, the draft model's part included
  const std::int64_t context_;
  std::unique_ptr<PrefixCache> cache_;
  std::vector<std::unique_ptr<Sequence>> waiting_;  // not started, or preempted
  std::vector<std::unique_ptr<Sequence>> active_;
  std::int64_t parked_bytes_ = 0;
  std::uint64_t step_ = 0;
  StepTimes cost_;
  std::optional<ModelDrafter> drafter_;
  double draft_seconds_ = 0;  // a token and sequence, lately
  std::vector<float> logits_;
  std::vector<std::uint64_t> allowed_;
  EngineStats stats_;
};

}  // namespace k3
