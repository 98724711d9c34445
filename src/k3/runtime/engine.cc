#include "k3/runtime/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "k3/runtime/engine_core.h"

namespace k3 {
namespace {

Status CheckOptions(const EngineOptions& o) {
  const auto at_least = [](std::string_view name, std::int64_t value, std::int64_t low) -> Status {
    if (value >= low) return {};
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: found {}, expected {} or more", name, value, low)};
  };
  K3_TRY(at_least("context", o.context, 0));
  K3_TRY(at_least("max_running", o.max_running, 1));
  K3_TRY(at_least("max_waiting", o.max_waiting, 1));
  K3_TRY(at_least("prefill_tokens_per_step", o.prefill_tokens_per_step, 1));
  K3_TRY(at_least("state_bytes", o.state_bytes, 1));
  K3_TRY(at_least("max_draft", o.max_draft, 0));
  K3_TRY(at_least("reserve_tokens", o.reserve_tokens, o.max_draft + 1));
  K3_TRY(at_least("cache_bytes", o.cache_bytes, 0));
  K3_TRY(at_least("spill_bytes", o.spill_bytes, 0));
  return {};
}

}  // namespace

/// The core belongs to the thread; everything else to the mutex.
struct Engine::Impl {
  explicit Impl(std::unique_ptr<EngineCore> c) : core(std::move(c)) {}

  void Run();
  bool TakeOrders(std::unique_lock<std::mutex>& lock);
  void Publish();

  std::unique_ptr<EngineCore> core;

  std::mutex mutex;
  std::condition_variable wake, ended_cv;
  std::vector<std::unique_ptr<Sequence>> inbox;
  std::vector<RequestId> cancels;
  std::vector<std::function<void(PrefixCache*)>> cache_users;
  RequestId next_id = 1;
  std::int64_t queued = 0;  // in the core, not started
  std::int64_t max_waiting = 0;
  bool draining = false, stop = false, ended = false;
  std::uint64_t submitted = 0, refused_full = 0, refused_draining = 0, refused_invalid = 0;
  EngineStats stats;

