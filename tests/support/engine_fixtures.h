// What tests of the engine share: a model whose scores depend on every part of its state, a sink
// that remembers, and plain generation to compare with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "k3/base/rng.h"
#include "k3/grammar/token_constraint.h"
#include "k3/runtime/engine_core.h"
#include "k3/runtime/token_model.h"

namespace k3::test {

/// Scores are a hash of the recurrent state, the tails and some rows of the whole past, so that a
/// state restored by halves, or somebody else's, gives other tokens. Mostly the token after t is
/// t + 1: texts repeat themselves, as drafts like it.
class HashModel final : public TokenModel {
 public:
  static constexpr std::int64_t kVocab = 64;
  static constexpr TokenId kPoison = 63;  // whoever read it gets scores that are not finite

  explicit HashModel(std::int64_t context = 4096) : context_(context) {
    config.hidden = 4;
    config.n_layers = 2;
    config.attention = {AttentionKind::kKda, AttentionKind::kMla};
    config.kda.n_heads = 1;
    config.kda.head_dim = 2;
    config.mla.kv_lora_rank = 2;
    config.mla.qk_rope_dim = 1;
  }

  std::int64_t vocab() const override { return kVocab; }
  std::int64_t max_positions() const override { return context_; }
  std::uint64_t fingerprint() const override { return print; }
  MathMode math() const override { return mode; }
  ModelState NewState() const override { return ModelState(config); }

  ThreadPool* pool() override { return threads; }
  Status Forward(std::span<const SequenceInput> batch, std::vector<float>& logits) override {
    logits.clear();
    batches.push_back(static_cast<std::int64_t>(batch.size()));
    std::int64_t tokens = 0;
    bool poisoned = false;
    for (const SequenceInput& in : batch) {
      const std::int64_t begin = in.state->position();
      const std::int64_t end = begin + static_cast<std::int64_t>(in.tokens.size());
      tokens += end - begin;
      for (std::size_t i = 0; i < in.tokens.size(); ++i) {
        Consume(*in.state, in.tokens[i], begin, end);
        const bool wanted = in.logits == LogitRows::kAll ||
                            (in.logits == LogitRows::kLast && i + 1 == in.tokens.size());
        if (!wanted) continue;
        poisoned = poisoned || in.state->layer(0).kda.state[3] > 0;
        AddRow(*in.state, in.tokens[i], logits);
      }
    }
    if (bad_row >= 0 && static_cast<std::int64_t>(logits.size()) > bad_row * kVocab) {
      logits[static_cast<std::size_t>(std::exchange(bad_row, -1) * kVocab)] = NAN;
    }
    tokens_read += tokens;
    rows.push_back(tokens);
    if (on_forward) on_forward();
    if (poisoned && !tolerant) return Error{Code::kNumeric, "poisoned"};
    return {};
  }

  ModelConfig config;
  std::uint64_t print = 1;
  ThreadPool* threads = nullptr;
  std::int64_t bad_row = -1;  // of the next pass that has so many: its scores are not finite
  MathMode mode = MathMode::kExact;
  bool tolerant = false;  // of the poison
  double repeats = 0.9;   // how often the next token is the obvious one
  std::function<void()> on_forward;
  std::vector<std::int64_t> batches, rows;  // sequences and tokens of each pass
  std::int64_t tokens_read = 0;

