// Ctrl-C, closed pipes and files that vanish under a memory map.
#pragma once

#include <atomic>

namespace k3::app {

/// Gives 0, 1 and 2 a use where the caller closed them, so that no model or output file gets such a
/// number and then the text of a message. Call first.
void OpenStandardFiles();

/// Installs the handlers. The first SIGINT or SIGTERM only sets the flag below; a second one ends
/// the process at once with status 130. SIGPIPE is ignored: writes report the closed pipe; so is
/// SIGXFSZ. SIGBUS inside a mapped model file ends the process with status 1 and a message naming
/// the file.
void InstallSignalHandlers();

/// Set by the first Ctrl-C.
const std::atomic<bool>& Interrupted();

/// For a program that goes on after Ctrl-C: forgets the one that was seen. SIGTERM stays.
void ForgetInterrupt();
/// SIGTERM arrived.
bool Terminated();

/// Written to standard output when a second Ctrl-C ends the process, e.g. to end a colour; null for
/// nothing. The text must live for ever.
void SetLastWords(const char* text);

}  // namespace k3::app