  std::mutex join_mutex;
  std::thread thread;
};

/// Waits for something to do and hands it to the core; false: nothing will come any more.
bool Engine::Impl::TakeOrders(std::unique_lock<std::mutex>& lock) {
  wake.wait(lock, [&] {
    return stop || draining || !inbox.empty() || !cancels.empty() || !cache_users.empty() ||
           !core->idle();
  });
  for (auto& s : inbox) core->Add(std::move(s));
  queued += static_cast<std::int64_t>(inbox.size());
  inbox.clear();
  const std::vector<RequestId> ids = std::exchange(cancels, {});
  const auto users = std::exchange(cache_users, {});
  const bool go_on = !stop && !(draining && core->idle());
  lock.unlock();  // sinks are called from here on
  for (const RequestId id : ids) core->Cancel(id);
  for (const auto& use : users) use(&core->cache());
  return go_on;
}

void Engine::Impl::Publish() {
  const EngineStats& now = core->stats();
  const std::lock_guard lock(mutex);
  stats = now;
  queued = core->queued();
}

void Engine::Impl::Run() {
  while (true) {
    std::unique_lock lock(mutex);
    if (!TakeOrders(lock)) break;
    try {
      core->Schedule();
      Publish();  // before the pass, so that places in the queue are free while it runs
      core->Pass();
    } catch (const std::bad_alloc&) {
      core->EndAll(EngineFinish::kError, Error{Code::kResource, "out of memory in a step"});
    }
    Publish();
  }
  core->EndAll(EngineFinish::kShutdown, {});
  core->SpillCache();
  Publish();
  std::unique_lock lock(mutex);
  while (!cache_users.empty()) {
    const auto users = std::exchange(cache_users, {});
    lock.unlock();
    for (const auto& use : users) use(nullptr);
    lock.lock();
  }
  ended = true;
  ended_cv.notify_all();
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Engine::~Engine() { Drain(std::chrono::milliseconds(0)); }

Result<std::unique_ptr<Engine>> Engine::Create(TokenModel& model, const EngineOptions& options,
                                               TokenModel* draft) {
  K3_TRY(CheckOptions(options));
  if (draft != nullptr && draft->vocab() != model.vocab()) {
    return Error{Code::kInvalidArgument,
                 fmt::format("the draft model's vocabulary has {} tokens, the model's {}",
                             draft->vocab(), model.vocab())};
  }
  CacheOptions cache_options;
  cache_options.bytes = options.cache_bytes;
  if (options.prefix_cache) {
    cache_options.spill_dir = options.spill_dir;
    cache_options.spill_bytes = options.spill_bytes;
  }
  K3_ASSIGN(auto cache, PrefixCache::Create(model, std::move(cache_options)));
  auto core = std::make_unique<EngineCore>(model, options, std::move(cache), draft);
  if (core->capacity(1) < 1) {
    return Error{
        Code::kInvalidArgument,
        fmt::format("{} bytes for states are not enough for one sequence", options.state_bytes)};
  }
  auto impl = std::make_unique<Impl>(std::move(core));
  impl->max_waiting = options.max_waiting;
  impl->stats = impl->core->stats();
  Impl* raw = impl.get();
  try {
    impl->thread = std::thread([raw] { raw->Run(); });
  } catch (const std::system_error& e) {
    return Error{Code::kResource, fmt::format("cannot start the engine's thread: {}", e.what())};
  }
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Result<RequestId> Engine::Submit(EngineRequest request, std::shared_ptr<RequestSink> sink) {
  Impl& e = *impl_;
  // Both touch nothing that changes.
  const Status valid = e.core->Check(request);
  auto sequence = valid.ok() ? e.core->NewSequence(std::move(request), std::move(sink)) : nullptr;
  const std::lock_guard lock(e.mutex);
  if (!valid.ok()) {
    ++e.refused_invalid;
    return valid.error();
  }
  if (e.draining || e.stop) {
    ++e.refused_draining;
    return Error{Code::kCancelled, "the engine is shutting down"};
  }
  const std::int64_t waiting = e.queued + static_cast<std::int64_t>(e.inbox.size());
  if (waiting >= e.max_waiting) {
    ++e.refused_full;
    return Error{Code::kResource, fmt::format("{} requests are waiting, the queue holds {}",
                                              waiting, e.max_waiting)};
  }
  const RequestId id = e.next_id++;
  ++e.submitted;
  sequence->id = id;
  e.inbox.push_back(std::move(sequence));
  e.wake.notify_one();
  return id;
}

void Engine::Cancel(RequestId id) {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->ended) return;
  impl_->cancels.push_back(id);
  impl_->wake.notify_one();
}

void Engine::UseCache(std::function<void(PrefixCache*)> use) {
  {
    const std::lock_guard lock(impl_->mutex);
    if (!impl_->ended) {
      impl_->cache_users.push_back(std::move(use));
      impl_->wake.notify_one();
      return;
    }
  }
  use(nullptr);
}

void Engine::Drain(std::chrono::milliseconds timeout) {
  Impl& e = *impl_;
  {
    std::unique_lock lock(e.mutex);
    e.draining = true;
    e.wake.notify_one();
    e.ended_cv.wait_for(lock, timeout, [&] { return e.ended; });
    e.stop = true;
    e.wake.notify_one();
  }
  const std::lock_guard lock(e.join_mutex);
  if (e.thread.joinable()) e.thread.join();
}

EngineStats Engine::stats() const {
  const std::lock_guard lock(impl_->mutex);
  EngineStats s = impl_->stats;
  s.waiting = impl_->queued + static_cast<std::int64_t>(impl_->inbox.size());
  s.draining = impl_->draining;
  s.submitted = impl_->submitted;
  s.refused_full = impl_->refused_full;
  s.refused_draining = impl_->refused_draining;
  s.refused_invalid = impl_->refused_invalid;
  return s;
}

std::int64_t Engine::context() const { return impl_->core->context(); }
std::int64_t Engine::capacity(std::int64_t tokens) const { return impl_->core->capacity(tokens); }

}  // namespace k3
