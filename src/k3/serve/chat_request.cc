#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "k3/chat/openai.h"
#include "k3/chat/render.h"
#include "k3/serve/constraints.h"
#include "k3/serve/generation.h"

namespace k3::serve {
namespace {

using chat::Message;
using chat::Role;
using nlohmann::json;

constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

/// thinking: {"type": "enabled" or "disabled"} and chat_template_kwargs: {"thinking": bool}, which
/// clients of other servers send.
ApiStatus ReadThinking(const JsonReader& r, chat::ChatOptions& options) {
  const auto thinking = r.Object("thinking");
  if (!thinking.ok()) return BadField("thinking", "expected an object");
  if (thinking->has_value()) {
    std::string type;
    K3_API_TRY(Take((*thinking)->String("type"), "thinking", type));
    if (type != "enabled" && type != "disabled" && type != "adaptive") {
      return BadField("thinking", "type: expected enabled, disabled or adaptive");
    }
    options.thinking = type != "disabled";
  }
  const auto kwargs = r.Object("chat_template_kwargs");
  if (!kwargs.ok()) return BadField("chat_template_kwargs", "expected an object");
  if (!kwargs->has_value()) return {};
  for (const char* key : {"thinking", "enable_thinking"}) {
    K3_API_TRY(
        Take((*kwargs)->Bool(key, options.thinking), "chat_template_kwargs", options.thinking));
  }
  return {};
}

/// max_completion_tokens is the newer name and wins over max_tokens.
ApiStatus ReadChatLimit(const JsonReader& r, Generation& g) {
  K3_API_TRY(Take(r.OptInt("max_tokens", 1, kMaxTokens), "max_tokens", g.max_tokens));
  std::optional<std::int64_t> newer;
  K3_API_TRY(
      Take(r.OptInt("max_completion_tokens", 1, kMaxTokens), "max_completion_tokens", newer));
  if (newer) g.max_tokens = newer;
  return {};
}

ApiStatus ReadChatLogprobs(const JsonReader& r, Generation& g) {
  bool wanted = false;
  K3_API_TRY(Take(r.Bool("logprobs", false), "logprobs", wanted));
  std::optional<std::int64_t> top;
  K3_API_TRY(Take(r.OptInt("top_logprobs", 0, kMaxTopLogprobs), "top_logprobs", top));
  if (top && !wanted) return BadField("top_logprobs", "only with logprobs true");
  if (wanted) g.top_logprobs = top.value_or(0);
  return {};
}

std::string PlainText(const std::vector<Message>& messages) {
  std::string text;
  for (const Message& m : messages) {
    if (!text.empty() && m.role != Role::kAssistant) text += '\n';
    text += m.Text();
  }
  return text;
}

Result<std::vector<chat::Segment>> Segments(std::span<const Message> messages,
                                            const chat::ChatOptions& options,
                                            const ServedModel& model) {
  return chat::Render(messages, options, &model.bodies);
}

ApiError FromRender(const Error& error) {
  ApiError e;
  e.message = error.message;
  e.param = "messages";
  return e;
}

/// How many segments of `all` the first messages alone give too.
std::size_t CommonSegments(std::span<const Message> first, chat::ChatOptions options,
                           const ServedModel& model, const std::vector<chat::Segment>& all) {
  options.generation_prompt = false;
  const auto part = Segments(first, options, model);
  if (!part.ok()) return 0;
  const auto end = std::mismatch(part->begin(), part->end(), all.begin(), all.end());
  return static_cast<std::size_t>(end.second - all.begin());
}

/// Where prompts of later requests are likely to part: after the system text, before the last
/// user's message.
std::vector<std::size_t> Forks(const std::vector<Message>& messages,
                               const chat::ChatOptions& options, const ServedModel& model,
                               const std::vector<chat::Segment>& all) {
  std::size_t system = 0, last_user = 0;
  while (system < messages.size() && messages[system].role == Role::kSystem) ++system;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role == Role::kUser) last_user = i;
  }
  std::vector<std::size_t> forks;
  for (const std::size_t n : {system, last_user}) {
    if (n > 0 || !options.tools.empty()) {
      forks.push_back(CommonSegments(std::span(messages).first(n), options, model, all));
    }
  }
  std::sort(forks.begin(), forks.end());
  return forks;
}

