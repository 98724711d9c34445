#include "k3/io/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <tuple>

#include "k3/base/check.h"
#include "k3/io/atomic_file.h"
#include "k3/io/json.h"

namespace k3 {
namespace {

using nlohmann::json;
using Entry = SafetensorsHeader::Entry;

constexpr std::int64_t kMaxElements = std::int64_t{1} << 60;
constexpr std::size_t kMaxRank = 8;

/// Messages of one tensor.
struct TensorErrors {
  std::string_view where;
  const std::string& name;

  Error Corrupt(std::string_view what) const {
    return {Code::kCorrupt, fmt::format("{}: tensor {}: {}", where, Printable(name), what)};
  }
};

/// Bytes of a tensor. Zero dimensions do not hide an overflow of the others: TensorRef multiplies
/// them in any order.
Result<std::uint64_t> ByteCount(const Entry& e, const TensorErrors& errors) {
  std::int64_t product = 1;
  bool empty = false;
  for (const std::int64_t d : e.shape) {
    if (d == 0) {
      empty = true;
    } else if (product > kMaxElements / d) {
      return errors.Corrupt(fmt::format("shape {} has too many elements", ShapeString(e.shape)));
    } else {
      product *= d;
    }
  }
  return empty ? 0
               : static_cast<std::uint64_t>(product) * static_cast<std::uint64_t>(SizeOf(e.dtype));
}

Status ReadShape(const JsonReader& r, Entry* e, const TensorErrors& errors) {
  K3_ASSIGN(auto shape, r.OptIntList("shape", 0, kMaxElements));
  if (!shape) return errors.Corrupt("shape is missing");
  if (shape->size() > kMaxRank) {
    return errors.Corrupt(
        fmt::format("{} dimensions, expected at most {}", shape->size(), kMaxRank));
  }
  e->shape = std::move(*shape);
  return {};
}

Status ReadOffsets(const JsonReader& r, Entry* e, const TensorErrors& errors) {
  K3_ASSIGN(const auto offsets, r.OptIntList("data_offsets", 0, INT64_MAX));
  if (!offsets || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1]) {
    return errors.Corrupt("data_offsets is not a pair [begin, end] with begin <= end");
  }
  e->begin = static_cast<std::uint64_t>((*offsets)[0]);
  e->end = static_cast<std::uint64_t>((*offsets)[1]);
  return {};
}

Result<Entry> ReadEntry(const std::string& name, const json& value, std::string_view where) {
  const TensorErrors errors{where, name};
  if (name.empty()) return errors.Corrupt("the name is empty");
  if (!value.is_object()) return errors.Corrupt("the entry is not an object");
  for (const auto& [key, unused] : value.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      return errors.Corrupt(fmt::format("unknown key \"{}\"", Printable(key)));
    }
  }
  const JsonReader r(value, where, "tensor " + Printable(name));
  Entry e{name, DType::kF32, {}, 0, 0};
  K3_ASSIGN(const std::string dtype, r.String("dtype"));
  const auto parsed = ParseDType(dtype);
  if (!parsed) {
    return Error{Code::kUnsupported, errors.Corrupt("unknown dtype " + Printable(dtype)).message};
  }
  e.dtype = *parsed;
  K3_TRY(ReadShape(r, &e, errors));
  K3_TRY(ReadOffsets(r, &e, errors));
  K3_ASSIGN(const std::uint64_t bytes, ByteCount(e, errors));
  if (e.end - e.begin != bytes) {
    return errors.Corrupt(fmt::format("{} {} needs {} bytes, data_offsets give {}", Name(e.dtype),
                                      ShapeString(e.shape), bytes, e.end - e.begin));
  }
  return e;
}

Status ReadMetadata(const json& value, SafetensorsHeader* header, std::string_view where) {
  if (!value.is_object()) {
    return Error{Code::kCorrupt, fmt::format("{}: __metadata__ is not an object", where)};
  }
  for (const auto& [key, v] : value.items()) {
    if (!v.is_string()) {
      return Error{Code::kCorrupt, fmt::format("{}: __metadata__.{} is {}, expected a string",
                                               where, Printable(key), PrintableValue(v))};
    }
    header->metadata.emplace(key, v.get<std::string>());
  }
  return {};
}

