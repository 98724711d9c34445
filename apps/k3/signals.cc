#include "signals.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "exit_codes.h"
#include "k3/io/mapped_file.h"

namespace k3::app {
namespace {

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "used in a signal handler");

std::atomic<bool> terminated{false};
std::atomic<const char*> last_words{nullptr};

void OnInterrupt(int number) {
  if (number == SIGTERM) terminated = true;
  if (!interrupted.exchange(true)) return;
  if (const char* words = last_words.load(); words != nullptr) {
    const ssize_t ignored = write(STDOUT_FILENO, words, std::strlen(words));
    static_cast<void>(ignored);
  }
  _exit(kExitInterrupted);
}

void SayInHandler(const char* text) {
  const ssize_t ignored = write(STDERR_FILENO, text, std::strlen(text));
  static_cast<void>(ignored);
}

void OnBusError(int number, siginfo_t* info, void*) {
  const char* path = MappedFileAt(info->si_addr);
  if (path == nullptr) {
    signal(number, SIG_DFL);  // not ours: returning repeats the fault, now fatally
    return;
  }
  SayInHandler("k3: ");
  SayInHandler(path);
  SayInHandler(": the file became shorter or unreadable while in use\n");
  _exit(kExitFailed);
}

void Handle(int number, void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  sigemptyset(&action.sa_mask);
  sigaction(number, &action, nullptr);  // no SA_RESTART: a blocked read has to notice
}

}  // namespace

void OpenStandardFiles() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) != -1 || errno != EBADF) continue;
    // The lowest free number is `fd`. Reading from 0 and writing to 1 go on failing.
    if (open("/dev/null", fd == STDOUT_FILENO ? O_RDONLY : O_WRONLY) < 0) return;
  }
}

void InstallSignalHandlers() {
  Handle(SIGINT, OnInterrupt);
  Handle(SIGTERM, OnInterrupt);
  Handle(SIGPIPE, SIG_IGN);
  Handle(SIGXFSZ, SIG_IGN);  // write() then fails with EFBIG and the message names the file
  struct sigaction action = {};
  action.sa_sigaction = OnBusError;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
}

const std::atomic<bool>& Interrupted() { return interrupted; }

void ForgetInterrupt() { interrupted = terminated.load(); }

bool Terminated() { return terminated; }

void SetLastWords(const char* text) { last_words = text; }

}  // namespace k3::app
