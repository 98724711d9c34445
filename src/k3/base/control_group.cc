#include "k3/base/control_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <optional>

namespace k3 {
namespace {

constexpr double kNoQuota = 1e9;

std::string MountOf(int version, std::string_view controller, const std::string& root) {
  return fmt::format("{}/sys/fs/cgroup{}{}", root, version == 2 ? "" : "/",
                     version == 2 ? "" : controller);
}

/// From `path` up to the top of the hierarchy.
void AddUpwards(const std::string& mount, std::string path, int version,
                std::vector<ControlGroupDir>& dirs) {
  for (;;) {
    dirs.push_back({mount + path + "/", version});
    if (path.empty() || path == "/") return;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

/// The first number of `above` by that of `below`, or by its own second one where there is no
/// `below`; nothing where one is missing or says "max".
std::optional<double> ReadQuotient(const std::string& above, const std::string& below) {
  std::ifstream a(above), b(below);
  double quota = 0, period = 0;
  if (!(a >> quota)) return std::nullopt;
  if (!((below.empty() ? a : b) >> period)) return std::nullopt;
  if (!(quota > 0 && period > 0)) return std::nullopt;  // version 1 says -1 for no limit
  return quota / period;
}

}  // namespace

std::vector<ControlGroupDir> ControlGroups(std::string_view controller, const std::string& root) {
  std::vector<ControlGroupDir> dirs;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "ID:CONTROLLERS:PATH"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const int version = names == ",," ? 2 : 1;
    if (version == 1 && names.find(fmt::format(",{},", controller)) == std::string::npos) {
      continue;
    }
    AddUpwards(MountOf(version, controller, root), line.substr(second + 1), version, dirs);
  }
  if (dirs.empty()) {
    for (const int version : {2, 1}) {
      AddUpwards(MountOf(version, controller, root), "", version, dirs);
    }
  }
  return dirs;
}

double ControlGroupCpus(const std::string& root) {
  double least = kNoQuota;
  for (const ControlGroupDir& dir : ControlGroups("cpu", root)) {
    const auto cpus = dir.version == 2 ? ReadQuotient(dir.path + "cpu.max", "")
                                       : ReadQuotient(dir.path + "cpu.cfs_quota_us",
                                                      dir.path + "cpu.cfs_period_us");
    if (cpus) least = std::min(least, *cpus);
  }
  return least;
}

}  // namespace k3
