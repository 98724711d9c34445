#include "k3/serve/engine_metrics.h"

#include <utility>

#include "k3/serve/metric_families_internal.h"

namespace k3::serve {
namespace {

using internal::Families;
using prometheus::MetricFamily;
using prometheus::MetricType;

void AddRequests(const EngineStats& s, Families& f) {
  f.Gauge("k3_requests_running", "Sequences that have a state", s.running);
  f.Gauge("k3_requests_waiting", "Sequences in the queue", s.waiting);
  f.Gauge("k3_requests_preempted", "Sequences that gave way and wait to go on", s.preempted);
  f.Begin("k3_sequences_capacity", "Most sequences that run at once, of that length",
          MetricType::Gauge);
  f.Value("length", "short", s.capacity_short);
  f.Value("length", "context", s.capacity_context);
  f.Gauge("k3_draining", "1 while nothing new is accepted", s.draining ? 1 : 0);
  f.Counter("k3_sequences_submitted_total", "Sequences accepted into the queue", s.submitted);
  f.Begin("k3_sequences_refused_total", "Sequences refused at once", MetricType::Counter);
  f.Value("reason", "queue_full", s.refused_full);
  f.Value("reason", "draining", s.refused_draining);
  f.Value("reason", "invalid", s.refused_invalid);
  f.Begin("k3_sequences_finished_total", "Sequences by how they ended", MetricType::Counter);
  for (std::size_t i = 0; i < s.finished.size(); ++i) {
    f.Value("finish", Name(static_cast<EngineFinish>(i)), s.finished[i]);
  }
  f.Begin("k3_sequences_aborted_total",
          "Sequences cancelled, late or shut down, by where they were", MetricType::Counter);
  for (std::size_t i = 0; i < s.aborted.size(); ++i) {
    f.Value("phase", Name(static_cast<EnginePhase>(i)), s.aborted[i]);
  }
  f.Counter("k3_preemptions_total", "Times a sequence gave way", s.preemptions);
  f.Counter("k3_preemptions_dropped_total", "Those whose state was dropped and read again",
            s.preemptions_dropped);
  f.Counter("k3_numeric_errors_total", "Sequences ended because a score was not finite",
            s.numeric_errors);
}

void AddTokens(const EngineStats& s, Families& f) {
  f.Counter("k3_prompt_tokens_total", "Prompt tokens of the sequences that started",
            s.prompt_tokens);
  f.Counter("k3_prompt_tokens_cached_total", "Of those, continued from snapshots", s.cached_tokens);
  f.Counter("k3_prefill_tokens_total", "Prompt tokens read, repeated ones included",
            s.prefill_tokens);
  f.Counter("k3_generated_tokens_total", "Tokens given out", s.decode_tokens);
  f.Counter("k3_steps_total", "Forward passes over the batch", s.steps);
  f.Counter("k3_step_seconds_total", "Time spent in them", s.step_seconds);
  f.Counter("k3_draft_runs_total", "Drafts made", s.drafts);
  f.Counter("k3_draft_tokens_total", "Tokens of drafts", s.drafted_tokens);
  f.Counter("k3_draft_tokens_accepted_total", "Tokens of drafts that were right",
            s.accepted_tokens);
  f.Counter("k3_draft_rollbacks_total", "Drafts that were wrong somewhere", s.rollbacks);
}

void AddMemory(const EngineStats& s, Families& f) {
  f.Begin("k3_memory_bytes", "Bytes in use by component", MetricType::Gauge);
  f.Value("component", "state", s.state_bytes);
  f.Value("component", "parked", s.parked_bytes);
  f.Value("component", "prefix_cache", s.cache.bytes);
  f.Value("component", "prefix_cache_disk", s.cache.spilled_bytes);
  f.Begin("k3_memory_limit_bytes", "Budgets by component", MetricType::Gauge);
  f.Value("component", "state", s.state_limit);
  f.Value("component", "prefix_cache", s.cache_limit);
  f.Gauge("k3_state_planned_bytes", "What the running sequences may grow to", s.state_planned);
  f.Begin("k3_prefix_cache_requests_total", "Sequences by what the prefix cache gave them",
          MetricType::Counter);
  std::uint64_t misses = 0;
  for (const std::uint64_t n : s.cache.misses) misses += n;
  f.Value("result", "hit_memory", s.cache.hits - s.cache.spill_hits);
  f.Value("result", "hit_disk", s.cache.spill_hits);
  f.Value("result", "miss", misses);
  f.Begin("k3_prefix_cache_misses_total", "Why there was no snapshot to continue from",
          MetricType::Counter);
  for (std::size_t i = 0; i < s.cache.misses.size(); ++i) {
    f.Value("reason", Name(static_cast<CacheMiss>(i)), s.cache.misses[i]);
  }
  f.Begin("k3_snapshots", "Snapshots there are", MetricType::Gauge);
  f.Value("tier", "memory", s.cache.snapshots);
  f.Value("tier", "disk", s.cache.spilled_snapshots);
  f.Begin("k3_snapshot_events_total", "What happened to snapshots", MetricType::Counter);
  f.Value("event", "inserted", s.cache.inserted);
  f.Value("event", "refused", s.cache.refused);
  f.Value("event", "evicted", s.cache.evicted);
  f.Value("event", "spilled", s.cache.spilled);
  f.Value("event", "damaged", s.cache.damaged);
}

}  // namespace

std::vector<MetricFamily> EngineFamilies(const EngineStats& s) {
  Families f;
  AddRequests(s, f);
  AddTokens(s, f);
  AddMemory(s, f);
  f.Distribution("k3_queue_seconds", "From the queue's entrance to the start", s.queue);
  f.Distribution("k3_ttft_seconds", "From the queue's entrance to the first token", s.ttft);
  f.Distribution("k3_itl_seconds", "Between two tokens of a sequence", s.inter_token);
  f.Distribution("k3_e2e_seconds", "From the queue's entrance to the end of a sequence", s.e2e);
  f.Distribution("k3_batch_sequences", "Sequences of one forward pass", s.batch_size);
  f.Distribution("k3_step_tokens", "Tokens of one forward pass", s.step_tokens);
  f.Distribution("k3_accepted_draft_tokens", "Tokens of one draft that were right",
                 s.accepted_length);
  return std::move(f.list);
}

}  // namespace k3::serve