 private:
  static std::uint64_t Mix(std::uint64_t h, float x) {
    return Rng(h ^ static_cast<std::uint64_t>(static_cast<std::int64_t>(x))).Next();
  }
  /// In fast mode a token is computed otherwise when its whole cell of 16 lies in the run.
  void Consume(ModelState& state, TokenId t, std::int64_t begin, std::int64_t end) {
    auto& kda = state.layer(0).kda;
    const std::int64_t p = state.position();
    const std::int64_t cell = p / 16 * 16;
    const bool chunk = mode == MathMode::kFast && cell >= begin && cell + 16 <= end;
    const auto step = [&](float s, int factor) {
      return static_cast<float>((static_cast<int>(s) * factor + t * 7 + 11 + (chunk ? 3 : 0)) %
                                65521);
    };
    kda.state[0] = step(kda.state[0], 31);
    kda.state[1] = step(kda.state[1], 17);
    kda.state[3] += t == kPoison ? 1.f : 0.f;
    for (std::size_t i = kda.conv.size() - 1; i > 0; --i) kda.conv[i] = kda.conv[i - 1];
    kda.conv[0] = static_cast<float>(t);
    PagedRows& past = state.layer(1).rows;
    if (past.size() != p) rows_disagree = true;
    past.Grow(1);
    past.MutableRow(p)[0] = static_cast<float>(t);
    past.MutableRow(p)[1] = static_cast<float>(p % 1000);
    past.MutableRow(p)[2] = kda.state[0];
    state.Advance(1);
  }
  void AddRow(const ModelState& state, TokenId t, std::vector<float>& logits) const {
    const auto& kda = state.layer(0).kda;
    std::uint64_t h = 1;
    for (const float x : kda.state) h = Mix(h, x);
    for (const float x : kda.conv) h = Mix(h, x);
    const PagedRows& past = state.layer(1).rows;
    for (std::uint64_t i = 0; i < 4; ++i) {
      const auto at =
          static_cast<std::int64_t>(Rng(h + i).Next() % static_cast<std::uint64_t>(past.size()));
      for (int d = 0; d < 3; ++d) h = Mix(h, past.row(at)[d]);
    }
    Rng rng(h);
    const bool obvious = rng.Uniform() < repeats;
    const std::size_t begin = logits.size();
    for (std::int64_t v = 0; v < kVocab; ++v) {
      logits.push_back(static_cast<float>(rng.Uniform() * 4) - (v == kPoison ? 100.f : 0.f));
    }
    if (obvious) logits[begin + static_cast<std::size_t>((t + 1) % (kVocab - 4))] += 6.f;
  }

  std::int64_t context_;

 public:
  bool rows_disagree = false;  // a state's parts were at different positions
};

/// Remembers what it is told. The engine's thread writes, others read after `finished`.
class CollectSink : public RequestSink {
 public:
  void OnStart(std::int64_t n) override { starts += 1, cached = n; }
  void OnPromptLogprobs(std::span<const SampleResult> r) override {
    prompt_logprobs.insert(prompt_logprobs.end(), r.begin(), r.end());
  }
  bool OnToken(const SampleResult& t) override {
    tokens.push_back(t.token);
    results.push_back(t);
    return (on_token ? on_token(*this) : true) && tokens.size() != stop_after;
  }
  void OnFinish(const EngineResult& r) override {
    finishes += 1;
    result = r;
    if (on_finish) on_finish();
  }

  std::vector<TokenId> tokens;
  std::vector<SampleResult> results, prompt_logprobs;
  std::int64_t cached = -1;
  int starts = 0, finishes = 0;
  EngineResult result;
  std::size_t stop_after = 0;
  std::function<bool(CollectSink&)> on_token;
  std::function<void()> on_finish;
};

/// Tokens of one residue: after n tokens only those with id % 3 == n % 3, and eos at the end.
class ModuloConstraint final : public TokenConstraint {
 public:
  ModuloConstraint(std::int64_t vocab, std::int64_t length) : vocab_(vocab), length_(length) {}
  std::unique_ptr<TokenConstraint> Clone() const override {
    return std::make_unique<ModuloConstraint>(*this);
  }
  bool Allowed(std::span<std::uint64_t> bits) override {
    if (n_ % 4 == 3) return false;  // sometimes anything goes
    std::fill(bits.begin(), bits.end(), 0);
    for (std::int64_t id = 0; id < vocab_; ++id) {
      if (Fits(id)) bits[static_cast<std::size_t>(id / 64)] |= std::uint64_t{1} << (id % 64);
    }
    return true;
  }
  bool Accept(TokenId id) override {
    if (n_ % 4 != 3 && !Fits(id)) return false;
    ++n_;
    return true;
  }
  bool finished() const override { return n_ >= length_; }

