#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "k3/io/json.h"
#include "k3/serve/load.h"

namespace k3::serve {
namespace {

using Clock = HttpClient::Clock;
using nlohmann::json;

double SecondsBetween(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

/// Random words; enough of them that requests differ.
std::string RandomText(std::uint64_t seed) {
  static constexpr std::string_view kParts[] = {"ba", "re", "ti",  "lo", "mun", "ka", "se", "dor",
                                                "vi", "na", "pel", "su", "ran", "ge", "wo", "fin"};
  Rng rng(seed ^ 0x7e97);
  std::string text;
  for (int word = 0; word < 8192; ++word) {
    text += ' ';
    const std::uint64_t bits = rng.Next();
    for (std::uint64_t part = 0; part < 1 + bits % 3; ++part) {
      text += kParts[bits >> (8 + 4 * part) & 15];
    }
  }
  return text;
}

std::vector<std::string> Words(std::string_view text) {
  std::vector<std::string> words;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = text.find_first_not_of(" \t\r\n", at);
    if (begin == text.npos) break;
    at = std::min(text.find_first_of(" \t\r\n", begin), text.size());
    words.emplace_back(1, ' ').append(text.substr(begin, at - begin));
  }
  return words;
}

std::optional<std::vector<TokenId>> ReadTokens(const HttpAnswer& answer) {
  if (answer.end != HttpEnd::kComplete || answer.status != 200) return std::nullopt;
  const auto parsed = ParseJson(answer.body, "/tokenize");
  if (!parsed.ok() || !parsed->is_object()) return std::nullopt;
  const JsonReader reader(*parsed, "/tokenize");
  const auto list = reader.OptIntList("tokens", 0, std::numeric_limits<TokenId>::max());
  if (!list.ok() || !*list || (*list)->empty()) return std::nullopt;
  std::vector<TokenId> ids;
  for (const std::int64_t id : **list) ids.push_back(static_cast<TokenId>(id));
  return ids;
}

HeaderList Headers(const LoadOptions& o) {
  HeaderList headers{{"Content-Type", "application/json"}};
  if (!o.key.empty()) headers.emplace_back("Authorization", "Bearer " + o.key);
  return headers;
}

/// Reads one answer's events as they come.
class Listener final : public HttpCallSink {
 public:
  using Done = std::function<void()>;
  static constexpr std::size_t kLongestLine = std::size_t{1} << 20;

  Listener(LoadSample& sample, Clock::time_point begin, Done done)
      : sample_(sample), begin_(begin), done_(std::move(done)) {}

  void OnHead(int status) override { sample_.status = status; }

  bool OnBody(std::string_view part) override {
    if (sample_.status != 200) return true;  // whatever it says; the length is limited
    now_ = SecondsBetween(begin_, Clock::now());
    text_ += part;
    std::size_t at = 0;
    for (std::size_t end; (end = text_.find('\n', at)) != text_.npos; at = end + 1) {
      if (!Line(std::string_view(text_).substr(at, end - at))) return false;
    }
    text_.erase(0, at);
    return text_.size() <= kLongestLine || Stop("bad json");
  }

  void OnEnd(HttpEnd end) override {
    sample_.end_s = SecondsBetween(begin_, Clock::now());
    if (sample_.error.empty()) sample_.error = Verdict(end);
    done_();
  }

 private:
  std::string Verdict(HttpEnd end) const {
    if (end != HttpEnd::kComplete) return std::string(Name(end));
    if (sample_.status != 200) return fmt::format("http {}", sample_.status);
    if (!finished_) return std::string(Name(HttpEnd::kCut));
    return sample_.parts == 0 ? "no text" : "";
  }

  bool Line(std::string_view line) {
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!line.starts_with("data:")) return true;
    line.remove_prefix(5);
    if (line.starts_with(' ')) line.remove_prefix(1);
    if (line == "[DONE]") {
      finished_ = true;
      return true;
    }
    const auto event = ParseJson(line, "event");
    if (!event.ok() || !event->is_object()) return Stop("bad json");
    if (event->contains("error")) return Stop("error event");
    ReadUsage(*event);
    if (HasText(*event)) Heard();
    return true;
  }

  bool Stop(std::string_view error) {
    sample_.error = error;
    return false;
  }

  static bool HasText(const json& event) {
    const auto choices = event.find("choices");
    if (choices == event.end() || !choices->is_array() || choices->empty()) return false;
    const json& choice = choices->front();
    if (!choice.is_object()) return false;
    const auto filled = [](const json& object, const char* key) {
      const auto it = object.find(key);
      return it != object.end() && it->is_string() && !it->get_ref<const std::string&>().empty();
    };
    if (filled(choice, "text")) return true;
    const auto delta = choice.find("delta");
    return delta != choice.end() && delta->is_object() &&
           (filled(*delta, "content") || filled(*delta, "reasoning_content"));
  }

  void ReadUsage(const json& event) {
    const auto usage = event.find("usage");
    if (usage == event.end() || !usage->is_object()) return;
    const auto number = [](const json& object, const char* key, std::int64_t& out) {
      const auto it = object.find(key);
      if (it == object.end() || !it->is_number_integer()) return;
      const auto value = it->get<std::int64_t>();
      if (value >= 0 && value <= std::int64_t{1} << 40) out = value;
    };
    number(*usage, "prompt_tokens", sample_.prompt_tokens);
    number(*usage, "completion_tokens", sample_.completion_tokens);
    const auto details = usage->find("prompt_tokens_details");
    if (details != usage->end() && details->is_object()) {
      number(*details, "cached_tokens", sample_.cached_tokens);
    }
  }

