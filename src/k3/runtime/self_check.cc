#include "k3/runtime/self_check.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include "k3/base/rng.h"
#include "k3/kernels/cpu/cpu_backend.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/runtime/sequence_state.h"

namespace k3 {
namespace {

using Ids = std::span<const TokenId>;

/// Scores of all positions and the state after the last one.
struct Outcome {
  std::vector<float> logits;
  std::string image;
};

/// log-probabilities of one row.
std::vector<double> LogProbs(std::span<const float> row) {
  const double top = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (const float x : row) sum += std::exp(x - top);
  const double norm = top + std::log(sum);
  std::vector<double> out;
  for (const float x : row) out.push_back(x - norm);
  return out;
}

class Checker {
 public:
  Checker(const Model& model, const SelfCheckOptions& options,
          const std::function<void(const std::string&)>& progress,
          const std::function<bool()>& cancelled)
      : model_(model), options_(options), progress_(progress), cancelled_(cancelled) {}

  Result<SelfCheckReport> Run();

 private:
  using Case = std::function<Result<Outcome>()>;

  std::unique_ptr<Exec> Make(int threads, MathMode math) const {
    return options_.make_exec ? options_.make_exec(threads, math)
                              : std::make_unique<Exec>(threads, math);
  }
  Exec& On(MathMode math) { return math == MathMode::kExact ? *exact_ : *fast_; }
  std::size_t n() const { return tokens_.size(); }
  Status MakeText();
  Status Forward(Exec& exec, Ids ids, ModelState& state, std::vector<float>& logits,
                 LogitRows rows = LogitRows::kAll);
  /// The text in pieces that end at `cuts` and at its end.
  Result<Outcome> InPieces(Exec& exec, const std::vector<std::size_t>& cuts);
  /// Runs the cases of a row and compares each with `want`.
  Status Row(std::string name, MathMode math, std::string what, const Outcome& want,
             const std::vector<Case>& cases, bool identity = true);
  void Measure(const Outcome& got, const Outcome& want, SelfCheckRow& row) const;

  std::vector<Case> Cuts(MathMode math);
  Result<Outcome> Batched(std::size_t others);
  Result<Outcome> Forked(std::size_t at);
  Result<Outcome> Saved(std::size_t at);
  Result<Outcome> Threads(int threads, MathMode math);
  std::vector<Case> InstructionSets();

