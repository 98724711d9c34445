// One forward pass of the engine: what goes in, and what becomes of the scores.
#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "k3/runtime/engine_core.h"

namespace k3 {
namespace {

/// Scores of a whole prompt are asked for in pieces of about this many numbers.
constexpr std::int64_t kMostScores = std::int64_t{1} << 22;

}  // namespace

void EngineCore::Pass() {
  SampleReady();
  Clean();
  if (active_.empty()) return;
  ++step_;
  std::vector<Item> items = Build();
  if (items.empty()) return;
  if (const Status status = Forward(items); !status.ok()) {
    Failed(items, status);
  } else {
    DrawAhead(items);
    for (Item& item : items) {
      if (item.sequence->phase == EnginePhase::kDecode) {
        AfterDecode(item);
      } else {
        AfterPrompt(item);
      }
    }
  }
  Clean();
}

/// The first token of those whose whole prompt was known.
void EngineCore::SampleReady() {
  for (const auto& s : active_) {
    if (s->done || s->phase != EnginePhase::kPrefill || s->ready.empty()) continue;
    const std::vector<float> logits = std::exchange(s->ready, {});
    TokenId token;
    s->phase = EnginePhase::kDecode;
    Choose(*s, logits, token);
    if (s->ending.has_value()) Finish(*s, *s->ending, s->result.status);
  }
}

std::vector<EngineCore::Item> EngineCore::Build() {
  std::vector<Item> items;
  for (const auto& s : active_) {
    if (!s->alone) continue;
    items.push_back(s->phase == EnginePhase::kDecode
                        ? DecodePiece(*s)
                        : PromptPiece(*s, options_.prefill_tokens_per_step));
    return items;
  }
  AddDecodes(items);
  AddPrompts(items);
  return items;
}

EngineCore::Item EngineCore::DecodePiece(Sequence& s) const {
  Item item;
  item.sequence = &s;
  item.run.assign(s.tokens.begin() + static_cast<std::ptrdiff_t>(s.state.position()),
                  s.tokens.end());
  item.rows = LogitRows::kLast;
  return item;
}

void EngineCore::AddDecodes(std::vector<Item>& items) {
  MakeDrafts();
  std::int64_t room = options_.state_bytes - PlannedSum();
  for (const auto& s : active_) {
    if (s->phase != EnginePhase::kDecode) continue;
    Item item = DecodePiece(*s);
    if (!s->draft.empty() && room >= size_.Copy()) {
      room -= size_.Copy();
      item.run.insert(item.run.end(), s->draft.begin(), s->draft.end());
      item.drafted = static_cast<std::int64_t>(s->draft.size());
      item.rows = LogitRows::kAll;
      item.backup = s->state;
    }
    items.push_back(std::move(item));
  }
}

void EngineCore::AddPrompts(std::vector<Item>& items) {
  std::vector<Sequence*> readers;
  std::vector<PromptNeed> needs;
  for (const auto& s : active_) {
    if (s->phase != EnginePhase::kPrefill) continue;
    readers.push_back(s.get());
    needs.push_back({s->pending(), s->request.priority, s->last_step, s->id});
  }
  const auto shares = SharePrefill(needs, options_.prefill_tokens_per_step, math_);
  for (std::size_t i = 0; i < readers.size(); ++i) {
    if (shares[i] > 0) items.push_back(PromptPiece(*readers[i], shares[i]));
  }
}

EngineCore::Item EngineCore::PromptPiece(Sequence& s, std::int64_t share) const {
  const std::int64_t from = s.state.position();
  const bool in_prompt = from < s.prompt;
  const bool scores = s.request.prompt_logprobs && s.scored < s.prompt;
  if (scores) share = std::min(share, std::max(kFastGrid, kMostScores / model_.vocab()));
  if (!in_prompt && math_ == MathMode::kFast) share = std::min(share, kLongestSingleRun);
  std::int64_t end =
      in_prompt ? PieceEnd(from, share, s.prompt, math_) : std::min(s.length(), from + share);
  const auto next = std::upper_bound(s.snapshots.begin(), s.snapshots.end(), from);
  if (next != s.snapshots.end() && UsesCache(s)) end = std::min(end, *next);
  Item item;
  item.sequence = &s;
  item.run.assign(s.tokens.begin() + static_cast<std::ptrdiff_t>(from),
                  s.tokens.begin() + static_cast<std::ptrdiff_t>(end));
  s.last_step = step_;
  if (scores && in_prompt) {
    item.rows = LogitRows::kAll;
  } else if (end == s.length() && s.request.max_tokens > 0) {
    item.rows = LogitRows::kLast;
  }
  return item;
}

Status EngineCore::Forward(std::vector<Item>& items) {
  std::vector<SequenceInput> batch;
  std::size_t rows = 0, tokens = 0;
  bool prompts = false;
  for (Item& item : items) {
    item.first_row = rows;
    rows += item.rows == LogitRows::kAll ? item.run.size() : item.rows == LogitRows::kLast ? 1 : 0;
    tokens += item.run.size();
    prompts = prompts || item.sequence->phase == EnginePhase::kPrefill;
    batch.push_back({item.run, &item.sequence->state, item.rows});
  }
  const auto start = EngineClock::now();
  try {
    K3_TRY(model_.Forward(batch, logits_));
  } catch (const std::bad_alloc&) {
    return Error{Code::kResource, fmt::format("out of memory in a pass over {} tokens", tokens)};
  }
  const double seconds = Seconds(EngineClock::now() - start);
  if (logits_.size() != rows * static_cast<std::size_t>(model_.vocab())) {
    return Error{Code::kNumeric, fmt::format("the model gave {} scores, expected {} rows of {}",
                                             logits_.size(), rows, model_.vocab())};
  }
  ++stats_.steps;
  stats_.step_seconds += seconds;
  stats_.batch_size.Observe(static_cast<double>(items.size()));
  stats_.step_tokens.Observe(static_cast<double>(tokens));
  // Prompt rows are cheaper, in large pieces, than the rows drafts add.
  if (!prompts) cost_.Observe(static_cast<double>(tokens), seconds);
  return {};
}

/// The states of the batch are lost. Who is to blame is found by running each alone; all others go
/// on as if nothing had been.
void EngineCore::Failed(std::vector<Item>& items, const Status& status) {
  if (status.error().code == Code::kNumeric) ++stats_.numeric_errors;
  const bool blame = items.size() == 1 || status.error().code != Code::kNumeric;
  for (Item& item : items) {
    Sequence& s = *item.sequence;
    s.state = ModelState();
    s.has_state = false;
    if (blame) {
      Finish(s, EngineFinish::kError, status);
      continue;
    }
    s.alone = true;
    s.phase = EnginePhase::kPrefill;
    Restore(s);
  }
}

std::span<const float> EngineCore::Row(const Item& item, std::int64_t i) const {
  const auto vocab = static_cast<std::size_t>(model_.vocab());
  return std::span(logits_).subspan((item.first_row + static_cast<std::size_t>(i)) * vocab, vocab);
}

/// Index of the row that the item's next token is drawn from, if one is drawn after this pass.
std::optional<std::int64_t> EngineCore::FirstChoice(const Item& item) const {
  const Sequence& s = *item.sequence;
  const auto n = static_cast<std::int64_t>(item.run.size());
  if (item.rows == LogitRows::kNone) return std::nullopt;
  if (s.phase == EnginePhase::kDecode) return item.drafted > 0 ? n - 1 - item.drafted : 0;
  if (s.pending() > 0 || s.request.max_tokens == 0) return std::nullopt;
  return item.rows == LogitRows::kAll ? n - 1 : 0;
}

/// Calls f(0) to f(n - 1), on the model's threads where it has some.
void EngineCore::OnThreads(std::int64_t n, const std::function<void(std::int64_t)>& f) {
  const auto range = [&f](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) f(i);
  };
  if (ThreadPool* pool = model_.pool(); pool != nullptr) return pool->ParallelFor(n, 1, range);
  range(0, n);
}

