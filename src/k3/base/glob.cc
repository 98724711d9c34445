#include "k3/base/glob.h"

#include <cstddef>

namespace k3 {

bool MatchesGlob(std::string_view pattern, std::string_view text) {
  std::size_t p = 0, t = 0;
  std::size_t star = pattern.npos, from = 0;  // the last '*', and where its run ends so far
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      from = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p, ++t;
    } else if (star != pattern.npos) {
      p = star + 1;
      t = ++from;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace k3
