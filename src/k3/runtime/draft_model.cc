#include "k3/runtime/draft_model.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace k3 {

Status ModelDrafter::Pass(const std::vector<SequenceInput>& batch) {
  K3_TRY(model_.Forward(batch, logits_));
  const auto rows = std::count_if(batch.begin(), batch.end(), [](const SequenceInput& in) {
    return in.logits == LogitRows::kLast;
  });
  if (static_cast<std::int64_t>(logits_.size()) != rows * model_.vocab()) {
    return Error{Code::kNumeric,
                 fmt::format("the draft model gave {} scores, expected {} rows of {}",
                             logits_.size(), rows, model_.vocab())};
  }
  return {};
}

TokenId ModelDrafter::Best(std::size_t row) const {
  const auto vocab = static_cast<std::size_t>(model_.vocab());
  const auto scores = std::span(logits_).subspan(row * vocab, vocab);
  return static_cast<TokenId>(std::max_element(scores.begin(), scores.end()) - scores.begin());
}

Status ModelDrafter::Read(std::span<const Job> jobs, std::int64_t budget,
                          std::vector<const Job*>& ready) {
  std::vector<SequenceInput> batch;
  for (const Job& job : jobs) {
    job.draft->clear();
    const auto length = static_cast<std::int64_t>(job.tokens.size());
    if (length + job.most > model_.max_positions()) continue;
    if (!job.reading->begun) *job.reading = {model_.NewState(), true};
    const std::int64_t from = job.reading->state.position();
    const std::int64_t n = std::min(length - from, budget);
    if (n <= 0) continue;  // there is always a new token, so this is the budget
    budget -= n;
    const bool whole = from + n == length;
    if (whole) ready.push_back(&job);
    batch.push_back(
        {job.tokens.subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(n)),
         &job.reading->state, whole ? LogitRows::kLast : LogitRows::kNone});
  }
  if (!batch.empty()) K3_TRY(Pass(batch));
  for (std::size_t i = 0; i < ready.size(); ++i) ready[i]->draft->push_back(Best(i));
  return {};
}

Status ModelDrafter::Extend(const std::vector<const Job*>& ready) {
  std::vector<ModelState> guesses;  // go beyond what is certain
  for (const Job* job : ready) guesses.push_back(job->reading->state);
  while (true) {
    std::vector<SequenceInput> batch;
    std::vector<const Job*> extended;
    for (std::size_t i = 0; i < ready.size(); ++i) {
      if (static_cast<std::int64_t>(ready[i]->draft->size()) >= ready[i]->most) continue;
      batch.push_back({std::span(*ready[i]->draft).last(1), &guesses[i], LogitRows::kLast});
      extended.push_back(ready[i]);
    }
    if (batch.empty()) return {};
    K3_TRY(Pass(batch));
    for (std::size_t i = 0; i < extended.size(); ++i) extended[i]->draft->push_back(Best(i));
  }
}

Status ModelDrafter::Draft(std::span<const Job> jobs, std::int64_t budget) {
  std::vector<const Job*> ready;
  Status status = Read(jobs, budget, ready);
  if (status.ok()) status = Extend(ready);
  if (!status.ok()) {
    for (const Job& job : jobs) {
      *job.reading = {};
      job.draft->clear();
    }
  }
  return status;
}

}  // namespace k3
