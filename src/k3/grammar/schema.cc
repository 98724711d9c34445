#include "k3/grammar/schema.h"

#include <fmt/format.h>

#include "k3/grammar/schema_compiler_internal.h"

namespace k3::grammar {

Result<std::shared_ptr<const Grammar>> CompileJsonSchema(std::string_view schema,
                                                         const SchemaOptions& options,
                                                         std::string_view where) {
  K3_ASSIGN(const Schema root, ParseSchema(schema, where));
  GrammarBuilder builder;
  TextRules text(builder, options.spacing);
  SchemaCompiler compiler(builder, text, root, options.strict, where);
  const RuleId rule = builder.Declare("#");
  K3_ASSIGN(const Expr body, compiler.Value(root, "#", kAnyType, TextForm::kJson));
  builder.Define(rule, body);
  K3_TRY(compiler.Finish());
  return builder.Finish(rule, where);
}

Result<std::shared_ptr<const Grammar>> CompileJsonObject(Spacing spacing) {
  GrammarBuilder builder;
  TextRules text(builder, spacing);
  const RuleId rule = builder.Declare("#");
  builder.Define(rule, text.AnyObject());
  return builder.Finish(rule, "response_format");
}

}  // namespace k3::grammar
