// For tests of serve: an engine that follows a script, and a client that writes down its answer.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "k3/grammar/token_constraint.h"
#include "k3/serve/api.h"
#include "k3/serve/http.h"
#include "k3/serve/served_model.h"

namespace k3::serve::test {

inline constexpr TokenId kOpen = 256, kClose = 257, kSep = 258, kEnd = 259, kEos = 260;

/// Token i is byte i; then the four control tokens of the chat format, and an end of text.
inline Tokenizer ChatTokenizer() {
  std::string ranks;
  static constexpr char kDigits[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (unsigned b = 0; b < 256; ++b) {
    ranks += {kDigits[b >> 2], kDigits[(b & 3) << 4], '=', '=', ' '};
    ranks += std::to_string(b) + "\n";
  }
  nlohmann::json config;
  const char* names[] = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]"};
  for (int i = 0; i < 5; ++i) {
    config["added_tokens_decoder"][std::to_string(256 + i)] = {{"content", names[i]},
                                                               {"special", true}};
  }
  auto t = Tokenizer::Parse(ranks, config.dump(), "chat tokenizer");
  return std::move(t).value();
}

/// "{open}", "{close}", "{sep}", "{end}" and "{eos}" in the text become control tokens.
inline std::vector<TokenId> Ids(std::string_view text) {
  static const std::pair<std::string_view, TokenId> kMarks[] = {
      {"{open}", kOpen}, {"{close}", kClose}, {"{sep}", kSep}, {"{end}", kEnd}, {"{eos}", kEos}};
  std::vector<TokenId> ids;
  while (!text.empty()) {
    bool mark = false;
    for (const auto& [name, id] : kMarks) {
      if (!mark && text.starts_with(name)) {
        ids.push_back(id);
        text.remove_prefix(name.size());
        mark = true;
      }
    }
    if (mark) continue;
    ids.push_back(static_cast<unsigned char>(text.front()));
    text.remove_prefix(1);
  }
  return ids;
}

/// Answers in Submit itself, unless `hold` is set; then Finish does it, or Cancel.
class FakeEngine final : public TextEngine {
 public:
  Result<RequestId> Submit(EngineRequest request, std::shared_ptr<RequestSink> sink) override {
    if (!refuse.ok()) return refuse.error();
    const RequestId id = next++;
    requests.push_back({request.prompt, request.sampling, request.max_tokens, request.eos,
                        request.snapshot_at, request.prompt_logprobs});
    sinks[id] = std::move(sink);
    sinks[id]->OnStart(cached);
    if (request.prompt_logprobs) {
      std::vector<SampleResult> list;
      for (std::size_t i = 1; i < request.prompt.size(); ++i) {
        list.push_back(Scored(request.prompt[i]));
      }
      sinks[id]->OnPromptLogprobs(list);
    }
    if (!hold) Play(id, requests.back());
    return id;
  }

  void Cancel(RequestId id) override {
    cancelled.push_back(id);
    EngineResult r;
    r.finish = EngineFinish::kCancelled;
    Finish(id, r);
  }

  EngineStats stats() const override { return {}; }

  void Finish(RequestId id, const EngineResult& result) {
    const auto it = sinks.find(id);
    if (it == sinks.end()) return;
    const auto sink = std::move(it->second);
    sinks.erase(it);
    sink->OnFinish(result);
  }

  static SampleResult Scored(TokenId id) { return {id, -0.5, {{id, -0.5}, {id ^ 1, -1.5}}}; }

  struct Seen {
    std::vector<TokenId> prompt;
    SamplingParams sampling;
    std::int64_t max_tokens;
    std::vector<TokenId> eos;
    std::vector<std::int64_t> snapshot_at;
    bool prompt_logprobs;
  };
  std::string script = "{eos}";
  std::function<std::string(const Seen&)> choose;  // instead of script
  bool hold = false;
  Status refuse;
  std::int64_t cached = 0;
  EngineFinish end = EngineFinish::kStop;  // when the script ends without an end token
  Status error;
  std::vector<Seen> requests;
  std::vector<RequestId> cancelled;
  std::map<RequestId, std::shared_ptr<RequestSink>> sinks;
  RequestId next = 1;

