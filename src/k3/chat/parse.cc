#include "k3/chat/parse.h"

#include <optional>
#include <utility>

#include "k3/chat/arguments_internal.h"

namespace k3::chat {
namespace {

std::string Unescaped(std::string_view value) {
  std::string out;
  while (!value.empty()) {
    if (value.starts_with("&quot;")) {
      out += '"';
      value.remove_prefix(6);
    } else if (value.starts_with("&amp;")) {
      out += '&';
      value.remove_prefix(5);
    } else {
      out += value.front();
      value.remove_prefix(1);
    }
  }
  return out;
}

/// NAME key="value" key="value": reads as far as it has that form.
struct Tag {
  explicit Tag(std::string_view text) {
    const std::size_t space = text.find(' ');
    name = text.substr(0, space);
    rest = space == text.npos ? std::string_view() : text.substr(space);
  }

  std::optional<std::string> Get(std::string_view wanted) const {
    std::string_view left = rest;
    while (true) {
      const std::size_t start = left.find_first_not_of(' ');
      if (start == left.npos) return std::nullopt;
      const std::size_t equals = left.find("=\"", start);
      if (equals == left.npos) return std::nullopt;
      const std::size_t end = left.find('"', equals + 2);
      if (end == left.npos) return std::nullopt;
      if (left.substr(start, equals - start) == wanted) {
        return Unescaped(left.substr(equals + 2, end - equals - 2));
      }
      left.remove_prefix(end + 1);
    }
  }

  std::string_view name, rest;
};

/// How deep a section lies in the message; opening one closes those that are as deep or deeper.
int Depth(Section s) {
  switch (s) {
    case Section::kMessage:
    case Section::kDone:
      return 0;
    case Section::kThink:
    case Section::kResponse:
    case Section::kTools:
      return 1;
    case Section::kCall:
      return 2;
    case Section::kArgument:
    case Section::kJson:
      return 3;
  }
  return 0;
}

std::optional<Section> SectionOf(std::string_view tag) {
  if (tag == "message") return Section::kMessage;
  if (tag == "think") return Section::kThink;
  if (tag == "response") return Section::kResponse;
  if (tag == "tools") return Section::kTools;
  if (tag == "call") return Section::kCall;
  if (tag == "argument") return Section::kArgument;
  if (tag == "json") return Section::kJson;
  return std::nullopt;
}

std::string_view TagOf(Section s) {
  switch (s) {
    case Section::kMessage:
      return "message";
    case Section::kThink:
      return "think";
    case Section::kResponse:
      return "response";
    case Section::kTools:
      return "tools";
    case Section::kCall:
      return "call";
    case Section::kArgument:
      return "argument";
    case Section::kJson:
      return "json";
    case Section::kDone:
      break;
  }
  return "";
}

}  // namespace

struct ReplyParser::Impl {
  enum class In { kText, kOpenTag, kCloseTag };

  Impl(const Tokenizer& t, const Markup& m, Section inside, std::string prefix)
      : tokenizer(t), markup(m), id_prefix(std::move(prefix)), open{inside} {
    message.role = Role::kAssistant;
    answered = inside == Section::kResponse;
  }

  Section section() const {
    if (closed) return Section::kDone;
    return open.empty() ? Section::kMessage : open.back();
  }

  void Bytes(std::string_view bytes);
  void Control(TokenId id);
  void Utf8(std::string_view text);
  void EndTag();
  void OpenElement(const Tag& tag, Section s);
  void CloseElement(Section s);
  void CloseTo(std::size_t n_open);
  void CloseDeeper(int depth);
  void BeginCall(const Tag& tag);
  void Arguments(std::string text);
  void Content(std::string_view text);
  void End();

  const Tokenizer& tokenizer;
  Markup markup;
  std::string id_prefix;