ApiStatus EncodeChat(const std::vector<Message>& messages, const ServedModel& model,
                     Generation& out) {
  const auto all = Segments(messages, out.chat_options, model);
  if (!all.ok()) return FromRender(all.error());
  std::vector<TokenId> ids;
  std::size_t from = 0;
  auto forks = Forks(messages, out.chat_options, model, *all);
  forks.push_back(all->size());
  for (const std::size_t to : forks) {
    if (to <= from) continue;
    const auto part = chat::Encode(std::span(*all).subspan(from, to - from), *model.tokenizer);
    if (!part.ok()) return FromRender(part.error());
    ids.insert(ids.end(), part->begin(), part->end());
    from = to;
    if (to < all->size()) {
      out.snapshot_at.push_back(static_cast<std::int64_t>(ids.size()));
    }
  }
  out.prompts.assign(1, std::move(ids));
  return {};
}

}  // namespace

ApiStatus ReadChatFields(const json& body, const ServedModel& model, std::vector<Message>& messages,
                         chat::ChatOptions& options) {
  for (const char* old : {"functions", "function_call"}) {
    if (body.contains(old) && !body[old].is_null())
      return BadField(old, "use tools and tool_choice");
  }
  if (const auto error = chat::ParseChatFields(body, messages, options)) return FromRequest(*error);
  K3_API_TRY(ReadThinking(JsonReader(body, "request"), options));
  if (model.chat_format) return {};
  if (!options.tools.empty()) {
    return BadField(
        "tools",
        fmt::format("{} does not speak the chat format, so it cannot call tools", model.id));
  }
  return {};
}

ApiStatus CheckMessages(const std::vector<Message>& messages, const ServedModel& model) {
  std::size_t bytes = 0;
  for (const Message& m : messages) bytes += m.Text().size();
  return CheckLength(bytes, model, "messages");
}

ApiStatus BuildChatPrompt(const std::vector<Message>& messages, const ServedModel& model,
                          Generation& out) {
  out.chat = model.chat_format;
  if (out.chat) return EncodeChat(messages, model, out);
  std::vector<TokenId> ids;
  if (model.bos) ids.push_back(*model.bos);
  const auto text = model.tokenizer->Encode(PlainText(messages));
  ids.insert(ids.end(), text.begin(), text.end());
  out.prompts.assign(1, std::move(ids));
  return {};
}

ApiStatus ChatPromptText(const std::vector<Message>& messages, const chat::ChatOptions& options,
                         const ServedModel& model, std::string& out) {
  if (!model.chat_format) {
    out = PlainText(messages);
    return {};
  }
  const auto all = Segments(messages, options, model);
  if (!all.ok()) return FromRender(all.error());
  out = chat::Text(*all);
  return {};
}

ApiStatus ReadChat(const json& body, const ServedModel& model, Generation& out) {
  const JsonReader r(body, "request");
  std::vector<Message> messages;
  K3_API_TRY(ReadChatFields(body, model, messages, out.chat_options));
  K3_API_TRY(ReadCommonFields(r, model, out));
  K3_API_TRY(ReadChatLimit(r, out));
  K3_API_TRY(ReadChatLogprobs(r, out));
  K3_API_TRY(CheckMessages(messages, model));
  K3_API_TRY(BuildChatPrompt(messages, model, out));
  return AddConstraint(body, model, out);
}

ApiStatus AddConstraint(const json& body, const ServedModel& model, Generation& out) {
  if (model.constraints == nullptr) return {};
  ConstraintRequest c;
  const JsonReader r(body, "request");
  K3_API_TRY(Take(r.Bool("parallel_tool_calls", true), "parallel_tool_calls", c.parallel_calls));
  if (out.chat_options.response_format == chat::ResponseFormat::kJsonSchema) {
    const JsonReader schema(body["response_format"]["json_schema"], "response_format.json_schema");
    std::string name;
    K3_API_TRY(Take(schema.String("name"), "response_format.json_schema.name", name));
    K3_API_TRY(
        Take(schema.Bool("strict", true), "response_format.json_schema.strict", c.response_strict));
  }
  c.chat = out.chat;
  c.options = out.chat_options;
  c.eos = model.eos;
  return model.constraints->Make(c, out.constraint);
}

}  // namespace k3::serve
