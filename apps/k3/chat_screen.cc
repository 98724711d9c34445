#include "chat_screen.h"

#include <fmt/format.h>

#include "output.h"
#include "signals.h"

namespace k3::app {
namespace {

constexpr const char* kDim = "\x1b[2m";
constexpr const char* kPlain = "\x1b[0m";

/// A model's text must not steer the terminal.
std::string WithoutControls(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    const bool c1 = byte == 0xc2 && next >= 0x80 && next < 0xa0;  // U+0080 to U+009F, two bytes
    const bool c0 = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f;
    out += c0 || c1 ? '?' : text[i];
    if (c1) ++i;
  }
  return out;
}

}  // namespace

Status ChatScreen::Write(std::string_view text) {
  if (text.empty()) return {};
  line_open_ = text.back() != '\n';
  wrote_ = true;
  return WriteOut(interactive_ ? WithoutControls(text) : std::string(text));
}

Status ChatScreen::Dim(bool on) {
  if (!interactive_ || dim_ == on) return {};
  dim_ = on;
  if (on) SetLastWords(kPlain);
  const Status written = WriteOut(on ? kDim : kPlain);
  if (!on) SetLastWords(nullptr);
  return written;
}

Status ChatScreen::Prompt() { return interactive_ ? WriteOut("> ") : Status(); }

Status ChatScreen::Reasoning(std::string_view text) {
  if (!show_thinking_) return {};
  K3_TRY(Dim(true));
  return Write(text);
}

Status ChatScreen::Content(std::string_view text) {
  if (dim_) {
    K3_TRY(Dim(false));
    if (line_open_) K3_TRY(Write("\n"));
  }
  return Write(text);
}

Status ChatScreen::EndReply(bool whole) {
  K3_TRY(Dim(false));
  const bool needs_line = whole && !interactive_ && !wrote_;
  const Status written = line_open_ || needs_line ? Write("\n") : Status();
  wrote_ = false;
  return written;
}

void ChatScreen::Note(std::string_view text) {
  Say(fmt::format("{}{}\n", interactive_ ? "" : "k3: ", WithoutControls(text)));
}

}  // namespace k3::app
