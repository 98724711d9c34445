// model.safetensors.index.json and, with it, the JSON layer.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "k3/io/checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto index = k3::ParseIndex(text, "fuzz");
  if (!index.ok()) {
    if (index.message().find('\n') != std::string::npos) std::abort();  // messages are one line
    return 0;
  }
  for (const auto& file : index->files) {
    if (file.empty() || file == ".." || file.find('/') != std::string::npos) std::abort();
  }
  for (const auto& [name, file] : index->file_of) {
    if (file >= index->files.size()) std::abort();
  }
  return 0;
}
