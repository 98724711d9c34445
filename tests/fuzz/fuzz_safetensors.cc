// The JSON header of a safetensors file. The first eight bytes of the input are the size of the
// data section, the rest is the header.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "k3/io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 8) return 0;
  std::uint64_t data_bytes = 0;
  for (int i = 7; i >= 0; --i) data_bytes = data_bytes << 8 | data[i];
  const std::string_view text(reinterpret_cast<const char*>(data) + 8, size - 8);
  const auto header = k3::ParseSafetensorsHeader(text, data_bytes, "fuzz");
  if (!header.ok()) {
    if (header.message().find('\n') != std::string::npos) std::abort();  // messages are one line
    return 0;
  }
  // What was accepted tiles the data section exactly, and its arithmetic is safe.
  std::uint64_t at = 0;
  for (const auto& e : header->entries) {
    const k3::TensorRef t{e.dtype, e.shape, nullptr};
    if (e.begin != at || static_cast<std::uint64_t>(t.bytes()) != e.end - e.begin) std::abort();
    at = e.end;
  }
  if (at != data_bytes) std::abort();
  return 0;
}