/// Draws the token of every row that is ready, on all threads: each sequence has a random stream
/// and counts of its own, so it does not matter who draws. What a constraint has to allow first
/// waits for Choose, for clones share what was compiled.
void EngineCore::DrawAhead(std::vector<Item>& items) {
  std::vector<std::pair<Sequence*, std::span<const float>>> ready;
  for (const Item& item : items) {
    const auto row = FirstChoice(item);
    if (!row.has_value() || item.sequence->request.constraint != nullptr) continue;
    ready.emplace_back(item.sequence, Row(item, *row));
  }
  if (ready.size() < 2) return;
  OnThreads(static_cast<std::int64_t>(ready.size()), [&ready](std::int64_t i) {
    auto& [s, row] = ready[static_cast<std::size_t>(i)];
    s->ahead = s->sampler.Sample(row, s->request.sampling, s->request.top_logprobs);
  });
}

void EngineCore::AfterPrompt(Item& item) {
  Sequence& s = *item.sequence;
  const auto n = static_cast<std::int64_t>(item.run.size());
  const std::int64_t position = s.state.position();
  stats_.prefill_tokens += static_cast<std::uint64_t>(n);
  if (item.rows == LogitRows::kAll) GivePromptLogprobs(item);
  if (s.done) return;
  const bool read = position == s.length();
  std::span<const float> last;
  if (read && item.rows != LogitRows::kNone) {
    last = Row(item, item.rows == LogitRows::kAll ? n - 1 : 0);
  }
  const bool wanted = std::binary_search(s.snapshots.begin(), s.snapshots.end(), position);
  if (position <= s.prompt && (wanted || position == s.prompt)) {
    Keep(s, position == s.prompt && read ? last : std::span<const float>());
  }
  if (!read) return;
  s.alone = false;
  if (s.request.max_tokens == 0) return Finish(s, EngineFinish::kLength);
  s.phase = EnginePhase::kDecode;
  TokenId token;
  Choose(s, last, token);
  if (s.ending.has_value()) Finish(s, *s.ending, s.result.status);
}

