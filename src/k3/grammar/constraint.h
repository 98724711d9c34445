// Constraints for requests: a JSON text, or a whole reply in the chat format.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/chat/format.h"
#include "k3/chat/message.h"
#include "k3/chat/parse.h"
#include "k3/grammar/automaton.h"
#include "k3/grammar/schema.h"
#include "k3/grammar/token_constraint.h"
#include "k3/grammar/vocabulary.h"

namespace k3::grammar {

/// The whole text is JSON. It may end, by one of the `eos` tokens, exactly where it is complete.
///
/// Making a constraint compiles the schema and is the expensive part. Clones share what is compiled
/// and the token masks found so far: a server keeps one per schema and clones it for each request.
class JsonConstraint : public TokenConstraint {
 public:
  static Result<std::unique_ptr<JsonConstraint>> FromSchema(
      std::string_view schema, const SchemaOptions& options,
      std::shared_ptr<const VocabularyTrie> vocabulary, std::vector<TokenId> eos,
      std::string_view where);
  /// Any JSON object.
  static Result<std::unique_ptr<JsonConstraint>> AnyObject(
      std::shared_ptr<const VocabularyTrie> vocabulary, std::vector<TokenId> eos);

  JsonConstraint(std::shared_ptr<const Grammar> grammar,
                 std::shared_ptr<const VocabularyTrie> vocabulary, std::vector<TokenId> eos);

  std::unique_ptr<TokenConstraint> Clone() const override;
  bool Allowed(std::span<std::uint64_t> bits) override;
  bool Accept(TokenId token) override;
  bool finished() const override;

 private:
  Matcher matcher_;
  std::vector<TokenId> eos_;
  bool ended_ = false;
};

struct ReplyTool {
  std::string name;
  std::string parameters;  // JSON Schema of an object; empty: the tool takes nothing
  bool strict = false;
};

/// From declarations as chat::ParseChatFields makes them.
Result<std::vector<ReplyTool>> ReplyTools(std::span<const chat::ToolDeclaration> tools);

/// What is asked of a reply.
struct ReplyOptions {
  chat::Section inside = chat::Section::kThink;  // what the prompt opened: kThink or kResponse
  chat::ResponseFormat response_format = chat::ResponseFormat::kText;
  std::string response_schema;  // kJsonSchema
  bool response_strict = true;
  std::vector<ReplyTool> tools;
  chat::ToolChoice tool_choice = chat::ToolChoice::kAuto;
  std::string forced_tool;     // with kRequired: exactly one call, of this one
  bool parallel_calls = true;  // false: at most one call
};

/// One reply of the assistant from the generation prompt to its <|end_of_msg|>:
///
///   [text] close(think) open(response) RESPONSE close(response) [TOOLS] close(message) end
///
/// Thoughts are free text. RESPONSE is free text, or JSON with a response format; it is empty when
/// calls are required, and before calls when there is a response format. TOOLS has 1 to kMaxCalls
/// calls of known tools with index 1, 2, ...; arguments come in the order of the properties, one
/// element each, with the type of their value; string arguments are raw UTF-8, others JSON spaced
/// as the format does. With tool_choice none, or no tools, there is no TOOLS element.
class ReplyConstraint : public TokenConstraint {
 public:
  static constexpr int kMaxCalls = 32;  // fewer when there are very many tools

  /// Errors name the field of the chat request: "tools[2].function.parameters: POINTER/KEYWORD:
  /// ...", "response_format.json_schema.schema: ...". A required call without tools and a forced
  /// tool that is not among the tools are kInvalidArgument.
  static Result<std::unique_ptr<ReplyConstraint>> Create(
      const ReplyOptions& options, std::shared_ptr<const VocabularyTrie> vocabulary,
      const chat::Markup& markup);

  ReplyConstraint(std::shared_ptr<const Grammar> grammar,
                  std::shared_ptr<const VocabularyTrie> vocabulary, const chat::Markup& markup);

  std::unique_ptr<TokenConstraint> Clone() const override;
  bool Allowed(std::span<std::uint64_t> bits) override;
  bool Accept(TokenId token) override;
  bool finished() const override;

 private:
  Matcher matcher_;
  chat::Markup markup_;
};

/// The grammar of ReplyConstraint.
Result<std::shared_ptr<const Grammar>> CompileReply(const ReplyOptions& options);

}  // namespace k3::grammar
