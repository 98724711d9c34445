#include "k3/serve/http.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <random>

namespace k3::serve {

std::string_view HttpRequest::Header(std::string_view lower_case_name) const {
  for (const auto& [name, value] : headers) {
    if (name == lower_case_name) return value;
  }
  return {};
}

std::string RandomId() {
  thread_local std::random_device device;
  const auto word = [] { return static_cast<std::uint64_t>(device()); };
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", word(), word(), word(), word());
}

std::string RequestIdOf(std::string_view text) {
  const bool harmless = std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == ':' || c == '-';
  });
  return !text.empty() && text.size() <= 128 && harmless ? std::string(text) : RandomId();
}

bool ConstantTimeEqual(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<unsigned char>(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

}  // namespace k3::serve
