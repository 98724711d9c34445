// Drafts for the sequences of a step.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "k3/runtime/engine_core.h"

namespace k3 {

/// Most tokens that may be drafted for `s`.
std::int64_t EngineCore::DraftLimit(const Sequence& s) const {
  if (!options_.speculate || !s.request.speculate) return 0;
  const std::int64_t most = std::min(options_.max_draft, s.limit - s.length() - 1);
  return math_ == MathMode::kFast ? std::min(most, kLongestSingleRun - s.pending()) : most;
}

/// True when the text repeats itself, even if a draft would not pay now.
bool EngineCore::DraftFromText(Sequence& s, std::int64_t rows) {
  const std::int64_t most = DraftLimit(s);
  if (s.drafter.Draft(s.tokens, static_cast<std::size_t>(most), s.draft) == 0) return false;
  s.by_model = false;
  s.draft.resize(static_cast<std::size_t>(std::min(most, s.policy.Length(cost_, rows, most))));
  return true;
}

void EngineCore::DraftByModel(const std::vector<Sequence*>& sequences, std::int64_t rows) {
  std::vector<ModelDrafter::Job> jobs;
  std::int64_t tokens = 0;
  for (Sequence* s : sequences) {
    const std::int64_t most = DraftLimit(*s);
    const std::int64_t length =
        std::min(most, s->model_policy.Length(cost_, rows, most, draft_seconds_));
    if (length <= 0) continue;
    s->by_model = true;
    jobs.push_back({&s->reading, s->tokens, length, &s->draft});
    tokens += length;
  }
  if (jobs.empty()) return;
  const auto start = EngineClock::now();
  if (const Status s = drafter_->Draft(jobs, options_.prefill_tokens_per_step); !s.ok()) {
    spdlog::warn("no more drafts by the draft model: {}", s.message());
    drafter_.reset();
    return;
  }
  const double seconds = std::chrono::duration<double>(EngineClock::now() - start).count();
  const double each = seconds / static_cast<double>(tokens);
  draft_seconds_ = draft_seconds_ == 0 ? each : 0.9 * draft_seconds_ + 0.1 * each;
}

/// Cuts the draft where the constraint will refuse it.
void EngineCore::TrimDraft(Sequence& s) const {
  if (s.request.constraint == nullptr || s.draft.empty()) return;
  const auto probe = s.request.constraint->Clone();
  std::size_t allowed = 0;
  while (allowed < s.draft.size() && probe->Accept(s.draft[allowed])) ++allowed;
  s.draft.resize(allowed);
}

void EngineCore::MakeDrafts() {
  std::int64_t rows = 0;
  for (const auto& s : active_) {
    s->draft.clear();
    if (s->phase == EnginePhase::kDecode) rows += s->pending();
  }
  std::vector<Sequence*> others;
  for (const auto& s : active_) {
    if (s->phase != EnginePhase::kDecode || DraftLimit(*s) <= 0) continue;
    if (!DraftFromText(*s, rows) && drafter_.has_value()) others.push_back(s.get());
  }
  if (!others.empty()) DraftByModel(others, rows);
  for (const auto& s : active_) TrimDraft(*s);
}

}  // namespace k3
