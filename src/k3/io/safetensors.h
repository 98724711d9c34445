// The safetensors file format: u64 header length, JSON header, raw tensor bytes.
// Untrusted input: everything is validated before a byte of data is used (docs/formats.md).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "k3/base/status.h"
#include "k3/io/atomic_file.h"
#include "k3/io/mapped_file.h"
#include "k3/tensor/tensor_ref.h"

namespace k3 {

/// Where tensor bytes lie: in the page cache, which costs no memory of one's own, or in a copy made
/// by MappedFile::OpenCopy, which is read faster. kAuto copies if the system gives the memory, and
/// a Checkpoint only when there is memory for it twice over.
enum class Residence { kMapped, kCopied, kAuto };

/// One opened file. Tensor data are views into the mapping and live as long as this object.
class SafetensorsFile {
 public:
  static Result<SafetensorsFile> Open(const std::string& path,
                                      Residence residence = Residence::kMapped);

  const std::string& path() const { return file_.path(); }
  const std::map<std::string, TensorRef, std::less<>>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const MappedFile& file() const { return file_; }
  /// Moves the map out (a Checkpoint merges many); the tensors still live as long as this object.
  std::map<std::string, TensorRef, std::less<>> TakeTensors() { return std::move(tensors_); }

 private:
  MappedFile file_;
  std::map<std::string, TensorRef, std::less<>> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// Largest header accepted, the limit of the format's reference library.
inline constexpr std::uint64_t kMaxSafetensorsHeader = 100'000'000;

/// What a header says, without looking at data. Exposed for inspection and fuzzing.
struct SafetensorsHeader {
  struct Entry {
    std::string name;
    DType dtype;
    std::vector<std::int64_t> shape;
    std::uint64_t begin, end;  // relative to the end of the header
  };
  std::vector<Entry> entries;  // in order of `begin`
  std::map<std::string, std::string> metadata;
};

/// Validates the JSON header of a file whose data section has `data_bytes` bytes: unknown dtypes,
/// shapes whose product overflows or disagrees with the byte range, overlaps, holes, ranges outside
/// the file and duplicate names are refused. Tensors of no bytes are fine. `where` starts every
/// message.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, std::uint64_t data_bytes,
                                                 std::string_view where);

/// A tensor to write. SafetensorsWriter does not look at its data.
struct NamedTensor {
  std::string name;
  TensorRef tensor;
};

/// Writes one file whose bytes come one piece after the other, so that they need not be in memory
/// together: tensors sorted as by WriteSafetensors; the caller writes their data in that order.
/// Without Commit nothing appears under `path`. Movable; one thread.
class SafetensorsWriter {
 public:
  static Result<SafetensorsWriter> Create(const std::string& path, std::vector<NamedTensor> tensors,
                                          const std::map<std::string, std::string>& metadata = {});

  /// The tensors in the order their bytes are expected in.
  const std::vector<NamedTensor>& order() const { return order_; }
  Status Write(const void* data, std::int64_t bytes);
  /// All bytes must have been written, and no more: anything else is a bug.
  Status Commit();

 private:
  SafetensorsWriter(AtomicFile file, std::vector<NamedTensor> order, std::int64_t bytes)
      : file_(std::move(file)), order_(std::move(order)), left_(bytes) {}

  AtomicFile file_;
  std::vector<NamedTensor> order_;
  std::int64_t left_;
};

/// Writes one file, names in ASCII or valid UTF-8: tensors sorted by decreasing element size, then
/// name, header padded to 8 bytes. Writes to a temporary name, syncs, then renames: a full disk
/// leaves no file under `path`.
Status WriteSafetensors(const std::string& path, std::vector<NamedTensor> tensors,
                        const std::map<std::string, std::string>& metadata = {});

}  // namespace k3
