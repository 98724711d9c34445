// k3 tokenize: text to token ids and back.
#include <fmt/format.h>

#include "commands.h"
#include "engine.h"
#include "exit_codes.h"
#include "json_text.h"
#include "options.h"
#include "output.h"

namespace k3::app {
namespace {

constexpr const char* kTokenizeHelp =
    "Prints the ids on one line, separated by spaces. Any bytes are accepted: what is not UTF-8\n"
    "becomes byte tokens. No BOS is added. --decode prints exactly the bytes of the ids.\n"
    "\nExamples:\n"
    "  k3 tokenize -p \"Hello, world\"\n"
    "  k3 tokenize MODEL < book.txt > ids.txt\n"
    "  k3 tokenize MODEL --decode @ids.txt";

struct TokenizeOptions {
  std::string model;
  std::optional<std::string> text, decode;
  bool json = false;
};

Status Decode(const TokenizeOptions& o, const Tokenizer& tokenizer) {
  K3_ASSIGN(const std::vector<TokenId> ids, ParseIds(*o.decode));
  K3_TRY(CheckIds(ids, static_cast<std::int64_t>(tokenizer.vocab_size())));
  const std::string text = tokenizer.Decode(ids);
  return WriteOut(o.json ? JsonText(Json{{"ids", ids}, {"text", text}}) : text);
}

Status Encode(const TokenizeOptions& o, const Tokenizer& tokenizer) {
  std::string text;
  if (o.text.has_value() && *o.text != "-") {
    text = *o.text;
  } else {
    K3_ASSIGN(text, ReadStdin());
  }
  const std::vector<TokenId> ids = tokenizer.Encode(text);
  if (!o.json) return WriteOut(fmt::format("{}\n", fmt::join(ids, " ")));
  Json pieces = Json::array();
  for (const TokenId id : ids) pieces.push_back(std::string(tokenizer.Bytes(id).value_or("")));
  return WriteOut(JsonText(Json{{"ids", ids}, {"n_tokens", ids.size()}, {"tokens", pieces}}));
}

Status Tokenize(const TokenizeOptions& o) {
  K3_ASSIGN(const std::string dir, ResolveModel(o.model));
  K3_ASSIGN(const Tokenizer tokenizer, Tokenizer::Load(dir));
  return o.decode.has_value() ? Decode(o, tokenizer) : Encode(o, tokenizer);
}

}  // namespace

void AddTokenize(CLI::App& root, Action& action) {
  auto o = std::make_shared<TokenizeOptions>();
  CLI::App* app = root.add_subcommand("tokenize", "Print the token ids of a text, or the reverse");
  app->footer(std::string(kTokenizeHelp) + kExitCodesHelp);
  AddModel(*app, o->model);
  auto* text =
      app->add_option("-p,--prompt", o->text, "Text; \"-\" or no text at all reads standard input")
          ->type_name("TEXT");
  AddIds(*app, "--decode", o->decode, "Print the text of token ids")->excludes(text);
  app->add_flag("--json", o->json, "Print a JSON object");
  app->callback([o, &action] {
    action = [o] {
      const Status s = Tokenize(*o);
      return s.ok() ? kExitOk : Fail(s.error());
    };
  });
}

}  // namespace k3::app
