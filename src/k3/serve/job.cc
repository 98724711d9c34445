#include "k3/serve/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>

#include "k3/base/rng.h"
#include "k3/grammar/token_constraint.h"

namespace k3::serve {
namespace {

using Clock = std::chrono::steady_clock;

double Since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Choice i of a prompt: the given seed first, then others that follow from it.
std::uint64_t SeedOf(std::uint64_t seed, std::int64_t choice) {
  if (choice == 0) return seed;
  Rng rng(seed ^ (static_cast<std::uint64_t>(choice) * 0xD1342543DE82EF95ull));
  return rng.Next();
}

class Job : public std::enable_shared_from_this<Job> {
 public:
  Job(std::shared_ptr<const ServedModel> model, Generation generation,
      std::unique_ptr<ReplyWriter> writer, std::function<void(const JobReport&)> report)
      : model_(std::move(model)),
        generation_(std::move(generation)),
        writer_(std::move(writer)),
        report_(std::move(report)) {}

  ApiStatus Prepare(const std::string& call_id_prefix);
  void Submit();
  void ClientLeft();
  void Refuse(const ApiError& error) { End(&error, "refused"); }

  // Of the engine's thread.
  void OnStart(std::size_t i, std::int64_t cached);
  void OnPromptLogprobs(std::size_t i, std::span<const SampleResult> tokens);
  bool OnToken(std::size_t i, const SampleResult& token);
  void OnFinish(std::size_t i, const EngineResult& result);

 private:
  struct State {
    explicit State(ReplyReader r) : reader(std::move(r)) {}
    ReplyReader reader;
    Choice choice;
    std::int64_t tokens = 0, reasoning_tokens = 0, cached = 0;
    bool ended = false;
  };

  EngineRequest Request(std::size_t i) const;
  void Add(std::size_t i, const Piece& piece);
  void Fail(const EngineResult& result);
  Usage UsageNow() const;
  void End(const ApiError* error, const char* outcome);
  void CancelAll();
  bool EndsAtEosItself() const { return generation_.echo && generation_.top_logprobs >= 0; }

  const std::shared_ptr<const ServedModel> model_;
  const Generation generation_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;  // guards what follows; never held while the engine is called
  std::unique_ptr<ReplyWriter> writer_;
  std::function<void(const JobReport&)> report_;
  std::vector<State> states_;
  std::vector<RequestId> ids_;
  std::size_t open_ = 0;
  bool started_ = false, over_ = false;
  double first_token_s_ = -1, first_answer_s_ = -1;
};

class Sink final : public RequestSink {
 public:
  Sink(std::shared_ptr<Job> job, std::size_t i) : job_(std::move(job)), i_(i) {}
  void OnStart(std::int64_t cached) override { job_->OnStart(i_, cached); }
  void OnPromptLogprobs(std::span<const SampleResult> tokens) override {
    job_->OnPromptLogprobs(i_, tokens);
  }
  bool OnToken(const SampleResult& token) override { return job_->OnToken(i_, token); }
  void OnFinish(const EngineResult& result) override { job_->OnFinish(i_, result); }

