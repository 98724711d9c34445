#include "child_server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "signals.h"

namespace k3::app {
namespace {

/// In the child: only functions that are safe after a fork.
[[noreturn]] void BecomeServer(char* const* argv, int out, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);
  dup2(out, STDOUT_FILENO);
  execv("/proc/self/exe", argv);
  _exit(127);
}

Error System(const char* what) {
  return Error{Code::kIo, fmt::format("cannot start a server: {}: {}", what, std::strerror(errno))};
}

}  // namespace

Result<std::unique_ptr<ChildServer>> ChildServer::Start(const std::vector<std::string>& arguments) {
  std::vector<std::string> words{"k3", "serve"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  words.insert(words.end(), {"--port", "0"});
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return System("pipe");
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) BecomeServer(argv.data(), ends[1], parent);
  close(ends[1]);
  if (pid < 0) {
    close(ends[0]);
    return System("fork");
  }
  std::unique_ptr<ChildServer> child(new ChildServer(pid, ends[0]));
  K3_TRY(child->ReadUrl());
  return child;
}

Status ChildServer::ReadUrl() {
  std::string line;
  while (line.find('\n') == line.npos) {
    if (Interrupted()) return Error{Code::kCancelled, ""};
    pollfd p{out_, POLLIN, 0};
    if (poll(&p, 1, 50) <= 0) continue;
    char buffer[512];
    const ssize_t n = read(out_, buffer, sizeof buffer);
    if (n <= 0) return Error{Code::kIo, "the server ended before it was ready"};
    line.append(buffer, static_cast<std::size_t>(n));
  }
  const std::size_t at = line.find("http://");
  const std::size_t end = line.find(": context", at);
  if (at == line.npos || end == line.npos) {
    return Error{Code::kIo, fmt::format("the server's first line has no address: {}", line)};
  }
  url_ = line.substr(at, end - at);
  return {};
}

ChildServer::~ChildServer() {
  close(out_);
  kill(pid_, SIGTERM);
  for (int tries = 0; tries < 2000; ++tries) {  // it drains; a request of ours may still run
    if (waitpid(pid_, nullptr, WNOHANG) != 0) return;
    usleep(5000);
  }
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

double ChildServer::cpu_seconds() const {
  std::ifstream file(fmt::format("/proc/{}/stat", pid_));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const std::size_t name_end = text.rfind(')');
  if (name_end == text.npos) return -1;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skipped;
  for (int i = 0; i < 11; ++i) fields >> skipped;
  double user = 0, system = 0;
  if (!(fields >> user >> system)) return -1;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace k3::app
