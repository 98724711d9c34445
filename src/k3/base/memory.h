// How much memory this process may use, and how much it uses; sizes as people write them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "k3/base/status.h"

namespace k3 {

/// Memory this process could still get without pushing out anything but file pages.
struct MemoryLimit {
  std::int64_t bytes = 0;  // what counts: the smaller of the two below
  std::int64_t machine_available = 0;
  std::int64_t machine_total = 0;
  std::int64_t group_limit = -1;  // of the tightest control group above this process; -1: none
  std::string source;             // "MemAvailable", "control group", for reports
};

/// Reads /proc/meminfo and the control groups, versions 1 and 2, of this process. `root` stands
/// before every path, for tests. Where nothing can be read, `bytes` is 0 and the source says so.
MemoryLimit UsableMemory(const std::string& root = "");

/// Resident memory of this process in bytes, now and at its highest; 0 where it cannot be told.
std::int64_t ResidentBytes();
std::int64_t PeakResidentBytes();

/// "4096", "512M", "1.5G" (powers of 1000), "64Gi" (powers of 1024); K, M, G, T, with or without a
/// trailing B. At least one byte and less than 2^62.
Result<std::int64_t> ParseBytes(std::string_view text);

/// "27.00 GiB", "612 B": powers of 1024, three or four digits.
std::string BytesText(std::int64_t bytes);

}  // namespace k3
