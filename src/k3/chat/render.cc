#include "k3/chat/render.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "k3/chat/arguments_internal.h"
#include "k3/chat/attribute.h"
#include "k3/chat/json_text.h"
#include "k3/io/json.h"

namespace k3::chat {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string Fill(const std::string& body, std::string_view value) {
  const std::size_t hole = body.find("{}");
  if (hole == body.npos) return body;
  return fmt::format("{}{}{}", body.substr(0, hole), value, body.substr(hole + 2));
}

std::string_view TypeOf(const OrderedJson& value) {
  if (value.is_boolean()) return "boolean";
  if (value.is_null()) return "null";
  if (value.is_number()) return "number";
  if (value.is_string()) return "string";
  return value.is_object() ? "object" : "array";
}

struct Attribute {
  std::string_view key;
  std::string_view value;
};
using Attributes = std::initializer_list<Attribute>;

class Writer {
 public:
  Writer(const ChatOptions& options, const Bodies* bodies) : options_(options), bodies_(bodies) {}

  Status Preface();
  Status Add(std::span<const Message> messages);
  Status Requests();
  void Prompt(bool thinking) {
    Open("message", {{"role", "assistant"}});
    Open(thinking ? "think" : "response");
  }
  std::vector<Segment> Take() { return std::move(out_); }

 private:
  void Markup(std::string_view name) { out_.push_back({std::string(name), true}); }
  void Plain(std::string_view text) {
    if (!text.empty()) out_.push_back({std::string(text), false});
  }
  void Attr(const Attribute& a) {
    Plain(fmt::format(" {}", a.key));
    Plain("=\"");
    Plain(EscapedAttribute(a.value));
    Plain("\"");
  }
  void Tag(std::string_view name, Attributes attributes, std::string_view maybe_name = {}) {
    Markup(kOpen);
    Plain(name);
    for (const Attribute& a : attributes) Attr(a);
    if (!maybe_name.empty()) Attr({"name", maybe_name});
    Markup(kSep);
  }
  void Open(std::string_view name, Attributes attributes = {}) { Tag(name, attributes); }
  void Close(std::string_view name) {
    Markup(kClose);
    Plain(name);
    Markup(kSep);
  }
  void CloseMessage() {
    Close("message");
    Markup(kEnd);
  }
  void Content(const Message& m) {
    for (const std::string& part : m.content) Plain(part);
  }

  Result<const Bodies*> NeedBodies(std::string_view what) const;
  void System(std::string_view type, const std::string& body);
  Status Declare(const std::vector<ToolDeclaration>& tools, bool dynamic);
  Status Assistant(const Message& m);
  Status Arguments(const ToolCall& call);
  Status ToolResults(std::span<const Message> run, const Message* assistant);

