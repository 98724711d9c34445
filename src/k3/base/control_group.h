// The control groups of this process, versions 1 and 2: where to look for limits.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace k3 {

struct ControlGroupDir {
  std::string path;  // ends in "/"
  int version = 2;   // whose file names to expect in it
};

/// The groups that limit `controller` ("cpu", "memory") for this process: its own and all above it,
/// which bind as well. Where the process cannot tell its group, the top ones. `root` stands before
/// every path, for tests. Not every path need exist: inside a container the group's name may be
/// that of the host, while the mount shows the container's group at its top.
std::vector<ControlGroupDir> ControlGroups(std::string_view controller,
                                           const std::string& root = "");

/// Processors granted by the tightest quota of those groups, 0.5 for half a one; a large number
/// where there is none.
double ControlGroupCpus(const std::string& root = "");

}  // namespace k3
