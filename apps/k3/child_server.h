// k3 serve as a child process, for commands that measure it.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "k3/base/status.h"

namespace k3::app {

/// Ends with this object, by SIGTERM; also when this process dies.
class ChildServer {
 public:
  /// Runs this program as "serve ARGUMENTS --port 0" and waits until it says where it listens. Its
  /// standard error is ours. Ctrl-C ends the wait with kCancelled.
  static Result<std::unique_ptr<ChildServer>> Start(const std::vector<std::string>& arguments);
  ~ChildServer();
  ChildServer(const ChildServer&) = delete;
  ChildServer& operator=(const ChildServer&) = delete;

  const std::string& url() const { return url_; }
  /// Processor time so far; negative when the system does not tell.
  double cpu_seconds() const;

 private:
  ChildServer(pid_t pid, int out) : pid_(pid), out_(out) {}
  Status ReadUrl();

  pid_t pid_;
  int out_;
  std::string url_;
};

}  // namespace k3::app
