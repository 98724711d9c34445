#include "k3/runtime/engine_core.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

namespace k3 {
namespace {

/// Tokens that must be saved for it to be worth waiting for another request, or a snapshot.
constexpr std::int64_t kWorthSharing = 16;

}  // namespace

EngineRequest::EngineRequest() = default;
EngineRequest::EngineRequest(EngineRequest&&) noexcept = default;
EngineRequest& EngineRequest::operator=(EngineRequest&&) noexcept = default;
EngineRequest::~EngineRequest() = default;

EngineCore::EngineCore(TokenModel& model, const EngineOptions& options,
                       std::unique_ptr<PrefixCache> cache, TokenModel* draft)
    : model_(model),
      options_(options),
      math_(model.math()),
      size_(StateSize::Of(model.NewState())),
      plan_(size_),
      context_(options.context > 0 ? std::min(options.context, model.max_positions())
                                   : model.max_positions()),
      cache_(std::move(cache)) {
  allowed_.resize(static_cast<std::size_t>((model.vocab() + 63) / 64));
  if (draft == nullptr || !options.speculate) return;
  drafter_.emplace(*draft);
  const StateSize reading = StateSize::Of(draft->NewState());
  plan_.fixed += reading.fixed + reading.Copy();
  plan_.row += reading.row;
}

Status EngineCore::Check(const EngineRequest& r) const {
  const auto n = static_cast<std::int64_t>(r.prompt.size());
  if (n == 0) return Error{Code::kInvalidArgument, "the prompt has no tokens"};
  if (n > context_) {
    return Error{Code::kInvalidArgument,
                 fmt::format("the prompt has {} tokens, the context holds {}", n, context_)};
  }
  if (r.max_tokens < 0) {
    return Error{Code::kInvalidArgument,
                 fmt::format("max_tokens: found {}, expected 0 or more", r.max_tokens)};
  }
  for (std::size_t i = 0; i < r.prompt.size(); ++i) {
    if (r.prompt[i] < 0 || r.prompt[i] >= model_.vocab()) {
      return Error{Code::kInvalidArgument, fmt::format("token {} at position {}: expected 0..{}",
                                                       r.prompt[i], i, model_.vocab() - 1)};
    }
  }
  K3_TRY(r.sampling.Validate(model_.vocab()));
  const std::int64_t most = n + std::min(r.max_tokens, context_ - n);
  if (plan_.At(most) > options_.state_bytes) {
    return Error{Code::kInvalidArgument,
                 fmt::format("the state of {} tokens ({} of the prompt) takes {} bytes, there are "
                             "{} for all requests",
                             most, n, plan_.At(most), options_.state_bytes)};
  }
  return {};
}

std::unique_ptr<Sequence> EngineCore::NewSequence(EngineRequest request,
                                                  std::shared_ptr<RequestSink> sink) const {
  auto s = std::make_unique<Sequence>();
  s->sampler = Sampler(request.sampling.seed);
  s->sampler.AcceptPrompt(request.prompt);
  s->tokens = std::move(request.prompt);
  s->prompt = s->length();
  s->limit = s->prompt + std::min(request.max_tokens, context_ - s->prompt);
  s->policy = s->model_policy = DraftPolicy(options_.adaptive_draft);
  s->snapshots = SnapshotPlan(s->prompt, request.snapshot_at, math_);
  s->request = std::move(request);
  s->sink = std::move(sink);
  s->submitted = EngineClock::now();
  s->result.prompt_tokens = s->prompt;
  return s;
}

void EngineCore::Cancel(RequestId id) {
  for (auto* list : {&waiting_, &active_}) {
    for (const auto& s : *list) {
      if (s->id == id && !s->done) Finish(*s, EngineFinish::kCancelled);
    }
  }
  Clean();
}

void EngineCore::Schedule() {
  Sweep();
  Admit();
  GiveWay();
}

void EngineCore::Sweep() {
  const auto now = EngineClock::now();
  for (auto* list : {&waiting_, &active_}) {
    for (const auto& s : *list) {
      if (s->request.deadline.has_value() && *s->request.deadline <= now) {
        Finish(*s, EngineFinish::kDeadline);
      }
    }
  }
  Clean();
}

void EngineCore::Clean() {
  for (auto* list : {&waiting_, &active_}) {
    std::erase_if(*list, [](const auto& s) { return s->done; });
  }
}

std::int64_t EngineCore::Planned(const Sequence& s) const {
  return plan_.At(std::min(s.limit, s.length() + options_.reserve_tokens));
}

std::int64_t EngineCore::PlannedSum() const {
  std::int64_t sum = 0;
  for (const auto& s : active_) sum += Planned(*s);
  return sum;
}

/// The active sequence that gives way first, of those that rank behind `above`.
Sequence* EngineCore::Youngest(const Rank& above) const {
  Sequence* last = nullptr;
  for (const auto& s : active_) {
    if (above < s->rank() && (last == nullptr || last->rank() < s->rank())) last = s.get();
  }
  return last;
}

/// Preempts sequences of lower priority if that makes place for `s`.
bool EngineCore::MakeRoomFor(const Sequence& s) {
  const auto fits = [&](std::int64_t bytes, std::int64_t n) {
    return n < options_.max_running && bytes + Planned(s) <= options_.state_bytes;
  };
  std::int64_t bytes = PlannedSum();
  auto n = static_cast<std::int64_t>(active_.size());
  if (fits(bytes, n)) return true;
  const Rank equal{s.request.priority, ~std::uint64_t{0}};  // behind all of the same priority
  for (const auto& a : active_) {
    if (equal < a->rank()) bytes -= Planned(*a), --n;
  }
  if (!fits(bytes, n)) return false;
  while (!fits(PlannedSum(), static_cast<std::int64_t>(active_.size()))) Preempt(*Youngest(equal));
  return true;
}

void EngineCore::Admit() {
  std::sort(waiting_.begin(), waiting_.end(),
            [](const auto& a, const auto& b) { return a->rank() < b->rank(); });
  std::vector<Sequence*> order;
  for (const auto& s : waiting_) order.push_back(s.get());
  for (Sequence* s : order) {
    if (!s->started && WaitsForPrefix(*s)) continue;
    // Strictly in order: a large one must not wait for ever behind small ones.
    if (!MakeRoomFor(*s)) break;
    const auto at =
        std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& w) { return w.get() == s; });
    active_.push_back(std::move(*at));
    waiting_.erase(at);
    Start(*s);
  }
  Clean();
}

