#include "k3/serve/constraints.h"

#include <fmt/format.h>

#include <algorithm>

#include "k3/grammar/constraint.h"

namespace k3::serve {
namespace {

constexpr std::size_t kKept = 32;

bool IsAskedFor(const ConstraintRequest& r) {
  if (r.options.response_format != chat::ResponseFormat::kText) return true;
  return r.chat && !r.options.tools.empty();
}

std::string KeyOf(const ConstraintRequest& r) {
  const auto& o = r.options;
  std::string key = fmt::format("{}{}{}{}{}{}{}\n{}\n", r.chat ? 1 : 0, o.thinking ? 1 : 0,
                                static_cast<int>(o.tool_choice),
                                static_cast<int>(o.response_format), r.response_strict ? 1 : 0,
                                r.parallel_calls ? 1 : 0, o.forced_tool, o.response_schema);
  for (const chat::ToolDeclaration& t : o.tools) key += t.json + "\n";
  return key;
}

/// Errors of the grammar begin with the field they are about: "FIELD: ...".
ApiError FromGrammar(const Error& error) {
  ApiError e;
  e.message = error.message;
  const std::string field = error.message.substr(0, error.message.find(':'));
  if (field.find(' ') == field.npos) e.param = field;
  if (error.code == Code::kUnsupported) e.code = "unsupported";
  return e;
}

}  // namespace

Result<std::shared_ptr<const TokenConstraint>> ConstraintCache::Compile(
    const ConstraintRequest& r) const {
  using Made = std::shared_ptr<const TokenConstraint>;
  const auto& o = r.options;
  if (!r.chat) {
    if (o.response_format == chat::ResponseFormat::kJsonObject) {
      K3_ASSIGN(auto any, grammar::JsonConstraint::AnyObject(vocabulary_, r.eos));
      return Made(std::move(any));
    }
    grammar::SchemaOptions options;
    options.strict = r.response_strict;
    K3_ASSIGN(auto json,
              grammar::JsonConstraint::FromSchema(o.response_schema, options, vocabulary_, r.eos,
                                                  "response_format.json_schema.schema"));
    return Made(std::move(json));
  }
  grammar::ReplyOptions reply;
  reply.inside = o.thinking ? chat::Section::kThink : chat::Section::kResponse;
  reply.response_format = o.response_format;
  reply.response_schema = o.response_schema;
  reply.response_strict = r.response_strict;
  K3_ASSIGN(reply.tools, grammar::ReplyTools(o.tools));
  reply.tool_choice = o.tool_choice;
  reply.forced_tool = o.forced_tool;
  reply.parallel_calls = r.parallel_calls;
  K3_ASSIGN(auto made, grammar::ReplyConstraint::Create(reply, vocabulary_, *markup_));
  return Made(std::move(made));
}

ApiStatus ConstraintCache::Make(const ConstraintRequest& request,
                                std::shared_ptr<const TokenConstraint>& out) {
  out = nullptr;
  if (!IsAskedFor(request) || (request.chat && !markup_)) return {};
  const std::string key = KeyOf(request);
  {
    const std::lock_guard lock(mutex_);
    const auto it = std::find_if(kept_.begin(), kept_.end(),
                                 [&key](const auto& kept) { return kept.first == key; });
    if (it != kept_.end()) {
      kept_.splice(kept_.begin(), kept_, it);
      out = it->second;
      return {};
    }
  }
  auto made = Compile(request);
  if (!made.ok()) {
    const bool must = request.options.tool_choice == chat::ToolChoice::kRequired ||
                      request.options.response_format != chat::ResponseFormat::kText;
    if (!must && made.error().code == Code::kUnsupported) return {};
    return FromGrammar(made.error());
  }
  out = std::move(made).value();
  const std::lock_guard lock(mutex_);
  kept_.emplace_front(key, out);
  if (kept_.size() > kKept) kept_.pop_back();
  return {};
}

}  // namespace k3::serve