 private:
  std::shared_ptr<Job> job_;
  std::size_t i_;
};

ApiStatus Job::Prepare(const std::string& call_id_prefix) {
  const auto& g = generation_;
  const std::size_t n = g.prompts.size() * static_cast<std::size_t>(g.n);
  states_.reserve(n);
  for (std::size_t i = 0; i < n; ++i) {
    ReplyReader::Options o;
    o.chat = g.chat;
    o.thinking = g.chat_options.thinking;
    o.stop = g.stop;
    o.keep_tokens = g.top_logprobs >= 0;
    o.call_id_prefix = i == 0 ? call_id_prefix : fmt::format("{}{}_", call_id_prefix, i);
    auto reader = ReplyReader::Create(*model_, std::move(o));
    if (!reader.ok()) return BadField("stop", reader.message());
    State& s = states_.emplace_back(std::move(reader).value());
    if (g.echo) s.choice.prompt = g.prompts[i / static_cast<std::size_t>(g.n)];
  }
  open_ = n;
  for (const auto& prompt : g.prompts) {
    const auto length = static_cast<std::int64_t>(prompt.size());
    if (length <= model_->context) continue;
    return TooLong(length, false, *model_, g.prompt_field);
  }
  return {};
}

EngineRequest Job::Request(std::size_t i) const {
  const auto& g = generation_;
  const auto n = static_cast<std::size_t>(g.n);
  EngineRequest r;
  r.prompt = g.prompts[i / n];
  r.sampling = g.sampling;
  r.sampling.seed = SeedOf(g.sampling.seed, static_cast<std::int64_t>(i % n));
  const std::int64_t room = model_->context - static_cast<std::int64_t>(r.prompt.size());
  r.max_tokens = std::min(g.max_tokens.value_or(room), room);
  if (!g.ignore_eos && !EndsAtEosItself()) r.eos = model_->eos;
  if (g.chat && model_->markup) r.eos.push_back(model_->markup->end);
  r.top_logprobs = g.top_logprobs;
  r.prompt_logprobs = EndsAtEosItself();
  r.priority = g.priority;
  if (g.timeout_s) {
    r.deadline = start_ + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(*g.timeout_s));
  }
  if (g.constraint != nullptr) r.constraint = g.constraint->Clone();
  r.prefix_cache = g.prefix_cache;
  r.snapshot_at = g.snapshot_at;
  return r;
}

void Job::Submit() {
  const std::size_t n = states_.size();
  for (std::size_t i = 0; i < n; ++i) {
    const auto id =
        model_->engine->Submit(Request(i), std::make_shared<Sink>(shared_from_this(), i));
    if (!id.ok()) {
      const ApiError error = FromEngine(id.error());
      {
        const std::lock_guard lock(mutex_);
        End(&error, "refused");
      }
      return CancelAll();
    }
    const std::lock_guard lock(mutex_);
    ids_.push_back(*id);
    if (over_) break;
  }
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    over = over_;
  }
  if (over) CancelAll();
}

void Job::CancelAll() {
  std::vector<RequestId> ids;
  {
    const std::lock_guard lock(mutex_);
    ids = ids_;
  }
  for (const RequestId id : ids) model_->engine->Cancel(id);
}

void Job::ClientLeft() {
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    End(nullptr, "cancelled");
  }
  CancelAll();
}

void Job::OnStart(std::size_t i, std::int64_t cached) {
  const std::lock_guard lock(mutex_);
  states_[i].cached = cached;
  if (over_ || std::exchange(started_, true)) return;
  Usage usage = UsageNow();
  usage.cached_tokens = cached;
  writer_->Start(usage);
}

void Job::OnPromptLogprobs(std::size_t i, std::span<const SampleResult> tokens) {
  const std::lock_guard lock(mutex_);
  auto& list = states_[i].choice.prompt_tokens;
  list.insert(list.end(), tokens.begin(), tokens.end());
}

void Job::Add(std::size_t i, const Piece& piece) {
  if (piece.empty()) return;
  State& s = states_[i];
  s.choice.reasoning += piece.delta.reasoning;
  s.choice.content += piece.delta.content;
  for (const chat::ToolCallDelta& d : piece.delta.tool_calls) {
    if (d.index >= s.choice.tool_calls.size()) s.choice.tool_calls.resize(d.index + 1);
    chat::ToolCall& call = s.choice.tool_calls[d.index];
    if (!d.id.empty()) {
      call.id = d.id;
      call.name = d.name;
    }
    call.arguments += d.arguments;
  }
  s.choice.tokens.insert(s.choice.tokens.end(), piece.tokens.begin(), piece.tokens.end());
  const bool answer = !piece.delta.content.empty() || !piece.delta.tool_calls.empty();
  if (answer && first_answer_s_ < 0) first_answer_s_ = Since(start_);
  writer_->Add(i, piece);
}