/// Running sequences grow; the last in rank stop until the plan holds again.
void EngineCore::GiveWay() {
  while (active_.size() > 1 && PlannedSum() > options_.state_bytes) {
    Sequence* last = active_[0].get();
    for (const auto& s : active_) {
      if (last->rank() < s->rank()) last = s.get();
    }
    Preempt(*last);
  }
}

bool EngineCore::UsesCache(const Sequence& s) const {
  return options_.prefix_cache && s.request.prefix_cache;
}

/// How far `s` could go on from a snapshot that `reader` is asked to leave; 0 when that is no help.
std::int64_t EngineCore::Borrow(Sequence& reader, const Sequence& s, std::int64_t own) {
  if (reader.phase != EnginePhase::kPrefill || !UsesCache(reader) || !reader.ready.empty())
    return 0;
  const std::int64_t common = CommonPrefix(reader.first(reader.prompt), s.tokens);
  std::int64_t until = common;
  if (common < s.prompt || common < reader.prompt || reader.request.max_tokens == 0) {
    until = std::min(common, s.prompt - 1);
    if (math_ == MathMode::kFast) until = until / kFastGrid * kFastGrid;
  }
  if (until < own + kWorthSharing || until <= reader.state.position()) return 0;
  if (until < reader.prompt) AddSnapshot(reader.snapshots, until, math_);
  return until;
}

