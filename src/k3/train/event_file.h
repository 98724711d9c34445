// TensorBoard event files: numbers under names, by step.
#pragma once

#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "k3/base/status.h"

namespace k3 {

/// CRC-32C (Castagnoli), as the records use it before masking.
std::uint32_t Crc32c(std::string_view bytes);

/// A record: u64 length, u32 masked CRC of those 8 bytes, the data, u32 masked CRC of the data;
/// little-endian. masked = rotate right by 15, plus 0xA282EAD8.
std::string EventRecord(std::string_view data);

/// Appends one event a call; every record reaches the file before the call returns.
class EventFile {
 public:
  /// OUT/events.out.tfevents.STEP.k3. What an earlier part of the run logged after `step` is
  /// declared void: readers drop it. A file of the same step is replaced.
  static Result<EventFile> Create(const std::string& out, std::int64_t step);

  using Scalar = std::pair<std::string, double>;
  /// Counts of equal bins from low to high.
  struct Histogram {
    std::string tag;
    double low = 0, high = 1;
    std::vector<double> counts;
  };
  Status Add(std::int64_t step, std::span<const Scalar> scalars,
             std::span<const Histogram> histograms = {});

 private:
  Status Write(std::string_view event);
  std::string path_;
  std::ofstream file_;
};

}  // namespace k3
