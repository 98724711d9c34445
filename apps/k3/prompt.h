// Where the prompt of a command comes from: -p, --ids or standard input.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine.h"
#include "k3/base/ids.h"
#include "k3/base/status.h"

namespace k3::app {

struct PromptOptions {
  std::optional<std::string> text;  // "-": standard input
  std::optional<std::string> ids;
  bool bos = false, no_bos = false;
};

void AddPromptOptions(CLI::App& app, PromptOptions& options);

/// Reads and encodes the prompt. Bytes are taken as they are; what is not UTF-8 becomes byte
/// tokens. BOS comes first when --bos asks for it or, for text at the start of a sequence, when the
/// tokenizer says add_bos_token; an empty text is BOS alone wherever the model has one. Empty when
/// there is nothing at all.
Result<std::vector<TokenId>> ReadPrompt(const PromptOptions& options, const Engine& engine,
                                        bool at_start);

}  // namespace k3::app
