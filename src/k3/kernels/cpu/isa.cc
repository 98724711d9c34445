#include "k3/kernels/cpu/isa.h"

#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

namespace k3::cpu {

std::vector<const SimdTable*> SupportedTables() {
  std::vector<const SimdTable*> tables{scalar::Table()};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2_ok = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2_ok) tables.push_back(avx2::Table());
  if (avx2_ok && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    tables.push_back(avx512::Table());
  }
#endif
  return tables;
}

Result<const SimdTable*> ChooseTable() {
  const auto tables = SupportedTables();
  const char* forced = std::getenv("K3_ISA");
  if (forced == nullptr || *forced == '\0') return tables.back();
  std::string names;
  for (const SimdTable* t : tables) {
    if (std::string_view(t->name) == forced) return t;
    names += names.empty() ? t->name : fmt::format(", {}", t->name);
  }
  return Error{
      Code::kUnsupported,
      fmt::format("K3_ISA={}: not an instruction set of this machine; expected {}", forced, names)};
}

std::string ActiveIsaName() {
  const auto table = ChooseTable();
  return table.ok() ? (*table)->name : "scalar";
}

}  // namespace k3::cpu