 private:
  bool Fits(std::int64_t id) const { return id % 3 == n_ % 3; }
  std::int64_t vocab_, length_, n_ = 0;
};

/// A request that can be made again: EngineRequest itself cannot be copied.
struct Plan {
  std::vector<TokenId> prompt;
  SamplingParams sampling;
  std::int64_t max_tokens = 32;
  std::vector<TokenId> eos;
  std::int64_t constrained = 0;  // length of a ModuloConstraint; 0: none
  std::int64_t top_logprobs = -1;
  bool prompt_logprobs = false;
  bool prefix_cache = true, speculate = true;
  int priority = 0;
  std::vector<std::int64_t> snapshot_at;

  EngineRequest Make(std::int64_t vocab) const {
    EngineRequest r;
    r.prompt = prompt;
    r.sampling = sampling;
    r.max_tokens = max_tokens;
    r.eos = eos;
    r.top_logprobs = top_logprobs;
    r.prompt_logprobs = prompt_logprobs;
    r.prefix_cache = prefix_cache;
    r.speculate = speculate;
    r.priority = priority;
    r.snapshot_at = snapshot_at;
    if (constrained > 0) r.constraint = std::make_unique<ModuloConstraint>(vocab, constrained);
    return r;
  }
};

/// Ids below `vocab`, with stretches that repeat.
inline std::vector<TokenId> RandomTokens(Rng& rng, std::int64_t n, std::int64_t vocab) {
  std::vector<TokenId> ids;
  while (static_cast<std::int64_t>(ids.size()) < n) {
    const std::size_t back = rng.Next() % 24 + 4;
    if (rng.Uniform() < 0.05 && ids.size() > back) {
      for (std::size_t i = 0; i < back; ++i) ids.push_back(ids[ids.size() - back]);
    } else {
      ids.push_back(static_cast<TokenId>(rng.Next() % static_cast<std::uint64_t>(vocab)));
    }
  }
  ids.resize(static_cast<std::size_t>(n));
  return ids;
}

/// A request with settings drawn from `rng`.
inline Plan RandomPlan(Rng& rng, std::int64_t vocab, std::int64_t longest = 300) {
  Plan p;
  p.prompt = RandomTokens(
      rng, 1 + static_cast<std::int64_t>(rng.Next() % static_cast<std::uint64_t>(longest)),
      vocab - 1);  // without the poison
  p.max_tokens = 1 + static_cast<std::int64_t>(rng.Next() % 40);
  p.sampling.seed = rng.Next();
  p.sampling.temperature = rng.Next() % 3 == 0 ? 0.0 : 0.3 + rng.Uniform();
  if (rng.Next() % 3 == 0) p.sampling.top_p = 0.5 + rng.Uniform() / 2;
  if (rng.Next() % 4 == 0) p.sampling.top_k = 1 + static_cast<std::int64_t>(rng.Next() % 20);
  if (rng.Next() % 4 == 0) p.sampling.min_p = rng.Uniform() / 5;
  if (rng.Next() % 4 == 0) p.sampling.repetition_penalty = 1 + rng.Uniform();
  if (rng.Next() % 4 == 0) p.sampling.frequency_penalty = rng.Uniform();
  if (rng.Next() % 4 == 0) p.sampling.presence_penalty = rng.Uniform();
  if (rng.Next() % 4 == 0)
    p.sampling.logit_bias[static_cast<TokenId>(rng.Next() % 50)] = rng.Next() % 2 == 0 ? 3 : 12;
  if (rng.Next() % 5 == 0) p.constrained = 20;
  if (rng.Next() % 3 == 0) p.eos = {static_cast<TokenId>(rng.Next() % 40)};
  return p;
}

/// The tokens of `plan` by the plainest means: one pass for the prompt (cut on the grid in fast
/// mode, which changes nothing), then one token a pass.
inline std::vector<TokenId> PlainTokens(TokenModel& model, const Plan& plan) {
  const EngineRequest r = plan.Make(model.vocab());
  ModelState state = model.NewState();
  Sampler sampler(plan.sampling.seed);
  sampler.AcceptPrompt(plan.prompt);
  std::vector<TokenId> out, run = plan.prompt;
  std::vector<float> logits;
  std::vector<std::uint64_t> bits(static_cast<std::size_t>((model.vocab() + 63) / 64));
  while (static_cast<std::int64_t>(out.size()) < plan.max_tokens &&
         static_cast<std::int64_t>(plan.prompt.size() + out.size()) < model.max_positions()) {
    const SequenceInput input{run, &state, LogitRows::kLast};
    if (!model.Forward(std::span(&input, 1), logits).ok()) break;
    std::optional<std::span<const std::uint64_t>> allowed;
    if (r.constraint && r.constraint->Allowed(bits)) allowed = bits;
    const auto drawn = sampler.Sample(logits, plan.sampling, -1, allowed);
    if (!drawn.ok()) break;
    const TokenId token = drawn->token;
    if (std::find(plan.eos.begin(), plan.eos.end(), token) != plan.eos.end()) break;
    if (r.constraint) (void)r.constraint->Accept(token);
    sampler.Accept(token);
    out.push_back(token);
    run = {token};
    if (r.constraint && r.constraint->finished()) break;
  }
  return out;
}

struct Outcome {
  std::vector<std::shared_ptr<CollectSink>> sinks;
  EngineStats stats;
};

inline std::unique_ptr<EngineCore> MakeCore(TokenModel& model, const EngineOptions& options,
                                            TokenModel* draft = nullptr) {
  CacheOptions cache{options.cache_bytes, options.spill_dir, options.spill_bytes};
  auto made = PrefixCache::Create(model, cache);
  EXPECT_TRUE(made.ok()) << made.message();
  return std::make_unique<EngineCore>(model, options, std::move(*made), draft);
}

/// Runs the plans on a core until everything is done: all at once, or one more every `stagger`
/// steps with a higher priority than those before it.
inline Outcome RunOn(EngineCore& core, const std::vector<Plan>& plans, std::int64_t vocab,
                     int stagger = 0) {
  Outcome out;
  static RequestId next = 1;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    out.sinks.push_back(std::make_shared<CollectSink>());
    EngineRequest request = plans[i].Make(vocab);
    if (stagger > 0) request.priority = static_cast<int>(i);
    const Status valid = core.Check(request);
    EXPECT_TRUE(valid.ok()) << valid.message();
    auto s = core.NewSequence(std::move(request), out.sinks.back());
    s->id = next++;
    core.Add(std::move(s));
    for (int step = 0; step < stagger; ++step) core.Step();
  }
  for (int step = 0; step < 100000 && !core.idle(); ++step) core.Step();
  EXPECT_TRUE(core.idle());
  out.stats = core.stats();
  return out;
}

