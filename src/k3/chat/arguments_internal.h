// The arguments of one tool call, from typed elements to JSON text, and what counts as none.
// Internal to chat.
#pragma once

#include <set>
#include <string>
#include <string_view>

namespace k3::chat {

inline bool IsBlank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n\v\f") == text.npos;
}

/// Writes one JSON object piece by piece: every function returns what can be sent at once. Strings
/// stream as they come; other values wait for their end, because they are checked first.
class ArgumentWriter {
 public:
  std::string BeginArgument(std::string_view key, std::string_view type);
  std::string Text(std::string_view utf8);
  std::string EndArgument();

  /// The whole object as one raw block, passed on unchecked. Ignored after a typed argument, and
  /// the other way round.
  void BeginRaw();
  std::string RawText(std::string_view utf8);

  /// Closes what is open.
  std::string End();

 private:
  enum class Mode { kNone, kDropped, kString, kBuffered };

  bool raw_ = false;
  bool raw_has_text_ = false;
  bool raw_twice_ = false;
  bool has_arguments_ = false;
  Mode mode_ = Mode::kNone;
  std::string type_;
  std::string buffer_;
  std::set<std::string, std::less<>> keys_;
};

}  // namespace k3::chat
