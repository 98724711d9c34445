// The grammar of a whole reply in the chat format.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "k3/chat/attribute.h"
#include "k3/grammar/constraint.h"
#include "k3/grammar/schema_compiler_internal.h"
#include "k3/io/json.h"

namespace k3::grammar {
namespace {

constexpr std::size_t kMaxCallBytes = 40'000;  // of all the tags that can begin a call

class ReplyBuilder {
 public:
  explicit ReplyBuilder(const ReplyOptions& options)
      : o_(options), compact_(b_, Spacing::kCompact), spaced_(b_, Spacing::kSpaced) {}

  Result<std::shared_ptr<const Grammar>> Build();

 private:
  Expr Open(std::string_view name) { return Tag(kControlOpen, name); }
  Expr Close(std::string_view name) { return Tag(kControlClose, name); }
  Expr Tag(Symbol first, std::string_view text) {
    return b_.Seq({b_.Range(first, first), b_.Literal(text), b_.Range(kControlSep, kControlSep)});
  }
  Result<Expr> Response();
  Result<Expr> Tools();
  Result<Expr> ArgumentsOf(const ReplyTool& tool, const std::string& where);

  const ReplyOptions& o_;
  GrammarBuilder b_;
  TextRules compact_, spaced_;
  std::deque<Schema> schemas_;  // the compilers refer to them
};

Result<Expr> ReplyBuilder::Response() {
  if (o_.response_format == chat::ResponseFormat::kJsonObject) return compact_.AnyObject();
  const std::string where = "response_format.json_schema.schema";
  K3_ASSIGN(Schema root, ParseSchema(o_.response_schema, where));
  schemas_.push_back(std::move(root));
  SchemaCompiler compiler(b_, compact_, schemas_.back(), o_.response_strict, where);
  const RuleId rule = b_.Declare("#");
  K3_ASSIGN(const Expr body, compiler.Value(schemas_.back(), "#", kAnyType, TextForm::kJson));
  b_.Define(rule, body);
  K3_TRY(compiler.Finish());
  return b_.Call(rule);
}

Result<Expr> ReplyBuilder::ArgumentsOf(const ReplyTool& tool, const std::string& where) {
  if (tool.parameters.empty()) return b_.Empty();
  K3_ASSIGN(Schema root, ParseSchema(tool.parameters, where));
  schemas_.push_back(std::move(root));
  SchemaCompiler compiler(b_, spaced_, schemas_.back(), tool.strict, where);
  K3_ASSIGN(const Expr arguments, compiler.Arguments(schemas_.back(), "#"));
  K3_TRY(compiler.Finish());
  return arguments;
}

Result<Expr> ReplyBuilder::Tools() {
  std::vector<std::pair<std::string, Expr>> tools;  // beginning of the tag, arguments
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < o_.tools.size(); ++i) {
    const ReplyTool& tool = o_.tools[i];
    if (!o_.forced_tool.empty() && tool.name != o_.forced_tool) continue;
    const std::string where = fmt::format("tools[{}].function.parameters", i);
    K3_ASSIGN(const Expr arguments, ArgumentsOf(tool, where));
    const RuleId rule = b_.Declare(where);
    b_.Define(rule, arguments);
    tools.emplace_back(fmt::format("call tool=\"{}\" index=\"", chat::EscapedAttribute(tool.name)),
                       b_.Call(rule));
    bytes += tools.back().first.size() + 10;
  }
  if (tools.empty()) {
    return Error{
        Code::kInvalidArgument,
        o_.forced_tool.empty()
            ? std::string("tool_choice: a call is required, but there are no tools")
            : fmt::format("tool_choice: \"{}\" is not among the tools", Printable(o_.forced_tool))};
  }
  std::size_t n_calls =
      std::clamp<std::size_t>(kMaxCallBytes / bytes, 1, ReplyConstraint::kMaxCalls);
  if (!o_.parallel_calls || !o_.forced_tool.empty()) n_calls = 1;
  Expr calls = b_.Empty();
  for (std::size_t i = n_calls; i-- > 0;) {
    std::vector<Expr> choices;
    for (const auto& [beginning, arguments] : tools) {
      choices.push_back(b_.Seq({Open(fmt::format("{}{}\"", beginning, i + 1)), arguments}));
    }
    calls = b_.Seq({b_.Alt(std::move(choices)), Close("call"), calls});
    if (i > 0) calls = b_.Optional(calls);
  }
  return b_.Seq({Open("tools"), calls, Close("tools")});
}

Result<std::shared_ptr<const Grammar>> ReplyBuilder::Build() {
  const bool required = o_.tool_choice == chat::ToolChoice::kRequired;
  const bool may_call =
      required || (o_.tool_choice == chat::ToolChoice::kAuto && !o_.tools.empty());
  const bool json = o_.response_format != chat::ResponseFormat::kText;
  const Expr free_text = b_.Star(b_.Range(0, 255));
  Expr tools = b_.Never();
  if (may_call) {
    K3_ASSIGN(tools, Tools());
  }
  const Expr called = b_.Seq({Close("response"), tools});
  Expr response = called;  // of an empty response
  if (!required && json) {
    K3_ASSIGN(const Expr value, Response());
    response = b_.Alt({b_.Seq({value, Close("response")}), called});
  } else if (!required) {
    response = b_.Seq({free_text, Close("response"), b_.Optional(tools)});
  }
  std::vector<Expr> reply;
  if (o_.inside == chat::Section::kThink) {
    reply = {free_text, Close("think"), Open("response")};
  }
  reply.push_back(response);
  reply.push_back(Close("message"));
  reply.push_back(b_.Range(kControlEnd, kControlEnd));
  const RuleId root = b_.Declare("the reply");
  b_.Define(root, b_.Seq(std::move(reply)));
  return b_.Finish(root, may_call && !json ? "tools" : "response_format");
}

}  // namespace

Result<std::shared_ptr<const Grammar>> CompileReply(const ReplyOptions& options) {
  return ReplyBuilder(options).Build();
}

}  // namespace k3::grammar
