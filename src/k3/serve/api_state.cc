// Saving and restoring what is remembered of a text: POST /slots/ID?action=save|restore|erase.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "k3/io/json.h"
#include "k3/runtime/prefix_cache.h"
#include "k3/serve/api_call_internal.h"
#include "k3/serve/generation.h"
#include "k3/serve/job.h"
#include "k3/serve/reply_writer.h"
#include "k3/serve/state_files.h"

namespace k3::serve {
namespace {

constexpr std::int64_t kSlots = 64;

/// One request about a file, wherever its answer comes from.
struct StateCall {
  std::shared_ptr<Responder> out;
  std::shared_ptr<const ServedModel> model;
  std::int64_t slot = 0;
  std::string name;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();

  void Refuse(const ApiError& error) const { out->Send(ErrorReply(error, Dialect::kOpenAi)); }
  /// The keys are those of llama.cpp's server.
  void Answer(const char* tokens_key, std::int64_t tokens, const char* bytes_key,
              std::int64_t bytes, const char* ms_key) const {
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
    HttpReply reply;
    reply.body = Dump({{"id_slot", slot},
                       {"filename", name},
                       {tokens_key, tokens},
                       {bytes_key, bytes},
                       {"timings", {{ms_key, ms.count()}}}});
    out->Send(std::move(reply));
  }
};

ApiError Busy() {
  ApiError e;
  e.status = 429;
  e.code = "queue_full";
  e.message = "other states are being written or read";
  e.retry_after_s = 1;
  return e;
}

ApiError Stopping() { return FromEngine(Error{Code::kCancelled, "the server is stopping"}); }

ApiError DoesNotFit() {
  ApiError e;
  e.message = "the prefix cache cannot hold the state of this text (--cache-memory)";
  e.code = "state_too_large";
  return e;
}

ApiStatus ReadSlot(std::string_view digits, std::int64_t& slot) {
  const bool number = !digits.empty() && digits.size() <= 9 &&
                      digits.find_first_not_of("0123456789") == digits.npos;
  if (!number) {
    return BadField("id_slot", fmt::format("found \"{}\", expected a number", Printable(digits)));
  }
  slot = std::stoll(std::string(digits));
  return {};
}

/// The value of `action` in "a=b&action=save".
std::string_view ActionOf(std::string_view query) {
  constexpr std::string_view kKey = "action=";
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    if (pair.starts_with(kKey)) return pair.substr(kKey.size());
    query.remove_prefix(std::min(query.size(), pair.size() + 1));
  }
  return {};
}

/// Waits for the text to be read, takes its snapshots out of the cache and has them written.
class SaveWriter final : public ReplyWriter {
 public:
  SaveWriter(std::shared_ptr<const StateCall> call, std::vector<TokenId> tokens)
      : call_(std::move(call)), tokens_(std::move(tokens)) {}

  void Done(std::vector<Choice>, const Usage&) override {
    call_->model->engine->UseCache([call = call_, tokens = std::move(tokens_)](PrefixCache* cache) {
      try {
        TakeSnapshots(call, tokens, cache);
      } catch (const std::bad_alloc&) {
        call->Refuse(FromEngine(Error{Code::kIo, "out of memory while a state was copied"}));
      }
    });
  }
  void Fail(const ApiError& error) override { call_->Refuse(error); }

 private:
  static void TakeSnapshots(const std::shared_ptr<const StateCall>& call,
                            const std::vector<TokenId>& tokens, PrefixCache* cache) {
    if (cache == nullptr) return call->Refuse(Stopping());
    auto list = std::make_shared<std::vector<SavedSnapshot>>(
        cache->Along(tokens, kMostSavedSnapshots,
                     std::min(cache->budget(), call->model->states->limits().bytes)));
    if (list->empty() || list->front().tokens.size() != tokens.size()) {
      return call->Refuse(DoesNotFit());
    }
    const bool posted = call->model->states->Post([call, list] {
      std::int64_t bytes = 0;
      if (const auto error = call->model->states->Save(call->name, *list, bytes)) {
        return call->Refuse(*error);
      }
      const auto n = static_cast<std::int64_t>(list->front().tokens.size());
      call->Answer("n_saved", n, "n_written", bytes, "save_ms");
    });
    if (!posted) call->Refuse(Busy());
  }