/// True while somebody else reads what `s` begins with, so that it is computed once.
bool EngineCore::WaitsForPrefix(Sequence& s) {
  if (!UsesCache(s) || s.request.prompt_logprobs || s.prompt < kWorthSharing) return false;
  for (const auto& reader : active_) {
    if (reader->id != s.waits_for) continue;
    if (reader->phase == EnginePhase::kPrefill && reader->state.position() < s.waits_until) {
      return true;
    }
  }
  s.waits_for = 0;
  const std::int64_t own = active_.empty() ? 0 : cache_->Peek(s.tokens, true);
  for (const auto& reader : active_) {
    const std::int64_t until = Borrow(*reader, s, own);
    if (until > 0) {
      s.waits_for = reader->id;
      s.waits_until = until;
      return true;
    }
  }
  return false;
}

void EngineCore::Start(Sequence& s) {
  const bool first = !s.started;
  ReleaseParked(s);
  if (first) {
    s.started = true;
    s.began = EngineClock::now();
    s.result.queue_s = Seconds(s.began - s.submitted);
    stats_.queue.Observe(s.result.queue_s);
    stats_.prompt_tokens += static_cast<std::uint64_t>(s.prompt);
  }
  s.phase = EnginePhase::kPrefill;
  if (!s.has_state) Restore(s);
  // Between steps a decoding sequence has at most a draft's accepted tokens pending.
  if (s.result.completion_tokens > 0 && s.pending() <= options_.max_draft + 1) {
    s.phase = EnginePhase::kDecode;
  }
  if (first) s.sink->OnStart(s.result.cached_tokens);
  const bool nothing_left = s.pending() == 0 && s.ready.empty();  // only the prompt was wanted
  const bool full = s.limit == s.prompt && s.request.max_tokens > 0;
  if (nothing_left || full) Finish(s, EngineFinish::kLength);
}

/// Gives `s` a state: from the deepest snapshot that may be used, or a fresh one.
void EngineCore::Restore(Sequence& s) {
  s.state = model_.NewState();
  s.has_state = true;
  s.ready.clear();
  const bool fresh = s.result.completion_tokens == 0;
  const bool unscored = s.request.prompt_logprobs && s.scored < s.prompt;
  CacheMatch match;
  match.reason = !UsesCache(s) ? CacheMiss::kDisabled
                 : unscored    ? CacheMiss::kLogprobs
                               : CacheMiss::kShort;
  if (UsesCache(s) && !unscored && s.prompt > 1) {
    // In fast mode what was generated is read again one by one, so only the prompt is looked up.
    const std::int64_t known = fresh || math_ == MathMode::kFast ? s.prompt : s.length() - 1;
    match = cache_->Find(s.first(known), fresh && s.request.max_tokens > 0);
    if (match.position > 0) s.state = std::move(match.state);
    s.ready = std::move(match.logits);
    if (match.matched >= match.position + kWorthSharing && match.matched < s.prompt) {
      AddSnapshot(s.snapshots, match.matched, math_);  // texts part here
    }
  }
  if (s.result.preemptions == 0 && fresh && !s.alone) {
    s.result.cached_tokens = match.position;
    CountLookup(s, match);
  }
}

void EngineCore::CountLookup(const Sequence& s, const CacheMatch& match) {
  CacheStats& c = cache_->stats();
  if (match.position > 0) {
    ++c.hits;
    if (match.spilled) ++c.spill_hits;
    stats_.cached_tokens += static_cast<std::uint64_t>(match.position);
    spdlog::debug("request {}: {} of {} prompt tokens from a snapshot, {} known", s.id,
                  match.position, s.prompt, match.matched);
  } else {
    ++c.misses[static_cast<std::size_t>(match.reason)];
    spdlog::debug("request {}: no snapshot for {} prompt tokens: {}, {} known", s.id, s.prompt,
                  Name(match.reason), match.matched);
  }
}