bool Job::OnToken(std::size_t i, const SampleResult& token) {
  const std::lock_guard lock(mutex_);
  if (over_) return false;
  State& s = states_[i];
  if (first_token_s_ < 0) first_token_s_ = Since(start_);
  if (EndsAtEosItself() && !generation_.ignore_eos) {
    const auto& eos = model_->eos;
    if (std::find(eos.begin(), eos.end(), token.token) != eos.end()) {
      s.choice.tokens.push_back(token);  // its log-probability was asked for
      return false;
    }
  }
  ++s.tokens;
  const Piece piece = s.reader.Push(token);
  if (generation_.chat && generation_.chat_options.thinking && s.choice.content.empty() &&
      piece.delta.content.empty() && s.choice.tool_calls.empty()) {
    ++s.reasoning_tokens;
  }
  Add(i, piece);
  return !s.reader.done();
}

void Job::OnFinish(std::size_t i, const EngineResult& result) {
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    State& s = states_[i];
    if (over_ || std::exchange(s.ended, true)) return;
    const bool whole =
        result.finish == EngineFinish::kStop || result.finish == EngineFinish::kLength;
    if (!whole) {
      Fail(result);
      failed = true;
    } else {
      Add(i, s.reader.Finish(result.finish));
      s.choice.finish_reason = s.reader.finish_reason();
      s.choice.matched_stop = s.reader.matched_stop();
      writer_->Close(i, s.choice);
      if (--open_ == 0) End(nullptr, "ok");
    }
  }
  if (failed) CancelAll();
}

void Job::Fail(const EngineResult& result) {
  ApiError error;
  switch (result.finish) {
    case EngineFinish::kDeadline:
      error.status = 504;
      error.code = "timeout";
      error.message = "the request's time ran out";
      break;
    case EngineFinish::kError:
      error = FromEngine(result.status.ok() ? Error{Code::kIo, "the engine failed"}
                                            : result.status.error());
      if (error.status < 500) error.status = 500;
      break;
    default:
      error.status = 503;
      error.code = "shutting_down";
      error.message = "the server is stopping";
      error.retry_after_s = 5;
  }
  End(&error, "failed");
}

Usage Job::UsageNow() const {
  Usage u;
  const auto n = static_cast<std::size_t>(generation_.n);
  for (std::size_t p = 0; p < generation_.prompts.size(); ++p) {
    const auto length = static_cast<std::int64_t>(generation_.prompts[p].size());
    u.prompt_tokens += length;
    u.cached_tokens += std::min(states_[p * n].cached, length);
  }
  for (const State& s : states_) {
    u.completion_tokens += s.tokens;
    u.reasoning_tokens += s.reasoning_tokens;
  }
  return u;
}

/// With the mutex held. Afterwards nothing more is written.
void Job::End(const ApiError* error, const char* outcome) {
  if (std::exchange(over_, true)) return;
  const Usage usage = UsageNow();
  JobReport report;
  report.outcome = outcome;
  report.usage = usage;
  report.first_token_s = first_token_s_;
  report.first_answer_s = first_answer_s_;
  report.total_s = Since(start_);
  if (error != nullptr) report.status = error->status;
  if (error == nullptr && std::string_view(outcome) == "cancelled") report.status = 499;
  // First: who has the answer finds it counted.
  if (report_) report_(report);
  report_ = nullptr;
  if (error != nullptr) {
    writer_->Fail(*error);
  } else if (std::string_view(outcome) == "ok") {
    std::vector<Choice> choices;
    for (State& s : states_) choices.push_back(std::move(s.choice));
    writer_->Done(std::move(choices), usage);
  }
  writer_ = nullptr;
}

}  // namespace

void StartJob(std::shared_ptr<const ServedModel> model, Generation generation,
              std::unique_ptr<ReplyWriter> writer, const std::shared_ptr<Responder>& out,
              std::string call_id_prefix, std::function<void(const JobReport&)> report) {
  const auto job = std::make_shared<Job>(std::move(model), std::move(generation), std::move(writer),
                                         std::move(report));
  if (const auto error = job->Prepare(call_id_prefix)) return job->Refuse(*error);
  out->OnClose([job] { job->ClientLeft(); });
  job->Submit();
}

}  // namespace k3::serve
