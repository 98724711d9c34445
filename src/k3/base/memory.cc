#include "k3/base/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <optional>
#include <sstream>

#include "k3/base/control_group.h"

namespace k3 {
namespace {

/// Groups without a limit show a number close to this.
constexpr std::int64_t kNoLimit = std::int64_t{1} << 60;

std::optional<std::int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  if (file >> value && value >= 0) return value;
  return std::nullopt;
}

/// The number behind `key` in a file of "key value" lines; "KEY:" and " kB" are understood.
std::optional<std::int64_t> ReadField(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, unit;
    std::int64_t value = 0;
    if (!(words >> name >> value)) continue;
    if (name.ends_with(':')) name.pop_back();
    if (name == key) return words >> unit && unit == "kB" ? value * 1024 : value;
  }
  return std::nullopt;
}

/// File pages a group could give back without writing.
std::int64_t Reclaimable(const std::string& stat_file) {
  return ReadField(stat_file, "inactive_file").value_or(0) +
         ReadField(stat_file, "active_file").value_or(0);
}

struct Group {
  std::int64_t limit, free;
};

/// The tightest limit of all groups this process is in.
std::optional<Group> Tightest(const std::string& root) {
  std::optional<Group> best;
  for (const ControlGroupDir& dir : ControlGroups("memory", root)) {
    const bool v2 = dir.version == 2;
    const auto limit = ReadNumber(dir.path + (v2 ? "memory.max" : "memory.limit_in_bytes"));
    if (!limit || *limit >= kNoLimit) continue;
    const char* usage = v2 ? "memory.current" : "memory.usage_in_bytes";
    const std::int64_t used = ReadNumber(dir.path + usage).value_or(0);
    const std::int64_t held =
        std::max<std::int64_t>(0, used - Reclaimable(dir.path + "memory.stat"));
    const Group g{*limit, std::max<std::int64_t>(0, *limit - held)};
    if (!best || g.free < best->free) best = g;
  }
  return best;
}

}  // namespace

MemoryLimit UsableMemory(const std::string& root) {
  MemoryLimit m;
  const std::string meminfo = root + "/proc/meminfo";
  m.machine_total = ReadField(meminfo, "MemTotal").value_or(0);
  m.machine_available = ReadField(meminfo, "MemAvailable").value_or(m.machine_total);
  m.bytes = m.machine_available;
  m.source = m.bytes > 0 ? "MemAvailable" : "unknown";
  if (const auto group = Tightest(root)) {
    if (m.machine_total == 0 || group->limit < m.machine_total) {
      m.group_limit = group->limit;
      if (m.bytes == 0 || group->free < m.bytes) {
        m.bytes = std::max<std::int64_t>(1, group->free);  // 0 would mean: not known
        m.source = "control group";
      }
    }
  }
  return m;
}

std::int64_t ResidentBytes() { return ReadField("/proc/self/status", "VmRSS").value_or(0); }

std::int64_t PeakResidentBytes() { return ReadField("/proc/self/status", "VmHWM").value_or(0); }

Result<std::int64_t> ParseBytes(std::string_view text) {
  const auto refuse = [text] {
    return Error{Code::kInvalidArgument,
                 fmt::format("found \"{}\", expected bytes such as 4096, 512M, 1.5G or 64Gi",
                             text.substr(0, 40))};
  };
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc()) return refuse();
  std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  if (unit.ends_with('B')) unit.remove_suffix(1);
  double scale = 1;
  if (!unit.empty()) {
    const std::size_t power = std::string_view("KMGT").find(unit[0]);
    const bool binary = unit.size() == 2 && unit[1] == 'i';
    if (power == std::string_view::npos || (unit.size() != 1 && !binary)) return refuse();
    scale = std::pow(binary ? 1024.0 : 1000.0, static_cast<double>(power + 1));
  }
  const double bytes = std::floor(value * scale);
  if (!(bytes >= 1 && bytes < static_cast<double>(std::int64_t{1} << 62))) return refuse();
  return static_cast<std::int64_t>(bytes);
}

std::string BytesText(std::int64_t bytes) {
  if (bytes < 1024 && bytes > -1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  const char* unit = "";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB", "PiB"}) {
    if (std::abs(value) < 1024) break;
    value /= 1024;
    unit = next;
  }
  return std::abs(value) < 100 ? fmt::format("{:.2f} {}", value, unit)
                               : fmt::format("{:.1f} {}", value, unit);
}

}  // namespace k3
