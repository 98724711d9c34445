// The endpoints that generate text, and those that only look at prompts.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "k3/io/json.h"
#include "k3/serve/api_call_internal.h"
#include "k3/serve/drift.h"
#include "k3/serve/generation.h"
#include "k3/serve/job.h"
#include "k3/serve/reply_writer.h"

namespace k3::serve {
namespace {

using nlohmann::json;

std::int64_t Now() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void SendJson(Responder& out, const Json& value) {
  HttpReply reply;
  reply.body = Dump(value);
  out.Send(std::move(reply));
}

/// Written without a tree of JSON values: there may be millions of ids.
std::string IdsJson(const std::vector<TokenId>& ids) {
  std::string text = "[";
  for (const TokenId id : ids) {
    if (text.size() > 1) text += ',';
    text += fmt::format_int(id).c_str();
  }
  return text + ']';
}

/// Only of complete answers: what a client cut off says nothing about the model.
void WatchDrift(const JobReport& report, DriftMonitor& drift) {
  const auto tokens = static_cast<double>(report.usage.completion_tokens);
  if (std::string_view(report.outcome) != "ok" || tokens < 1) return;
  const auto stratum = DriftMonitor::PromptStratum(report.usage.prompt_tokens);
  drift.Observe("completion_tokens", stratum, tokens);
  drift.Observe("first_token_seconds", stratum, report.first_token_s);
  if (tokens > 1) {
    drift.Observe("seconds_per_token", stratum,
                  (report.total_s - report.first_token_s) / (tokens - 1));
  }
}

}  // namespace

ApiStatus Api::CheckModel(const json& body, const ServedModel& model) const {
  const JsonReader r(body, "request");
  std::optional<std::string> name;
  K3_API_TRY(Take(r.OptString("model"), "model", name));
  if (!options_.strict_model || !name || *name == model.id) return {};
  ApiError e;
  e.status = 404;
  e.param = "model";
  e.code = "model_not_found";
  e.message = fmt::format("there is no model \"{}\", only \"{}\"", Printable(*name), model.id);
  return e;
}

void Api::Start(Call& call, Generation g, MakeWriter make, std::string_view id_prefix,
                std::string_view call_prefix) {
  if (options_.log_prompts) {
    spdlog::info("{} body {}", call.request.id, Printable(call.request.body, 1 << 16));
  }
  const std::string random = RandomId().substr(0, 24);
  ReplyFormat format;
  format.id = fmt::format("{}{}", id_prefix, random);
  format.created = Now();
  format.logprobs = g.top_logprobs >= 0;
  format.echo = g.echo;
  format.include_usage = g.include_usage;
  const std::int64_t room =
      call.model->context - static_cast<std::int64_t>(g.prompts.front().size());
  if (g.max_tokens && *g.max_tokens > room && room >= 0) {
    format.headers.emplace_back("X-K3-Max-Tokens", fmt::to_string(room));
  }
  if (call.model->states != nullptr) RememberSlot(g);
  auto writer = make(*call.model, std::move(format), g.stream, call.out);
  ++*jobs_;
  StartJob(call.model, std::move(g), std::move(writer), call.out,
           fmt::format("{}{}_", call_prefix, random.substr(0, 12)),
           [this, jobs = jobs_, model = call.model](const JobReport& report) {
             metrics_.CountJob(report);
             if (model->drift != nullptr) WatchDrift(report, *model->drift);
             --*jobs;
           });
}

ApiStatus Api::ChatCompletions(Call& call) {
  json body;
  K3_API_TRY(ParseBody(call.request.body, body));
  K3_API_TRY(CheckModel(body, *call.model));
  Generation g;
  K3_API_TRY(ReadChat(body, *call.model, g));
  Start(call, std::move(g), &ChatWriter, "chatcmpl-", "call_");
  return {};
}

ApiStatus Api::Completions(Call& call) {
  json body;
  K3_API_TRY(ParseBody(call.request.body, body));
  K3_API_TRY(CheckModel(body, *call.model));
  Generation g;
  K3_API_TRY(ReadCompletion(body, *call.model, g));
  Start(call, std::move(g), &CompletionWriter, "cmpl-", "call_");
  return {};
}

ApiStatus Api::Messages(Call& call) {
  json body;
  K3_API_TRY(ParseBody(call.request.body, body));
  K3_API_TRY(CheckModel(body, *call.model));
  Generation g;
  K3_API_TRY(ReadMessages(body, *call.model, false, g));
  Start(call, std::move(g), &MessagesWriter, "msg_", "toolu_");
  return {};
}

ApiStatus Api::CountTokens(Call& call) {
  json body;
  K3_API_TRY(ParseBody(call.request.body, body));
  K3_API_TRY(CheckModel(body, *call.model));
  Generation g;
  K3_API_TRY(ReadMessages(body, *call.model, true, g));
  SendJson(*call.out, {{"input_tokens", g.prompts.front().size()}});
  return {};
}

/// What lm-eval asks before it trusts /tokenize.
ApiStatus Api::TokenizerInfo(Call& call) {
  const ServedModel& m = *call.model;
  const auto name = [&m](std::span<const TokenId> ids) {  // of the first; null when there is none
    const auto text = ids.empty() ? std::nullopt : m.tokenizer->Bytes(ids.front());
    return text ? Json(*text) : Json();
  };
  std::vector<TokenId> bos, pad;
  if (m.bos) bos.push_back(*m.bos);
  if (const auto id = m.tokenizer->SpecialId("[PAD]")) pad.push_back(*id);
  SendJson(*call.out, {{"bos_token", name(bos)},
                       {"eos_token", name(m.eos)},
                       {"pad_token", name(pad)},
                       {"vocab_size", m.vocab},
                       {"model_max_length", m.context}});
  return {};
}

ApiStatus Api::Tokenize(Call& call) {
  json body;
  K3_API_TRY(ParseBody(call.request.body, body));
  const JsonReader r(body, "request");
  Generation g;
  if (r.Has("messages")) {
    std::vector<chat::Message> messages;
    K3_API_TRY(ReadChatFields(body, *call.model, messages, g.chat_options));
    K3_API_TRY(BuildChatPrompt(messages, *call.model, g));
  } else {
    const char* key = r.Has("content") ? "content" : "prompt";
    std::string text;
    K3_API_TRY(Take(r.String(key), key, text));
    bool bos = false;
    const char* option = r.Has("add_special_tokens") ? "add_special_tokens" : "add_special";
    K3_API_TRY(Take(r.Bool(option, false), option, bos));
    std::vector<TokenId> ids;
    if (bos && call.model->bos) ids.push_back(*call.model->bos);
    const auto encoded = call.model->tokenizer->Encode(text);
    ids.insert(ids.end(), encoded.begin(), encoded.end());
    g.prompts.push_back(std::move(ids));
  }
  const auto& ids = g.prompts.front();
  HttpReply reply;
  reply.body = fmt::format("{{\"tokens\":{},\"count\":{},\"max_model_len\":{}}}", IdsJson(ids),
                           ids.size(), call.model->context);
  call.out->Send(std::move(reply));
  return {};
}

ApiStatus Api::Detokenize(Call& call) {
  json body;
  K3_API_TRY(ParseBody(call.request.body, body));
  const JsonReader r(body, "request");
  std::optional<std::vector<std::int64_t>> tokens;
  K3_API_TRY(Take(r.OptIntList("tokens", 0, call.model->vocab - 1), "tokens", tokens));
  if (!tokens) return BadField("tokens", "is missing");
  const std::vector<TokenId> ids(tokens->begin(), tokens->end());
  const std::string text = call.model->tokenizer->Decode(ids);
  SendJson(*call.out, {{"content", text}, {"prompt", text}});
  return {};
}

ApiStatus Api::ApplyTemplate(Call& call) {
  json body;
  K3_API_TRY(ParseBody(call.request.body, body));
  std::vector<chat::Message> messages;
  chat::ChatOptions options;
  K3_API_TRY(ReadChatFields(body, *call.model, messages, options));
  std::string text;
  K3_API_TRY(ChatPromptText(messages, options, *call.model, text));
  SendJson(*call.out, {{"prompt", text}});
  return {};
}

}  // namespace k3::serve
