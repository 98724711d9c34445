#include "k3/grammar/constraint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "k3/io/json.h"

namespace k3::grammar {
namespace {

void SetBit(std::span<std::uint64_t> bits, TokenId id) {
  const auto i = static_cast<std::size_t>(id);
  if (id >= 0 && i / 64 < bits.size()) bits[i / 64] |= std::uint64_t{1} << (i % 64);
}

std::optional<Symbol> ControlSymbol(const chat::Markup& m, TokenId token) {
  if (token == m.open) return kControlOpen;
  if (token == m.close) return kControlClose;
  if (token == m.sep) return kControlSep;
  if (token == m.end) return kControlEnd;
  return std::nullopt;
}

}  // namespace

Result<std::unique_ptr<JsonConstraint>> JsonConstraint::FromSchema(
    std::string_view schema, const SchemaOptions& options,
    std::shared_ptr<const VocabularyTrie> vocabulary, std::vector<TokenId> eos,
    std::string_view where) {
  K3_ASSIGN(auto grammar, CompileJsonSchema(schema, options, where));
  return std::make_unique<JsonConstraint>(std::move(grammar), std::move(vocabulary),
                                          std::move(eos));
}

Result<std::unique_ptr<JsonConstraint>> JsonConstraint::AnyObject(
    std::shared_ptr<const VocabularyTrie> vocabulary, std::vector<TokenId> eos) {
  K3_ASSIGN(auto grammar, CompileJsonObject(Spacing::kCompact));
  return std::make_unique<JsonConstraint>(std::move(grammar), std::move(vocabulary),
                                          std::move(eos));
}

JsonConstraint::JsonConstraint(std::shared_ptr<const Grammar> grammar,
                               std::shared_ptr<const VocabularyTrie> vocabulary,
                               std::vector<TokenId> eos)
    : matcher_(std::make_shared<Automaton>(std::move(grammar), std::move(vocabulary))),
      eos_(std::move(eos)) {}

std::unique_ptr<TokenConstraint> JsonConstraint::Clone() const {
  return std::make_unique<JsonConstraint>(*this);
}

bool JsonConstraint::Allowed(std::span<std::uint64_t> bits) {
  if (ended_) {
    std::fill(bits.begin(), bits.end(), 0u);
    return true;
  }
  matcher_.Mask(bits);
  for (const TokenId id : eos_) {
    // A control token as a rule; if not, it ends the text and is not part of it.
    const auto i = static_cast<std::size_t>(id);
    if (id >= 0 && i / 64 < bits.size()) bits[i / 64] &= ~(std::uint64_t{1} << (i % 64));
    if (matcher_.MayEnd()) SetBit(bits, id);
  }
  return true;
}

bool JsonConstraint::Accept(TokenId token) {
  if (ended_) return false;
  if (std::find(eos_.begin(), eos_.end(), token) != eos_.end()) {
    ended_ = matcher_.MayEnd();
    return ended_;
  }
  const std::string_view bytes = matcher_.vocabulary().Bytes(token);
  return !bytes.empty() && matcher_.Accept(bytes);
}

bool JsonConstraint::finished() const { return ended_ || !matcher_.MayGoOn(); }

Result<std::vector<ReplyTool>> ReplyTools(std::span<const chat::ToolDeclaration> tools) {
  std::vector<ReplyTool> out;
  for (const chat::ToolDeclaration& tool : tools) {
    const std::string where = fmt::format("tools[{}]", out.size());
    K3_ASSIGN(const nlohmann::json declaration, ParseJson(tool.json, where));
    ReplyTool reply{tool.name, "", false};
    const auto function = declaration.find("function");
    if (function != declaration.end() && function->is_object()) {
      const auto parameters = function->find("parameters");
      if (parameters != function->end() && !parameters->is_null()) {
        reply.parameters = parameters->dump();
      }
      const auto strict = function->find("strict");
      reply.strict = strict != function->end() && *strict == true;
    }
    out.push_back(std::move(reply));
  }
  return out;
}

Result<std::unique_ptr<ReplyConstraint>> ReplyConstraint::Create(
    const ReplyOptions& options, std::shared_ptr<const VocabularyTrie> vocabulary,
    const chat::Markup& markup) {
  K3_ASSIGN(auto grammar, CompileReply(options));
  return std::make_unique<ReplyConstraint>(std::move(grammar), std::move(vocabulary), markup);
}

ReplyConstraint::ReplyConstraint(std::shared_ptr<const Grammar> grammar,
                                 std::shared_ptr<const VocabularyTrie> vocabulary,
                                 const chat::Markup& markup)
    : matcher_(std::make_shared<Automaton>(std::move(grammar), std::move(vocabulary))),
      markup_(markup) {}

std::unique_ptr<TokenConstraint> ReplyConstraint::Clone() const {
  return std::make_unique<ReplyConstraint>(*this);
}

bool ReplyConstraint::Allowed(std::span<std::uint64_t> bits) {
  matcher_.Mask(bits);
  for (const TokenId id : {markup_.open, markup_.close, markup_.sep, markup_.end}) {
    if (matcher_.CanAccept(*ControlSymbol(markup_, id))) SetBit(bits, id);
  }
  return true;
}

bool ReplyConstraint::Accept(TokenId token) {
  if (const auto symbol = ControlSymbol(markup_, token)) return matcher_.Accept(*symbol);
  const std::string_view bytes = matcher_.vocabulary().Bytes(token);
  return !bytes.empty() && matcher_.Accept(bytes);
}

bool ReplyConstraint::finished() const { return !matcher_.MayGoOn(); }

}  // namespace k3::grammar