 private:
  void Play(RequestId id, const Seen& request) {
    EngineResult r;
    r.finish = end;
    r.status = error;
    for (const TokenId t : Ids(choose ? choose(request) : script)) {
      const bool over = std::find(request.eos.begin(), request.eos.end(), t) != request.eos.end();
      if (over || r.completion_tokens >= request.max_tokens) {
        r.finish = over ? EngineFinish::kStop : EngineFinish::kLength;
        break;
      }
      ++r.completion_tokens;
      if (!sinks[id]->OnToken(Scored(t))) {
        r.finish = EngineFinish::kStop;
        break;
      }
    }
    Finish(id, r);
  }
};

/// What a client has read.
struct Answer {
  int status = 0;
  std::string body;
  HeaderList headers;
  bool ended = false;
  std::function<void()> gone;
  bool closed = false;

  std::string Header(std::string_view name) const {
    for (const auto& [key, value] : headers) {
      if (key == name) return value;
    }
    return {};
  }
  nlohmann::json Json() const { return nlohmann::json::parse(body); }
  /// The JSON of each "data:" line but [DONE].
  std::vector<nlohmann::json> Events() const {
    std::vector<nlohmann::json> list;
    std::size_t at = 0;
    while ((at = body.find("data: ", at)) != body.npos) {
      const std::size_t end = body.find('\n', at);
      const std::string text = body.substr(at + 6, end - at - 6);
      if (text != "[DONE]") list.push_back(nlohmann::json::parse(text));
      at = end;
    }
    return list;
  }
};

class FakeResponder final : public Responder {
 public:
  explicit FakeResponder(std::shared_ptr<Answer> answer) : answer_(std::move(answer)) {}
  void Send(HttpReply reply) override {
    if (reply.make_body) reply.body = reply.make_body();
    Begin(std::move(reply));
    End();
  }
  void Begin(HttpReply head) override {
    answer_->status = head.status;
    answer_->headers = std::move(head.headers);
    answer_->body += head.body;
  }
  bool Write(std::string data) override {
    if (!answer_->closed) answer_->body += data;
    return !answer_->closed;
  }
  void End() override {
    answer_->ended = true;
    answer_->gone = nullptr;
  }
  void OnClose(std::function<void()> gone) override { answer_->gone = std::move(gone); }

 private:
  std::shared_ptr<Answer> answer_;
};

/// An Api in front of a FakeEngine.
struct Fixture {
  explicit Fixture(bool chat_format = true, ApiOptions options = {}) : api(std::move(options)) {
    auto m = std::make_shared<ServedModel>();
    m->id = "tiny";
    m->vocab = 261;
    m->context = 4000;
    m->eos = {kEos};
    m->tokenizer = &tokenizer;
    m->markup = chat::FindMarkup(tokenizer);
    m->chat_format = chat_format;
    m->bodies = PlainBodies();
    m->engine = &engine;
    model = m;
    api.SetModel(model);
  }

  std::shared_ptr<Answer> Call(std::string method, std::string path, std::string body = "",
                               HeaderList headers = {}) {
    auto answer = std::make_shared<Answer>();
    HttpRequest r{std::move(method),  std::move(path), "",
                  std::move(headers), std::move(body), "id"};
    if (const auto refused = api.Screen(r)) {
      FakeResponder(answer).Send(*refused);
    } else {
      api.Handle(std::move(r), std::make_shared<FakeResponder>(answer));
    }
    return answer;
  }
  std::shared_ptr<Answer> Post(std::string path, const nlohmann::json& body) {
    return Call("POST", std::move(path), body.dump());
  }
  std::shared_ptr<Answer> Chat(nlohmann::json more = nlohmann::json::object()) {
    nlohmann::json body{{"messages", {{{"role", "user"}, {"content", "hi"}}}}};
    body.update(more);
    return Post("/v1/chat/completions", body);
  }

  Tokenizer tokenizer = ChatTokenizer();
  FakeEngine engine;
  Api api;
  std::shared_ptr<const ServedModel> model;
};

}  // namespace k3::serve::test