void EngineCore::Preempt(Sequence& s) {
  ++s.result.preemptions;
  ++stats_.preemptions;
  s.reading = {};  // read again when it goes on
  const std::int64_t bytes = s.state.bytes();
  if (parked_bytes_ + bytes <= options_.cache_bytes / 2) {
    s.parked = bytes;
    parked_bytes_ += bytes;
    cache_->Reserve(parked_bytes_);
  } else {
    ++stats_.preemptions_dropped;
    s.state = ModelState();
    s.has_state = false;
    s.ready.clear();
  }
  s.phase = EnginePhase::kPreempted;
  const auto at =
      std::find_if(active_.begin(), active_.end(), [&](const auto& a) { return a.get() == &s; });
  waiting_.push_back(std::move(*at));
  active_.erase(at);
}

void EngineCore::ReleaseParked(Sequence& s) {
  if (s.parked == 0) return;
  parked_bytes_ -= s.parked;
  s.parked = 0;
  cache_->Reserve(parked_bytes_);
}

/// Leaves a snapshot of where `s` is now, where that is allowed.
void EngineCore::Keep(Sequence& s, std::span<const float> logits) {
  if (!UsesCache(s) || s.state.position() == 0) return;
  const std::int64_t position = s.state.position();
  Snapshot snapshot;
  if (math_ == MathMode::kFast && (position % kFastGrid != 0 || position > s.prompt)) {
    if (position != s.prompt || logits.empty()) return;
    snapshot.whole_only = true;
  }
  // Known already: the copy would be for nothing.
  if (cache_->Peek(s.first(position), !logits.empty()) == position) return;
  snapshot.state = s.state;
  snapshot.logits.assign(logits.begin(), logits.end());
  cache_->Insert(s.first(position), std::move(snapshot));
}

void EngineCore::Finish(Sequence& s, EngineFinish finish, Status status) {
  if (s.done) return;
  s.done = true;
  const auto now = EngineClock::now();
  const bool whole = finish == EngineFinish::kStop || finish == EngineFinish::kLength;
  if (whole && s.has_state && s.state.position() > s.prompt) Keep(s, {});
  ReleaseParked(s);
  s.reading = {};
  s.state = ModelState();
  s.has_state = false;
  ++stats_.finished[static_cast<std::size_t>(finish)];
  if (!whole && finish != EngineFinish::kError) {
    ++stats_.aborted[static_cast<std::size_t>(s.phase)];
  }
  EngineResult& r = s.result;
  r.finish = finish;
  r.status = std::move(status);
  if (!s.started) {
    r.queue_s = Seconds(now - s.submitted);
  } else if (r.completion_tokens == 0) {
    r.prefill_s = Seconds(now - s.began);
  } else {
    r.decode_s = Seconds(now - s.first_token);
  }
  stats_.e2e.Observe(Seconds(now - s.submitted));
  s.sink->OnFinish(r);
}

void EngineCore::EndAll(EngineFinish finish, const Status& status) {
  for (auto* list : {&waiting_, &active_}) {
    for (const auto& s : *list) Finish(*s, finish, status);
  }
  Clean();
}

std::int64_t EngineCore::queued() const {
  return std::count_if(waiting_.begin(), waiting_.end(), [](const auto& s) { return !s->started; });
}

std::int64_t EngineCore::capacity(std::int64_t tokens) const {
  const std::int64_t each = plan_.At(std::clamp<std::int64_t>(tokens, 1, context_));
  return each == 0 ? options_.max_running
                   : std::min(options_.max_running, options_.state_bytes / each);
}

const EngineStats& EngineCore::stats() {
  stats_.running = static_cast<std::int64_t>(active_.size());
  stats_.waiting = queued();
  stats_.preempted = static_cast<std::int64_t>(waiting_.size()) - stats_.waiting;
  stats_.state_bytes = 0;
  for (const auto& s : active_) {
    stats_.state_bytes += s->state.bytes() + s->reading.state.bytes();
  }
  stats_.state_planned = PlannedSum();
  stats_.state_limit = options_.state_bytes;
  stats_.capacity_short = capacity(1);
  stats_.capacity_context = capacity(context_);
  stats_.parked_bytes = parked_bytes_;
  stats_.cache_limit = options_.cache_bytes;
  stats_.cache = cache_->stats();
  return stats_;
}

}  // namespace k3