  std::vector<Section> open;  // outermost first
  bool closed = false;        // the message is
  bool ended = false;         // so was the turn
  bool answered = false;      // a response was opened
  bool cut = false;
  std::optional<std::vector<Segment>> closing;  // as it was before Finish
  In in = In::kText;
  std::string tag;
  Utf8Stream utf8;
  std::string blank;   // white space right in the message: the answer's only if more follows
  bool loose = false;  // more did follow
  bool call_dropped = false;
  ArgumentWriter arguments;
  Message message;
  ReplyDelta delta;
};

void ReplyParser::Impl::Bytes(std::string_view bytes) { Utf8(utf8.Push(bytes)); }

void ReplyParser::Impl::Utf8(std::string_view text) {
  if (text.empty() || closed) return;
  if (in != In::kText) {
    tag += text;
    return;
  }
  switch (section()) {
    case Section::kThink:
      delta.reasoning += text;
      message.reasoning_content += text;
      break;
    case Section::kResponse:
      Content(text);
      break;
    case Section::kMessage:
      if (answered) break;
      blank += text;
      loose = loose || !IsBlank(blank);
      if (loose) Content(std::exchange(blank, {}));
      break;
    case Section::kArgument:
      if (!call_dropped) Arguments(arguments.Text(text));
      break;
    case Section::kJson:
      if (!call_dropped) Arguments(arguments.RawText(text));
      break;
    case Section::kTools:
    case Section::kCall:
    case Section::kDone:
      break;
  }
}

void ReplyParser::Impl::Content(std::string_view text) {
  delta.content += text;
  if (message.content.empty()) message.content.emplace_back();
  message.content.back() += text;
}

void ReplyParser::Impl::Arguments(std::string text) {
  if (text.empty()) return;
  const std::size_t index = message.tool_calls.size() - 1;
  message.tool_calls.back().arguments += text;
  if (delta.tool_calls.empty() || delta.tool_calls.back().index != index) {
    delta.tool_calls.push_back({index, "", "", ""});
  }
  delta.tool_calls.back().arguments += text;
}

void ReplyParser::Impl::Control(TokenId id) {
  Utf8(utf8.Finish());
  if (ended) return;
  if (in != In::kText) EndTag();
  if (id == markup.open || id == markup.close) {
    in = id == markup.open ? In::kOpenTag : In::kCloseTag;
  } else if (id == markup.end) {
    End();
  }
}

void ReplyParser::Impl::EndTag() {
  const bool opens = std::exchange(in, In::kText) == In::kOpenTag;
  const std::string text = std::exchange(tag, {});
  const Tag parsed(text);
  const auto s = SectionOf(parsed.name);
  if (closed || !s.has_value()) return;
  if (opens) {
    OpenElement(parsed, *s);
  } else {
    CloseElement(*s);
  }
}

void ReplyParser::Impl::OpenElement(const Tag& element, Section s) {
  const bool in_call = !open.empty() && Depth(open.back()) >= 2;
  if (s == Section::kMessage) {  // the next message has begun without an end of this one
    CloseTo(0);
    closed = true;
    return;
  }
  if (Depth(s) == 3 && !in_call) return;
  CloseDeeper(Depth(s) - 1);
  if (s == Section::kCall && (open.empty() || open.back() != Section::kTools)) {
    CloseTo(0);
    open.push_back(Section::kTools);
  }
  open.push_back(s);
  blank.clear();
  loose = false;
  answered = answered || s != Section::kThink;
  if (s == Section::kCall) BeginCall(element);
  if (call_dropped) return;
  if (s == Section::kArgument) {
    Arguments(arguments.BeginArgument(element.Get("key").value_or(""),
                                      element.Get("type").value_or("string")));
  } else if (s == Section::kJson) {
    arguments.BeginRaw();
  }
}

void ReplyParser::Impl::BeginCall(const Tag& element) {
  const std::string name = element.Get("tool").value_or("");
  call_dropped = name.empty();
  arguments = ArgumentWriter();
  if (call_dropped) return;
  const std::size_t index = message.tool_calls.size();
  message.tool_calls.push_back({id_prefix + std::to_string(index), name, ""});
  delta.tool_calls.push_back({index, message.tool_calls.back().id, name, ""});
}

/// Closes elements until `n_open` are left.
void ReplyParser::Impl::CloseTo(std::size_t n_open) {
  while (open.size() > n_open) {
    const Section s = open.back();
    open.pop_back();
    if (s == Section::kArgument && !call_dropped) Arguments(arguments.EndArgument());
    if (s == Section::kCall && !call_dropped) Arguments(arguments.End());
    if (s == Section::kCall) call_dropped = false;
  }
}

void ReplyParser::Impl::CloseDeeper(int depth) {
  std::size_t n = open.size();
  while (n > 0 && Depth(open[n - 1]) > depth) --n;
  CloseTo(n);
}

void ReplyParser::Impl::CloseElement(Section s) {
  if (s == Section::kMessage) {
    CloseTo(0);
    closed = true;
    return;
  }
  for (std::size_t n = open.size(); n > 0; --n) {
    if (open[n - 1] == s) return CloseTo(n - 1);
  }
}

void ReplyParser::Impl::End() {
  CloseTo(0);
  closed = ended = true;
}

ReplyParser::ReplyParser(const Tokenizer& tokenizer, const Markup& markup, Section inside,
                         std::string call_id_prefix)
    : impl_(std::make_unique<Impl>(tokenizer, markup, inside, std::move(call_id_prefix))) {}
ReplyParser::~ReplyParser() = default;
ReplyParser::ReplyParser(ReplyParser&&) noexcept = default;
ReplyParser& ReplyParser::operator=(ReplyParser&&) noexcept = default;

ReplyDelta ReplyParser::Push(TokenId id) {
  const auto bytes = impl_->tokenizer.Bytes(id);
  const Markup& m = impl_->markup;
  if (id == m.open || id == m.close || id == m.sep || id == m.end) {
    impl_->Control(id);
  } else if (bytes.has_value() && !impl_->tokenizer.IsSpecial(id)) {
    impl_->Bytes(*bytes);
  }
  return std::exchange(impl_->delta, {});
}

ReplyDelta ReplyParser::PushText(std::string_view bytes) {
  impl_->Bytes(bytes);
  return std::exchange(impl_->delta, {});
}

ReplyDelta ReplyParser::Finish(bool ended) {
  if (!impl_->closing.has_value()) impl_->closing = Closing();
  impl_->Utf8(impl_->utf8.Finish());
  if (ended) {
    if (impl_->in != Impl::In::kText) impl_->EndTag();
    impl_->CloseTo(0);
  } else {
    impl_->cut = true;
  }
  return std::exchange(impl_->delta, {});
}

const Message& ReplyParser::message() const { return impl_->message; }

std::string_view ReplyParser::finish_reason() const {
  if (impl_->cut) return "length";
  return impl_->message.tool_calls.empty() ? "stop" : "tool_calls";
}

bool ReplyParser::done() const { return impl_->closed; }

std::vector<Segment> ReplyParser::Closing() const {
  if (impl_->closing.has_value()) return *impl_->closing;
  std::vector<Segment> out;
  if (impl_->ended) return out;
  if (impl_->in != Impl::In::kText) out.push_back({std::string(kSep), true});
  // A closing tag that only lacks its end closes its element.
  auto first = impl_->open.rbegin();
  bool closed = impl_->closed;
  if (impl_->in == Impl::In::kCloseTag) {
    if (first != impl_->open.rend() && impl_->tag == TagOf(*first)) ++first;
    closed = closed || impl_->tag == "message";
  }
  const auto close = [&out](std::string_view name) {
    out.push_back({std::string(kClose), true});
    out.push_back({std::string(name), false});
    out.push_back({std::string(kSep), true});
  };
  if (!closed) {
    for (auto s = first; s != impl_->open.rend(); ++s) close(TagOf(*s));
    if (!impl_->answered && impl_->message.content.empty()) {
      out.push_back({std::string(kOpen), true});
      out.push_back({"response", false});
      out.push_back({std::string(kSep), true});
      close(TagOf(Section::kResponse));
    }
    close(TagOf(Section::kMessage));
  }
  out.push_back({std::string(kEnd), true});
  return out;
}

}  // namespace k3::chat
