#include "prompt.h"

#include <fmt/format.h>

#include "options.h"
#include "output.h"

namespace k3::app {
namespace {

Result<std::string> ReadText(const PromptOptions& options) {
  if (options.text.has_value() && *options.text != "-") return *options.text;
  return ReadStdin();
}

}  // namespace

void AddPromptOptions(CLI::App& app, PromptOptions& options) {
  auto* text = app.add_option("-p,--prompt", options.text,
                              "Prompt; \"-\" or no prompt at all reads standard input")
                   ->type_name("TEXT");
  AddIds(app, "--ids", options.ids, "Prompt as token ids")->excludes(text);
  auto* bos = app.add_flag("--bos", options.bos, "Put the BOS token in front");
  app.add_flag("--no-bos", options.no_bos, "Put no BOS token in front")->excludes(bos);
}

Result<std::vector<TokenId>> ReadPrompt(const PromptOptions& options, const Engine& engine,
                                        bool at_start) {
  std::vector<TokenId> ids;
  bool with_bos = options.bos;
  if (options.ids.has_value()) {
    K3_ASSIGN(ids, ParseIds(*options.ids));
    K3_TRY(CheckIds(ids, engine.model->config().vocab));
    with_bos |= at_start && !options.no_bos && ids.empty() && engine.bos.has_value();
  } else {
    K3_ASSIGN(const std::string text, ReadText(options));
    ids = engine.tokenizer->Encode(text);
    if (at_start && !options.no_bos) {
      with_bos |= engine.tokenizer->add_bos() || (text.empty() && engine.bos.has_value());
    }
    // The tokenizer's files and the model's may disagree.
    K3_TRY(CheckIds(ids, engine.model->config().vocab));
  }
  if (with_bos) {
    if (!engine.bos.has_value()) {
      return Error{Code::kInvalidArgument,
                   fmt::format("{}: a BOS token is wanted, but the model has none", engine.dir)};
    }
    ids.insert(ids.begin(), *engine.bos);
    K3_TRY(CheckIds({*engine.bos}, engine.model->config().vocab));
  }
  return ids;
}

}  // namespace k3::app