/// The byte ranges must tile the data section.
Status CheckCoverage(const std::vector<Entry>& entries, std::uint64_t data_bytes,
                     std::string_view where) {
  std::uint64_t at = 0;
  for (const Entry& e : entries) {
    const TensorErrors errors{where, e.name};
    if (e.end > data_bytes) {
      return errors.Corrupt(fmt::format(
          "ends at byte {} of the data, but the file holds {}: truncated?", e.end, data_bytes));
    }
    if (e.begin < at) {
      return errors.Corrupt(fmt::format("bytes {} to {} overlap another tensor", e.begin, e.end));
    }
    if (e.begin > at) {
      return errors.Corrupt(fmt::format("starts at byte {}, leaving a hole after {}", e.begin, at));
    }
    at = e.end;
  }
  if (at != data_bytes) {
    return Error{Code::kCorrupt, fmt::format("{}: {} bytes of data, but the tensors end at {}",
                                             where, data_bytes, at)};
  }
  return {};
}

}  // namespace

Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, std::uint64_t data_bytes,
                                                 std::string_view where) {
  if (text.empty() || text[0] != '{') {
    return Error{Code::kCorrupt, fmt::format("{}: the header does not start with {{", where)};
  }
  K3_ASSIGN(const json root, ParseJson(text, where));
  SafetensorsHeader header;
  header.entries.reserve(root.size());
  for (const auto& [name, value] : root.items()) {
    if (name == "__metadata__") {
      K3_TRY(ReadMetadata(value, &header, where));
      continue;
    }
    K3_ASSIGN(Entry entry, ReadEntry(name, value, where));
    header.entries.push_back(std::move(entry));
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const Entry& x, const Entry& y) {
    return std::tie(x.begin, x.end, x.name) < std::tie(y.begin, y.end, y.name);
  });
  K3_TRY(CheckCoverage(header.entries, data_bytes, where));
  return header;
}

namespace {

/// Length of the header, with what a file must have for it.
Result<std::uint64_t> HeaderBytes(const MappedFile& mapped) {
  const std::string& path = mapped.path();
  const std::uint64_t size = mapped.size();
  if (size < 8) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: {} bytes, too short for a safetensors file", path, size)};
  }
  std::uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) {
    header_bytes = header_bytes << 8 | std::to_integer<std::uint64_t>(mapped.data()[i]);
  }
  if (header_bytes > kMaxSafetensorsHeader || header_bytes > size - 8) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: header of {} bytes; the file has {} and the limit is {}", path,
                             header_bytes, size, kMaxSafetensorsHeader)};
  }
  return header_bytes;
}

}  // namespace

Result<SafetensorsFile> SafetensorsFile::Open(const std::string& path, Residence residence) {
  K3_ASSIGN(MappedFile mapped, MappedFile::Open(path));
  K3_ASSIGN(std::uint64_t header_bytes, HeaderBytes(mapped));
  if (residence != Residence::kMapped) {
    auto copy = MappedFile::OpenCopy(path, static_cast<std::size_t>(8 + header_bytes));
    const bool stay_mapped =
        residence == Residence::kAuto && !copy.ok() && copy.error().code == Code::kResource;
    if (!stay_mapped) {
      K3_ASSIGN(mapped, std::move(copy));
      K3_ASSIGN(header_bytes, HeaderBytes(mapped));  // the file may have been replaced
    }
  }
  const std::uint64_t data_at = 8 + header_bytes, size = mapped.size();
  K3_ASSIGN(SafetensorsHeader header,
            ParseSafetensorsHeader(mapped.text().substr(8, header_bytes), size - data_at, path));
  SafetensorsFile file;
  for (Entry& e : header.entries) {
    file.tensors_.emplace(std::move(e.name), TensorRef{e.dtype, std::move(e.shape),
                                                       mapped.data() + data_at + e.begin});
  }
  file.metadata_ = std::move(header.metadata);
  file.file_ = std::move(mapped);
  return file;
}