/// A greedy request over n tokens.
inline Plan Text(std::int64_t n, std::uint64_t seed, std::int64_t max_tokens = 16) {
  Rng rng(seed);
  Plan p;
  p.prompt = RandomTokens(rng, n, 60);
  p.max_tokens = max_tokens;
  p.sampling.temperature = 0;
  return p;
}

/// Neither snapshots nor drafts.
inline EngineOptions Plain() {
  EngineOptions o;
  o.prefix_cache = false;
  o.speculate = false;
  return o;
}

/// A request on a core, to be stepped by hand.
struct Handle {
  std::shared_ptr<CollectSink> sink = std::make_shared<CollectSink>();
  RequestId id = 0;
  const std::vector<TokenId>& tokens() const { return sink->tokens; }
  bool finished() const { return sink->finishes > 0; }
};

inline Handle AddTo(EngineCore& core, const HashModel& model, const Plan& plan,
                    const std::function<void(EngineRequest&)>& change = {}) {
  static RequestId next = 1000;
  Handle h;
  EngineRequest request = plan.Make(model.vocab());
  if (change) change(request);
  const Status valid = core.Check(request);
  EXPECT_TRUE(valid.ok()) << valid.message();
  auto s = core.NewSequence(std::move(request), h.sink);
  h.id = s->id = next++;
  core.Add(std::move(s));
  return h;
}

inline void Finish(EngineCore& core) {
  for (int i = 0; i < 100000 && !core.idle(); ++i) core.Step();
  EXPECT_TRUE(core.idle());
}

}  // namespace k3::test
