// Stop strings over text that arrives in pieces.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "k3/base/status.h"

namespace k3 {

/// Finds the first place where one of several strings ends, however the text is cut. Text that
/// could still become a stop string is held back: exactly the longest suffix that begins one. When
/// several end at the same byte the longest counts. A stop string is never given out. Linear in the
/// text for each stop string. A value type; not thread-safe.
class StopMatcher {
 public:
  /// No stop strings: text passes straight through.
  StopMatcher() = default;
  /// Refuses an empty string, and one that is not UTF-8 (text never contains it).
  static Result<StopMatcher> Create(std::vector<std::string> stops);

  /// Text that is certain to come before any stop string. Empty after a match.
  std::string Push(std::string_view text);
  /// At the end of the text: what was held back. Empty after a match.
  std::string Finish();
  bool stopped() const { return stopped_; }
  /// The string that matched; empty before.
  const std::string& matched() const { return matched_; }

 private:
  struct Pattern {
    std::string text;
    std::vector<std::size_t> border;  // of text[0..i]: its longest proper prefix that is a suffix
    std::size_t length = 0;           // bytes of `text` that the input ends with
  };

  std::vector<Pattern> patterns_;
  std::string held_;
  std::string matched_;
  bool stopped_ = false;
};

}  // namespace k3