  const Model& model_;
  const SelfCheckOptions& options_;
  const std::function<void(const std::string&)>& progress_;
  const std::function<bool()>& cancelled_;
  std::unique_ptr<Exec> exact_ = Make(options_.threads, MathMode::kExact);
  std::unique_ptr<Exec> fast_ = Make(options_.threads, MathMode::kFast);
  std::vector<TokenId> tokens_;
  SelfCheckReport report_;
};

Status Checker::Forward(Exec& exec, Ids ids, ModelState& state, std::vector<float>& logits,
                        LogitRows rows) {
  if (cancelled_ && cancelled_()) return Error{Code::kCancelled, ""};
  const SequenceInput input{ids, &state, rows};
  return model_.Forward({&input, 1}, exec, logits);
}

/// Sampled from the model at temperature 1: what it meets in use, unlike random tokens.
Status Checker::MakeText() {
  const std::int64_t vocab = model_.config().vocab;
  Rng rng(options_.seed);
  tokens_.push_back(model_.config().bos.value_or(
      static_cast<TokenId>(rng.Uniform() * static_cast<double>(vocab))));
  ModelState state = model_.NewState();
  std::vector<float> logits;
  while (static_cast<std::int64_t>(n()) < options_.tokens) {
    K3_TRY(Forward(*exact_, Ids(tokens_).last(1), state, logits, LogitRows::kLast));
    const auto p = LogProbs(logits);
    double left = rng.Uniform();
    std::size_t choice = 0;
    while (choice + 1 < p.size() && (left -= std::exp(p[choice])) > 0) ++choice;
    tokens_.push_back(static_cast<TokenId>(choice));
  }
  return {};
}

Result<Outcome> Checker::InPieces(Exec& exec, const std::vector<std::size_t>& cuts) {
  Outcome out;
  ModelState state = model_.NewState();
  std::vector<float> logits;
  std::size_t at = 0;
  for (std::size_t i = 0; i <= cuts.size(); ++i) {
    const std::size_t end = i < cuts.size() ? cuts[i] : n();
    K3_TRY(Forward(exec, Ids(tokens_).subspan(at, end - at), state, logits));
    out.logits.insert(out.logits.end(), logits.begin(), logits.end());
    at = end;
  }
  out.image = state.Serialize();
  return out;
}

void Checker::Measure(const Outcome& got, const Outcome& want, SelfCheckRow& row) const {
  const auto vocab = static_cast<std::size_t>(model_.config().vocab);
  double diff = 0, norm = 0;
  std::size_t agree = 0, rows = 0;
  for (std::size_t at = 0; at + vocab <= want.logits.size(); at += vocab, ++rows) {
    const auto a = std::span(got.logits).subspan(at, vocab);
    const auto b = std::span(want.logits).subspan(at, vocab);
    const auto pa = LogProbs(a), pb = LogProbs(b);
    for (std::size_t v = 0; v < vocab; ++v) {
      const double d = static_cast<double>(a[v]) - static_cast<double>(b[v]);
      diff += d * d;
      norm += static_cast<double>(b[v]) * static_cast<double>(b[v]);
      row.max_logprob = std::max(row.max_logprob, std::abs(pa[v] - pb[v]));
    }
    agree += std::max_element(a.begin(), a.end()) - a.begin() ==
             std::max_element(b.begin(), b.end()) - b.begin();
  }
  row.rel_l2 = std::max(row.rel_l2, norm > 0 ? std::sqrt(diff / norm) : std::sqrt(diff));
  if (rows > 0) {
    row.argmax = std::min(row.argmax, static_cast<double>(agree) / static_cast<double>(rows));
  }
}

Status Checker::Row(std::string name, MathMode math, std::string what, const Outcome& want,
                    const std::vector<Case>& cases, bool identity) {
  if (progress_) progress_(name);
  const auto start = std::chrono::steady_clock::now();
  SelfCheckRow row;
  row.name = std::move(name);
  row.math = math;
  row.what = std::move(what);
  for (const Case& run : cases) {
    K3_ASSIGN(const Outcome got, run());
    const bool same =
        got.logits.size() == want.logits.size() && got.image == want.image &&
        std::memcmp(got.logits.data(), want.logits.data(), got.logits.size() * sizeof(float)) == 0;
    row.cases += 1;
    if (same) continue;
    row.different += 1;
    if (got.logits.size() == want.logits.size()) Measure(got, want, row);
  }
  if (identity) row.pass = row.different == 0;
  row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  report_.rows.push_back(std::move(row));
  return {};
}

std::vector<Checker::Case> Checker::Cuts(MathMode math) {
  std::set<std::size_t> places;
  if (math == MathMode::kFast) {
    for (std::size_t at = kFastGrid; at < n(); at += kFastGrid) places.insert(at);
  } else {
    for (const std::size_t at :
         {std::size_t{1}, std::size_t{15}, std::size_t{16}, std::size_t{17}, std::size_t{63},
          std::size_t{64}, std::size_t{65}, n() / 2, n() - 1}) {
      if (at > 0 && at < n()) places.insert(at);
    }
  }
  std::vector<Case> cases;
  for (const std::size_t at : places) {
    cases.push_back([this, math, at] { return InPieces(On(math), {at}); });
  }
  const std::vector<std::size_t> all(places.begin(), places.end());
  cases.push_back([this, math, all] { return InPieces(On(math), all); });
  if (math == MathMode::kExact) {
    cases.push_back([this, math] {
      std::vector<std::size_t> every;
      for (std::size_t i = 1; i < n(); ++i) every.push_back(i);
      return InPieces(On(math), every);
    });
  }
  return cases;
}

/// The text beside `others` shorter ones, read together and then decoded together.
Result<Outcome> Checker::Batched(std::size_t others) {
  const std::size_t tail = std::min<std::size_t>(8, n() / 2), head = n() - tail;
  std::vector<ModelState> states(others + 1, model_.NewState());
  std::vector<SequenceInput> batch;
  for (std::size_t i = 0; i < others; ++i) {
    const std::size_t skip = std::min(head - 1, 1 + 7 * i);
    batch.push_back({Ids(tokens_).subspan(skip, head - skip), &states[i], LogitRows::kLast});
  }
  batch.insert(batch.begin() + static_cast<std::ptrdiff_t>(others / 2),
               SequenceInput{Ids(tokens_).first(head), &states[others], LogitRows::kAll});
  Outcome out;
  std::vector<float> logits;
  const auto vocab = static_cast<std::size_t>(model_.config().vocab);
  const auto take = [&](std::size_t rows) {
    const auto mine = std::span(logits).subspan(others / 2 * vocab, rows * vocab);
    out.logits.insert(out.logits.end(), mine.begin(), mine.end());
  };
  if (cancelled_ && cancelled_()) return Error{Code::kCancelled, ""};
  K3_TRY(model_.Forward(batch, *exact_, logits));
  take(head);
  for (std::size_t i = head; i < n(); ++i) {
    for (SequenceInput& s : batch) s.tokens = Ids(tokens_).subspan(i, 1);
    K3_TRY(model_.Forward(batch, *exact_, logits));
    take(1);
  }
  out.image = states[others].Serialize();
  return out;
}

/// A fork goes elsewhere; the original must not notice.
Result<Outcome> Checker::Forked(std::size_t at) {
  Outcome out;
  ModelState state = model_.NewState();
  K3_TRY(Forward(*exact_, Ids(tokens_).first(at), state, out.logits));
  ModelState fork = state, kept = state;
  std::vector<float> logits;
  K3_TRY(Forward(*exact_, Ids(tokens_).first(std::min<std::size_t>(n(), 9)), fork, logits));
  K3_TRY(Forward(*exact_, Ids(tokens_).subspan(at), kept, logits));
  out.logits.insert(out.logits.end(), logits.begin(), logits.end());
  out.image = kept.Serialize();
  return out;
}

/// Through a file and back, as `k3 run --save-state` does.
Result<Outcome> Checker::Saved(std::size_t at) {
  ModelRunner runner(model_, *exact_);
  SequenceState state = NewSequence(runner, options_.seed);
  AppendPrompt(state, tokens_);
  Outcome out;
  K3_TRY(Forward(*exact_, Ids(tokens_).first(at), state.model, out.logits));
  const std::string path = fmt::format("{}/k3-check-{}.k3s", options_.scratch_dir, ::getpid());
  K3_TRY(SaveState(path, state, runner));
  auto restored = LoadState(path, runner);
  ::unlink(path.c_str());
  if (!restored.ok()) return restored.error();
  std::vector<float> logits;
  const std::vector<TokenId> rest(restored->pending().begin(), restored->pending().end());
  K3_TRY(Forward(*exact_, rest, restored->model, logits));
  out.logits.insert(out.logits.end(), logits.begin(), logits.end());
  out.image = restored->model.Serialize();
  return out;
}

Result<Outcome> Checker::Threads(int threads, MathMode math) {
  const auto exec = Make(threads, math);
  return InPieces(*exec, {});
}

std::vector<Checker::Case> Checker::InstructionSets() {
  std::vector<Case> cases;
  for (const cpu::SimdTable* table : cpu::SupportedTables()) {
    cases.push_back([this, table] {
      Exec exec(options_.threads, MathMode::kExact, nullptr);
      exec.ops = std::make_unique<cpu::CpuBackend>(exec.pool, *table);
      return InPieces(exec, {});
    });
  }
  return cases;
}

Result<SelfCheckReport> Checker::Run() {
  if (progress_) progress_("making a text");
  K3_TRY(MakeText());
  report_.tokens = static_cast<std::int64_t>(n());
  K3_ASSIGN(const Outcome want, InPieces(*exact_, {}));
  constexpr MathMode kE = MathMode::kExact, kF = MathMode::kFast;
  K3_TRY(
      Row("cut anywhere", kE, "pieces, down to single tokens, against one pass", want, Cuts(kE)));
  K3_TRY(Row("batched", kE, "beside 1, 3 and 7 other sequences against alone", want,
             {[this] { return Batched(1); }, [this] { return Batched(3); },
              [this] { return Batched(7); }}));
  K3_TRY(Row("forked", kE, "after a copy went elsewhere", want,
             {[this] { return Forked(n() / 2); }, [this] { return Forked(n() - 1); }}));
  K3_TRY(Row("saved and restored", kE, "through a state file", want,
             {[this] { return Saved(n() / 2); }, [this] { return Saved(n() - 1); }}));
  std::vector<Case> threads, fast_threads;
  for (const int t : std::set<int>{1, 2, 3, options_.threads}) {
    threads.push_back([this, t] { return Threads(t, MathMode::kExact); });
    fast_threads.push_back([this, t] { return Threads(t, MathMode::kFast); });
  }
  K3_TRY(Row("threads", kE, "1, 2, 3 threads and all", want, threads));
  K3_TRY(Row("instruction sets", kE, "every one this machine has", want, InstructionSets()));

  K3_ASSIGN(const Outcome fast, InPieces(*fast_, {}));
  K3_TRY(Row("cut on the grid", kF, fmt::format("at multiples of {} against one pass", kFastGrid),
             fast, Cuts(kF)));
  K3_TRY(Row("threads", kF, "1, 2, 3 threads and all", fast, fast_threads));
  K3_TRY(Row("fast against exact", kF, "the same text in both", want,
             {[&]() -> Result<Outcome> { return fast; }}, false));
  return std::move(report_);
}

}  // namespace

Result<SelfCheckReport> RunSelfCheck(const Model& model, const SelfCheckOptions& options,
                                     const std::function<void(const std::string&)>& progress,
                                     const std::function<bool()>& cancelled) {
  if (options.tokens < 8 || options.tokens > model.config().max_positions) {
    return Error{Code::kInvalidArgument,
                 fmt::format("a check over {} tokens was asked for, expected 8 to {}",
                             options.tokens, model.config().max_positions)};
  }
  return Checker(model, options, progress, cancelled).Run();
}

}  // namespace k3