  void Heard() {
    ++sample_.parts;
    if (sample_.ttft_s < 0) {
      sample_.ttft_s = now_;
    } else {
      sample_.gaps_s.push_back(now_ - sample_.last_s);
    }
    sample_.last_s = now_;
  }

  LoadSample& sample_;
  const Clock::time_point begin_;
  const Done done_;
  double now_ = 0;
  bool finished_ = false;
  std::string text_;
};

class Runner {
 public:
  Runner(const LoadOptions& o, const PromptPool& pool, HttpClient& client,
         const std::atomic<bool>* cancel, const std::function<void(std::int64_t)>& progress)
      : options_(o),
        pool_(pool),
        client_(client),
        cancel_(cancel),
        progress_(progress),
        plan_(PlanLoad(o)),
        samples_(plan_.size()),
        start_(Clock::now()) {}

  void Begin() {
    if (options_.rate > 0) return Arrive();
    const double step = options_.ramp_s / static_cast<double>(options_.concurrency);
    for (std::int64_t user = 0; user < options_.concurrency; ++user) {
      Ask(start_ + std::chrono::duration_cast<Clock::duration>(
                       std::chrono::duration<double>(step * static_cast<double>(user))));
    }
  }
  Result<LoadRun> Take() {
    if (cancel_ != nullptr && cancel_->load()) return Error{Code::kCancelled, ""};
    LoadRun run;
    for (const LoadSample& s : samples_) run.seconds = std::max(run.seconds, s.begin_s + s.end_s);
    run.samples = std::move(samples_);
    return run;
  }

 private:
  void Arrive() {
    if (next_ == plan_.size()) return;
    const auto due = start_ + std::chrono::duration_cast<Clock::duration>(
                                  std::chrono::duration<double>(plan_[next_].due_s));
    client_.At(due, [this, due] {
      Send(next_++, due, [] {});
      Arrive();
    });
  }
  void Ask(Clock::time_point when) {
    if (next_ == plan_.size()) return;
    // Through a timer: a server that refuses at once would make this a deep recursion.
    client_.At(when, [this] {
      if (next_ == plan_.size()) return;
      Send(next_++, Clock::now(), [this] { Ask(Clock::now()); });
    });
  }
  void Send(std::size_t i, Clock::time_point begin, std::function<void()> after) {
    LoadSample& sample = samples_[i];
    sample.begin_s = SecondsBetween(start_, begin);
    sample.shared = plan_[i].prefix >= 0;
    HttpCall call;
    call.path = options_.chat ? "/v1/chat/completions" : "/v1/completions";
    call.headers = Headers(options_);
    call.body = RequestBody(options_, pool_, plan_[i], i);
    sample.late_s = SecondsBetween(begin, Clock::now());
    client_.Start(std::move(call),
                  std::make_shared<Listener>(sample, begin, [this, after = std::move(after)] {
                    if (progress_) progress_(++done_);
                    after();
                  }));
  }

  const LoadOptions& options_;
  const PromptPool& pool_;
  HttpClient& client_;
  const std::atomic<bool>* cancel_;
  const std::function<void(std::int64_t)>& progress_;
  const std::vector<PlannedRequest> plan_;
  std::vector<LoadSample> samples_;
  const Clock::time_point start_;
  std::size_t next_ = 0;
  std::int64_t done_ = 0;
};

}  // namespace

double LoadSample::tpot_s() const {
  return ttft_s >= 0 && tokens() > 1 ? (last_s - ttft_s) / static_cast<double>(tokens() - 1) : -1;
}

Result<PromptPool> MakePool(const LoadOptions& o, const HttpTarget& target,
                            const std::atomic<bool>* cancel) {
  const std::string text = o.text.empty() ? RandomText(o.seed) : o.text;
  PromptPool pool;
  pool.words = Words(text);
  if (pool.words.empty()) {
    return Error{Code::kInvalidArgument, "the text for prompts has no words"};
  }
  if (o.chat) return pool;
  HttpCall call;
  call.path = "/tokenize";
  call.headers = Headers(o);
  call.body = Dump({{"content", text}});
  K3_ASSIGN(const HttpAnswer answer, Fetch(target, std::move(call), o.limits, cancel));
  if (auto ids = ReadTokens(answer)) pool.ids = *std::move(ids);
  return pool;
}

Result<LoadRun> RunLoad(const LoadOptions& o, const HttpTarget& target, const PromptPool& pool,
                        const std::atomic<bool>* cancel,
                        const std::function<void(std::int64_t)>& progress) {
  K3_TRY(CheckLoad(o));
  if (pool.size() == 0) return Error{Code::kInvalidArgument, "there is no text for prompts"};
  K3_ASSIGN(const auto client, HttpClient::Create(target, o.limits));
  Runner runner(o, pool, *client, cancel, progress);
  runner.Begin();
  K3_TRY(client->Run(cancel));
  return runner.Take();
}

}  // namespace k3::serve
