#include "k3/tokenizer/tokenizer.h"
#include "k3/tokenizer/utf8.h"

namespace k3 {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace

std::string Utf8Stream::Push(std::string_view bytes) {
  std::string text;
  pending_.append(bytes);
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const std::size_t valid = utf8::ValidPrefix(rest);
    text.append(rest.substr(0, valid));
    rest.remove_prefix(valid);
    if (rest.empty()) break;
    const utf8::Char c = utf8::Decode(rest);
    if (c.kind == utf8::Kind::kIncomplete) break;
    text.append(kReplacement);
    rest.remove_prefix(c.length);
  }
  pending_.erase(0, pending_.size() - rest.size());
  return text;
}

std::string Utf8Stream::Finish() {
  const bool unfinished = !pending_.empty();
  pending_.clear();
  return unfinished ? std::string(kReplacement) : std::string();
}

}  // namespace k3
