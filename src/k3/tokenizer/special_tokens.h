// The 256 control tokens behind the ranks, as tokenizer_config.json names them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"

namespace k3 {

inline constexpr std::size_t kSpecialTokens = 256;

struct SpecialTokens {
  std::vector<std::string> names;  // kSpecialTokens of them, all different
  bool add_bos = false;
};

/// Names of the ids n_ranks .. n_ranks + 255; an unnamed one is "<|reserved_token_ID|>". Empty
/// `config` means no file. Refuses ids outside that range, repeated ids, names or JSON keys, and
/// nesting deeper than 64. `where` starts every message.
Result<SpecialTokens> ParseSpecialTokens(std::string_view config, std::size_t n_ranks,
                                         std::string_view where);

}  // namespace k3
