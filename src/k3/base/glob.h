// Shell-like patterns for names.
#pragma once

#include <string_view>

namespace k3 {

/// Whether `pattern` matches all of `text`: '*' stands for any run of characters, dots included,
/// '?' for one; everything else for itself. Time is at most the product of the two lengths.
bool MatchesGlob(std::string_view pattern, std::string_view text);

}  // namespace k3
