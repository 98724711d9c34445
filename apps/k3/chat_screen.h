// What a conversation looks like: on a terminal with a prompt and dim thoughts, elsewhere the
// replies alone.
#pragma once

#include <string>
#include <string_view>

#include "k3/base/status.h"

namespace k3::app {

class ChatScreen {
 public:
  /// `interactive`: input and output are a terminal. `show_thinking`: print the reasoning too.
  ChatScreen(bool interactive, bool show_thinking)
      : interactive_(interactive), show_thinking_(show_thinking) {}

  bool interactive() const { return interactive_; }
  Status Prompt();
  Status Reasoning(std::string_view text);
  Status Content(std::string_view text);
  /// Ends the reply's last line and its colour. Off a terminal every whole reply is at least a line
  /// end, so that replies can be told apart.
  Status EndReply(bool whole);
  /// A remark of the program: on the terminal, or on standard error.
  void Note(std::string_view text);

 private:
  Status Write(std::string_view text);
  Status Dim(bool on);

  bool interactive_, show_thinking_;
  bool dim_ = false;
  bool line_open_ = false;
  bool wrote_ = false;
};

}  // namespace k3::app
