// config.json, and generation_config.json with the same bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "k3/model/config.h"
#include "k3/model/generation_config.h"
#include "k3/model/tensor_table.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  (void)k3::ParseGenerationConfig(text, "fuzz", 1000);
  const auto config = k3::ParseModelConfig(text, "fuzz");
  if (!config.ok()) {
    if (config.message().find('\n') != std::string::npos) std::abort();  // messages are one line
    return 0;
  }
  // Every tensor of an accepted config has a size that 64 bits hold; stop early on huge models.
  std::int64_t total = 0;
  int left = 20000;
  (void)k3::ForEachTensor(*config, [&](const k3::TensorSpec& spec) -> k3::Status {
    for (const auto d : spec.shape) {
      if (d <= 0) std::abort();
    }
    if (__builtin_add_overflow(total, 4 * spec.elements(), &total)) std::abort();
    if (--left == 0) return k3::Error{k3::Code::kCancelled, "enough"};
    return {};
  });
  return 0;
}