  const ChatOptions& options_;
  const Bodies* bodies_;
  std::vector<Segment> out_;
};

Result<const Bodies*> Writer::NeedBodies(std::string_view what) const {
  if (bodies_ != nullptr) return bodies_;
  return Error{
      Code::kUnsupported,
      fmt::format("{} cannot be asked for: the model's folder has no {}", what, kBodiesFile)};
}

/// A message that no user wrote.
void Writer::System(std::string_view type, const std::string& body) {
  Open("message", {{"role", "system"}, {"type", type}});
  Plain(body);
  CloseMessage();
}

Status Writer::Declare(const std::vector<ToolDeclaration>& tools, bool dynamic) {
  K3_ASSIGN(const Bodies* bodies, NeedBodies("tools"));
  std::string list;
  for (const ToolDeclaration& tool : tools) {
    if (!list.empty()) list += ',';
    list += tool.json;
  }
  System("tool-declare", Fill(dynamic ? bodies->tool_declare_dynamic : bodies->tool_declare,
                              fmt::format("[{}]", list)));
  return {};
}

Status Writer::Preface() {
  if (!options_.tools.empty()) K3_TRY(Declare(options_.tools, false));
  if (options_.thinking && options_.effort.has_value()) {
    K3_ASSIGN(const Bodies* bodies, NeedBodies("a thinking effort"));
    System("thinking-effort", Fill(bodies->thinking_effort, Name(*options_.effort)));
  }
  return {};
}

/// Typed elements for an object; anything that is not JSON goes back as it came.
Status Writer::Arguments(const ToolCall& call) {
  if (IsBlank(call.arguments)) return {};
  const auto checked = ParseJson(call.arguments, "arguments");
  if (!checked.ok()) {
    Open("json", {{"type", "object"}});
    Plain(call.arguments);
    Close("json");
    return {};
  }
  if (!checked->is_object()) {
    return Error{Code::kInvalidArgument,
                 fmt::format("arguments of the call of {}: found {}, expected a JSON object",
                             Printable(call.name), PrintableValue(*checked))};
  }
  // Again, now keeping the order of the keys; the first parse has shown that it is safe.
  const auto arguments = OrderedJson::parse(call.arguments, nullptr, false);
  for (const auto& [key, value] : arguments.items()) {
    Open("argument", {{"key", key}, {"type", TypeOf(value)}});
    Plain(value.is_string() ? value.get<std::string>() : JsonText(value, JsonStyle::kSpaced));
    Close("argument");
  }
  return {};
}

Status Writer::Assistant(const Message& m) {
  Open("message", {{"role", "assistant"}});
  if (options_.thinking) {
    Open("think");
    if (!IsBlank(m.reasoning_content)) Plain(m.reasoning_content);
    Close("think");
  }
  Open("response");
  Content(m);
  Close("response");
  if (!m.tool_calls.empty()) {
    Open("tools");
    for (std::size_t i = 0; i < m.tool_calls.size(); ++i) {
      const ToolCall& call = m.tool_calls[i];
      Open("call", {{"tool", call.name}, {"index", std::to_string(i + 1)}});
      K3_TRY(Arguments(call));
      Close("call");
    }
    Close("tools");
  }
  CloseMessage();
  return {};
}

Status Writer::ToolResults(std::span<const Message> run, const Message* assistant) {
  std::vector<std::pair<std::size_t, const Message*>> results;
  for (const Message& m : run) {
    const auto n = assistant == nullptr ? 0 : assistant->tool_calls.size();
    std::size_t i = 0;
    while (i < n && assistant->tool_calls[i].id != m.tool_call_id) ++i;
    if (i == n) {
      return Error{Code::kInvalidArgument,
                   fmt::format("a tool result for \"{}\": the assistant's message before it has "
                               "no such call",
                               Printable(m.tool_call_id))};
    }
    results.emplace_back(i, &m);
  }
  std::stable_sort(results.begin(), results.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [i, m] : results) {
    Open("message", {{"role", "tool"},
                     {"tool", assistant->tool_calls[i].name},
                     {"index", std::to_string(i + 1)}});
    Content(*m);
    CloseMessage();
  }
  return {};
}

Status Writer::Add(std::span<const Message> messages) {
  const Message* assistant = nullptr;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& m = messages[i];
    if (m.role == Role::kAssistant) {
      assistant = &m;
      K3_TRY(Assistant(m));
    } else if (m.role == Role::kTool) {
      std::size_t end = i;
      while (end < messages.size() && messages[end].role == Role::kTool) ++end;
      K3_TRY(ToolResults(messages.subspan(i, end - i), assistant));
      i = end - 1;
    } else if (m.role == Role::kSystem && !m.tools.empty()) {
      K3_TRY(Declare(m.tools, true));
    } else {
      Tag("message", {{"role", Name(m.role)}}, m.name);
      Content(m);
      CloseMessage();
    }
  }
  return {};
}

/// What holds for the next reply only.
Status Writer::Requests() {
  if (options_.tool_choice != ToolChoice::kAuto) {
    K3_ASSIGN(const Bodies* bodies, NeedBodies("a tool choice"));
    System("tool-choice", options_.tool_choice == ToolChoice::kNone ? bodies->tool_choice_none
                                                                    : bodies->tool_choice_required);
  }
  if (options_.response_format != ResponseFormat::kText) {
    K3_ASSIGN(const Bodies* bodies, NeedBodies("a response format"));
    System("response-format", options_.response_format == ResponseFormat::kJsonObject
                                  ? bodies->json_object
                                  : Fill(bodies->json_schema, options_.response_schema));
  }
  return {};
}

}  // namespace

Result<std::vector<Segment>> Render(std::span<const Message> messages, const ChatOptions& options,
                                    const Bodies* bodies) {
  Writer writer(options, bodies);
  K3_TRY(writer.Preface());
  K3_TRY(writer.Add(messages));
  K3_TRY(writer.Requests());
  if (options.generation_prompt) writer.Prompt(options.thinking);
  return writer.Take();
}

std::vector<Segment> GenerationPrompt(bool thinking) {
  const ChatOptions options;
  Writer writer(options, nullptr);
  writer.Prompt(thinking);
  return writer.Take();
}

std::string Text(std::span<const Segment> segments) {
  std::string text;
  for (const Segment& s : segments) text += s.text;
  return text;
}

Result<std::vector<TokenId>> Encode(std::span<const Segment> segments, const Tokenizer& tokenizer) {
  std::vector<TokenId> ids;
  for (const Segment& s : segments) {
    if (!s.is_markup) {
      const auto part = tokenizer.Encode(s.text);
      ids.insert(ids.end(), part.begin(), part.end());
      continue;
    }
    const auto id = tokenizer.SpecialId(s.text);
    if (!id.has_value()) {
      return Error{Code::kUnsupported,
                   fmt::format("the tokenizer has no control token {}", Printable(s.text))};
    }
    ids.push_back(*id);
  }
  return ids;
}

}  // namespace k3::chat