namespace {

/// The JSON header for tensors in file order, padded to 8 bytes.
std::string HeaderText(const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json head = nlohmann::ordered_json::object();
  if (!metadata.empty()) head["__metadata__"] = metadata;
  std::string text = head.dump(-1, ' ', true, json::error_handler_t::replace);
  text.pop_back();  // entries are appended by hand: an ordered_json of 500k keys is quadratic
  std::int64_t at = 0;
  for (const auto& [name, t] : tensors) {
    const std::int64_t end = at + t.bytes();
    text += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                        text.size() > 1 ? "," : "",
                        json(name).dump(-1, ' ', true, json::error_handler_t::replace),
                        Name(t.dtype), fmt::join(t.shape, ","), at, end);
    at = end;
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

Status CheckWritable(const std::string& path, const std::vector<NamedTensor>& sorted) {
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const auto& [name, t] = sorted[i];
    const char* wrong = nullptr;
    if (name.empty() || name == "__metadata__") wrong = "is no name for a tensor";
    for (const auto d : t.shape) {
      if (d < 0) wrong = "has a negative dimension";
    }
    if (wrong) {
      return Error{Code::kInvalidArgument,
                   fmt::format("{}: tensor \"{}\" {}", path, Printable(name), wrong)};
    }
  }
  std::vector<std::string_view> names;
  for (const auto& t : sorted) names.push_back(t.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: duplicate tensor {}", path, Printable(*twice))};
  }
  return {};
}

}  // namespace

Result<SafetensorsWriter> SafetensorsWriter::Create(
    const std::string& path, std::vector<NamedTensor> tensors,
    const std::map<std::string, std::string>& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const NamedTensor& a, const NamedTensor& b) {
    const int sa = SizeOf(a.tensor.dtype), sb = SizeOf(b.tensor.dtype);
    return sa != sb ? sa > sb : a.name < b.name;
  });
  K3_TRY(CheckWritable(path, tensors));
  const std::string header = HeaderText(tensors, metadata);
  if (header.size() > kMaxSafetensorsHeader) {
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: {} tensors need a header of {} bytes, more than the format's {}",
                             path, tensors.size(), header.size(), kMaxSafetensorsHeader)};
  }
  K3_ASSIGN(AtomicFile file, AtomicFile::Create(path));
  unsigned char length[8];
  for (std::size_t i = 0; i < 8; ++i)
    length[i] = static_cast<unsigned char>(header.size() >> (8 * i));
  K3_TRY(file.Write(length, sizeof length));
  K3_TRY(file.Write(header.data(), header.size()));
  std::int64_t bytes = 0;
  for (const auto& t : tensors) bytes += t.tensor.bytes();
  return SafetensorsWriter(std::move(file), std::move(tensors), bytes);
}

Status SafetensorsWriter::Write(const void* data, std::int64_t bytes) {
  K3_CHECK(bytes >= 0 && bytes <= left_, "more data than the header describes");
  left_ -= bytes;
  return file_.Write(data, static_cast<std::size_t>(bytes));
}

Status SafetensorsWriter::Commit() {
  K3_CHECK(left_ == 0, "less data than the header describes");
  return file_.Commit();
}

Status WriteSafetensors(const std::string& path, std::vector<NamedTensor> tensors,
                        const std::map<std::string, std::string>& metadata) {
  for (const auto& [name, t] : tensors) {
    if (t.data || t.bytes() == 0) continue;
    return Error{Code::kInvalidArgument,
                 fmt::format("{}: tensor \"{}\" has no data", path, Printable(name))};
  }
  K3_ASSIGN(SafetensorsWriter writer,
            SafetensorsWriter::Create(path, std::move(tensors), metadata));
  for (const auto& t : writer.order()) K3_TRY(writer.Write(t.tensor.data, t.tensor.bytes()));
  return writer.Commit();
}

}  // namespace k3