/// Row i of the piece is about the token after it.
void EngineCore::GivePromptLogprobs(Item& item) {
  Sequence& s = *item.sequence;
  const auto n = static_cast<std::int64_t>(item.run.size());
  const std::int64_t from = s.state.position() - n;
  const std::int64_t first = std::max<std::int64_t>(0, s.scored - from - 1);  // others were given
  const std::int64_t end = std::min(n, s.prompt - from - 1);
  std::vector<std::optional<Result<SampleResult>>> scored(
      static_cast<std::size_t>(std::max<std::int64_t>(0, end - first)));
  OnThreads(static_cast<std::int64_t>(scored.size()), [&](std::int64_t i) {
    scored[static_cast<std::size_t>(i)] =
        LogprobsOf(Row(item, first + i), s.tokens[static_cast<std::size_t>(from + first + i + 1)],
                   std::max<std::int64_t>(0, s.request.top_logprobs));
  });
  std::vector<SampleResult> given;
  for (auto& r : scored) {
    if (!r->ok()) return Finish(s, EngineFinish::kError, r->status());
    given.push_back(std::move(**r));
  }
  s.scored += static_cast<std::int64_t>(given.size());
  if (!given.empty()) s.sink->OnPromptLogprobs(given);
}

/// The tokens are drawn from the request's own stream as if one by one; a draft only decides which
/// rows of scores are there already. So the sampler and the constraint never have to go back, only
/// the model's state does.
void EngineCore::AfterDecode(Item& item) {
  Sequence& s = *item.sequence;
  const std::int64_t first = *FirstChoice(item);
  std::int64_t accepted = 0;
  s.alone = false;
  for (std::int64_t i = 0; i <= item.drafted; ++i) {
    TokenId token = -1;
    Choose(s, Row(item, first + i), token);
    if (s.ending.has_value() || i == item.drafted) break;
    if (token != s.draft[static_cast<std::size_t>(i)]) break;
    ++accepted;
  }
  if (item.drafted > 0) {
    s.result.drafted += item.drafted;
    s.result.accepted += accepted;
    ++stats_.drafts;
    stats_.drafted_tokens += static_cast<std::uint64_t>(item.drafted);
    stats_.accepted_tokens += static_cast<std::uint64_t>(accepted);
    stats_.accepted_length.Observe(static_cast<double>(accepted + 1));
    (s.by_model ? s.model_policy : s.policy).Report(item.drafted, accepted);
    if (accepted < item.drafted) {
      // What was accepted is pending again and goes into the next pass with the token after it.
      s.state = std::move(*item.backup);
      ++stats_.rollbacks;
    }
  }
  s.draft.clear();
  if (s.ending.has_value()) Finish(s, *s.ending, s.result.status);
}

/// Draws one token and gives it out. `ending` is set when it is the last.
void EngineCore::Choose(Sequence& s, std::span<const float> logits, TokenId& token) {
  TokenConstraint* constraint = s.request.constraint.get();
  std::optional<std::span<const std::uint64_t>> allowed;
  if (constraint != nullptr && constraint->Allowed(allowed_)) allowed = allowed_;
  auto drawn = s.ahead.has_value()
                   ? *std::exchange(s.ahead, std::nullopt)
                   : s.sampler.Sample(logits, s.request.sampling, s.request.top_logprobs, allowed);
  if (!drawn.ok()) {
    if (drawn.error().code == Code::kNumeric) ++stats_.numeric_errors;
    s.ending = EngineFinish::kError;
    s.result.status = drawn.status();
    return;
  }
  token = drawn->token;
  const auto& eos = s.request.eos;
  if (std::find(eos.begin(), eos.end(), token) != eos.end()) {
    s.ending = EngineFinish::kStop;
    return;
  }
  if (constraint != nullptr && !constraint->Accept(token)) {
    s.ending = EngineFinish::kError;
    s.result.status = Error{Code::kInvalidArgument,
                            fmt::format("the constraint refused token {} that it allowed", token)};
    return;
  }
  s.sampler.Accept(token);
  s.tokens.push_back(token);
  GiveToken(s, *drawn);
}

void EngineCore::GiveToken(Sequence& s, const SampleResult& token) {
  const auto now = EngineClock::now();
  if (s.result.completion_tokens++ == 0) {
    s.first_token = now;
    s.result.prefill_s = Seconds(now - s.began);
    stats_.ttft.Observe(Seconds(now - s.submitted));
  } else {
    stats_.inter_token.Observe(Seconds(now - s.last_token));
  }
  s.last_token = now;
  ++stats_.decode_tokens;
  const bool go_on = s.sink->OnToken(token);
  const bool complete = s.request.constraint != nullptr && s.request.constraint->finished();
  if (!go_on || complete) {
    s.ending = EngineFinish::kStop;
  } else if (s.length() >= s.limit) {
    s.ending = EngineFinish::kLength;
  }
}

}  // namespace k3