  const std::shared_ptr<const StateCall> call_;
  std::vector<TokenId> tokens_;
};

/// On the engine's thread. The deepest last: what does not fit goes in the order of its worth.
void PutSnapshots(const std::shared_ptr<const StateCall>& call, std::vector<SavedSnapshot>& list,
                  std::int64_t bytes, PrefixCache* cache) {
  if (cache == nullptr) return call->Refuse(Stopping());
  std::int64_t restored = 0;
  for (auto at = list.rbegin(); at != list.rend(); ++at) {
    cache->Insert(at->tokens, std::move(at->snapshot));
    restored = std::max(restored, cache->Peek(at->tokens, false));
  }
  if (restored == 0) return call->Refuse(DoesNotFit());
  call->Answer("n_restored", restored, "n_read", bytes, "restore_ms");
}

/// On the thread for files.
void RestoreFile(const std::shared_ptr<const StateCall>& call) {
  auto list = std::make_shared<std::vector<SavedSnapshot>>();
  std::int64_t bytes = 0;
  if (const auto error = call->model->states->Restore(call->name, *list, bytes)) {
    return call->Refuse(*error);
  }
  call->model->engine->UseCache([call, list, bytes](PrefixCache* cache) {
    try {
      PutSnapshots(call, *list, bytes, cache);
    } catch (const std::bad_alloc&) {
      call->Refuse(FromEngine(Error{Code::kIo, "out of memory while a state was restored"}));
    }
  });
}

void EraseFile(const std::shared_ptr<const StateCall>& call) {
  std::int64_t bytes = 0;
  if (const auto error = call->model->states->Erase(call->name, bytes)) {
    return call->Refuse(*error);
  }
  HttpReply reply;
  reply.body = Dump({{"id_slot", call->slot}, {"filename", call->name}, {"n_freed", bytes}});
  call->out->Send(std::move(reply));
}

}  // namespace

void Api::RememberSlot(const Generation& g) {
  if (g.slot < 0 || g.slot >= kSlots) return;
  SlotText text{g.prompts.front(), g.snapshot_at};
  const std::lock_guard lock(mutex_);
  slots_.insert_or_assign(g.slot, std::move(text));
}

/// The text as it would be asked for, a body of /v1/completions or /v1/chat/completions, or else
/// the last prompt that named the slot. Only the reading of it is left in `out`: one token is
/// drawn, and its scores are kept with the state.
ApiStatus Api::ReadSavedText(const nlohmann::json& body, std::int64_t slot,
                             const ServedModel& model, Generation& out) const {
  const JsonReader r(body, "request");
  Generation g;
  if (r.Has("messages")) {
    K3_API_TRY(ReadChat(body, model, g));
  } else if (r.Has("prompt")) {
    K3_API_TRY(ReadCompletion(body, model, g));
  } else {
    const std::lock_guard lock(mutex_);
    const auto found = slots_.find(slot);
    if (found == slots_.end()) {
      return BadField("prompt", fmt::format("is missing, and no request had \"id_slot\": {} (of 0 "
                                            "to {}): which text is to be saved?",
                                            slot, kSlots - 1));
    }
    g.prompts = {found->second.prompt};
    g.snapshot_at = found->second.snapshot_at;
    g.prompt_field = "prompt";
  }
  if (g.prompts.size() != 1) return BadField("prompt", "found several, expected one text");
  const auto length = static_cast<std::int64_t>(g.prompts.front().size());
  if (length >= model.context) return TooLong(length, false, model, g.prompt_field);
  // In fast mode the last point that a longer text can go on from; in exact mode that is the end.
  if (model.states->model().math() == MathMode::kFast) g.snapshot_at.push_back(length - 1);
  out.prompts = std::move(g.prompts);
  out.snapshot_at = std::move(g.snapshot_at);
  out.prompt_field = g.prompt_field;
  out.priority = g.priority;
  out.timeout_s = g.timeout_s;
  out.max_tokens = 1;
  return {};
}

ApiStatus Api::Slots(Call& call) {
  if (call.model->states == nullptr) {
    ApiError e;
    e.status = 404;
    e.code = "unsupported";
    e.message = "states are not saved here: the server was started without --state-dir";
    return e;
  }
  const auto state = std::make_shared<StateCall>();
  state->out = call.out;
  state->model = call.model;
  constexpr std::size_t kPrefix = std::string_view("/slots/").size();
  K3_API_TRY(ReadSlot(std::string_view(call.request.path).substr(kPrefix), state->slot));
  nlohmann::json body;
  K3_API_TRY(ParseBody(call.request.body, body));
  K3_API_TRY(Take(JsonReader(body, "request").String("filename"), "filename", state->name));
  K3_API_TRY(StateFiles::CheckName(state->name));
  const std::string_view action = ActionOf(call.request.query);
  if (action == "save") {
    K3_API_TRY(call.model->states->CheckTarget(state->name));
    Generation g;
    K3_API_TRY(ReadSavedText(body, state->slot, *call.model, g));
    auto writer = std::make_unique<SaveWriter>(state, g.prompts.front());
    ++*jobs_;
    StartJob(call.model, std::move(g), std::move(writer), call.out, "call_",
             [jobs = jobs_](const JobReport&) { --*jobs; });
    return {};
  }
  if (action != "restore" && action != "erase") {
    return BadField(
        "action", fmt::format("found \"{}\", expected save, restore or erase", Printable(action)));
  }
  const bool posted = call.model->states->Post(
      [state, restore = action == "restore"] { restore ? RestoreFile(state) : EraseFile(state); });
  if (!posted) return Busy();
  return {};
}

}  // namespace k3::serve
