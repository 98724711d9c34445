#include "k3/train/event_file.h"

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <vector>

#include <fmt/format.h>

namespace k3 {
namespace {

template <class T>
void Append(std::string& out, T value) {
  static_assert(std::endian::native == std::endian::little);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Protocol buffer fields, as far as an event needs them.
void Varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}
void Key(std::string& out, unsigned field, unsigned wire) { Varint(out, field << 3 | wire); }
void Bytes(std::string& out, unsigned field, std::string_view value) {
  Key(out, field, 2);
  Varint(out, value.size());
  out += value;
}

/// wall_time = 1 (double), step = 2 (int64).
std::string Event(std::int64_t step) {
  using Clock = std::chrono::system_clock;
  std::string e;
  Key(e, 1, 1);
  Append(e, std::chrono::duration<double>(Clock::now().time_since_epoch()).count());
  Key(e, 2, 0);
  Varint(e, static_cast<std::uint64_t>(step));
  return e;
}

void Number(std::string& out, unsigned field, double value) {
  Key(out, field, 1);
  Append(out, value);
}

/// min = 1, max = 2, num = 3, sum = 4, sum_squares = 5, bucket_limit = 6 and bucket = 7 (packed).
std::string HistogramBytes(const EventFile::Histogram& h) {
  const double width = (h.high - h.low) / static_cast<double>(h.counts.size());
  double num = 0, sum = 0, squares = 0;
  std::string limits, buckets;
  for (std::size_t i = 0; i < h.counts.size(); ++i) {
    const double middle = h.low + (static_cast<double>(i) + 0.5) * width;
    num += h.counts[i], sum += h.counts[i] * middle, squares += h.counts[i] * middle * middle;
    Append(limits, h.low + static_cast<double>(i + 1) * width);
    Append(buckets, h.counts[i]);
  }
  std::string out;
  Number(out, 1, h.low), Number(out, 2, h.high), Number(out, 3, num), Number(out, 4, sum);
  Number(out, 5, squares);
  Bytes(out, 6, limits), Bytes(out, 7, buckets);
  return out;
}

std::uint32_t Masked(std::string_view bytes) { return std::rotr(Crc32c(bytes), 15) + 0xA282EAD8u; }

}  // namespace

std::uint32_t Crc32c(std::string_view bytes) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> t{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = c >> 1 ^ ((c & 1) != 0 ? 0x82F63B78u : 0u);
      t[i] = c;
    }
    return t;
  }();
  std::uint32_t crc = ~0u;
  for (const char c : bytes) crc = crc >> 8 ^ table[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~crc;
}

std::string EventRecord(std::string_view data) {
  std::string record;
  Append(record, static_cast<std::uint64_t>(data.size()));
  Append(record, Masked(record));
  record += data;
  Append(record, Masked(data));
  return record;
}

Result<EventFile> EventFile::Create(const std::string& out, std::int64_t step) {
  EventFile f;
  f.path_ = fmt::format("{}/events.out.tfevents.{:010}.k3", out, step);
  // A run that had to go back further than before: what came later is not its past any more, and
  // readers take files in the order of their names.
  std::error_code e;
  std::vector<std::filesystem::path> later;
  for (const auto& entry : std::filesystem::directory_iterator(out, e)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("events.out.tfevents.") && name.ends_with(".k3") && name.size() == 33 &&
        entry.path() > f.path_) {
      later.push_back(entry.path());
    }
  }
  for (const auto& path : later) std::filesystem::remove(path, e);
  f.file_.open(f.path_, std::ios::binary | std::ios::trunc);
  std::string version = Event(0);
  Bytes(version, 3, "brain.Event:2");
  K3_TRY(f.Write(version));
  if (step > 0) {  // session_log = 7 { status = 1: START }
    std::string start = Event(step + 1);
    Bytes(start, 7, std::string_view("\x08\x01", 2));
    K3_TRY(f.Write(start));
  }
  return f;
}

Status EventFile::Write(std::string_view event) {
  const std::string record = EventRecord(event);
  file_.write(record.data(), static_cast<std::streamsize>(record.size())).flush();
  if (!file_) {
    return Error{Code::kIo, fmt::format("{}: cannot write: {}", path_, std::strerror(errno))};
  }
  return {};
}

Status EventFile::Add(std::int64_t step, std::span<const Scalar> scalars,
                      std::span<const Histogram> histograms) {
  std::string summary;
  for (const auto& [tag, value] : scalars) {  // value = 1 { tag = 1, simple_value = 2 (float) }
    std::string v;
    Bytes(v, 1, tag);
    Key(v, 2, 5);
    Append(v, static_cast<float>(value));
    Bytes(summary, 1, v);
  }
  for (const Histogram& h : histograms) {  // value = 1 { tag = 1, histo = 5 }
    if (h.counts.empty()) continue;
    std::string v;
    Bytes(v, 1, h.tag);
    Bytes(v, 5, HistogramBytes(h));
    Bytes(summary, 1, v);
  }
  std::string event = Event(step);
  Bytes(event, 5, summary);
  return Write(event);
}

}  // namespace k3
