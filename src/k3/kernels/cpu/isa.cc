#include "k3/kernels/cpu/isa.h"

#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace k3::cpu {

namespace {

#if defined(__x86_64__)

/// What CPUID reports in leaf 7 and __builtin_cpu_supports of g++ 12 does not know.
struct Leaf7 {
  bool avx512bf16 = false, amx_bf16 = false, amx_tile = false, vnni = false, vbmi = false;
};

Leaf7 ReadLeaf7() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf7 f;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return f;
  f.vbmi = (c >> 1 & 1u) != 0;
  f.vnni = (c >> 11 & 1u) != 0;
  f.amx_bf16 = (d >> 22 & 1u) != 0;
  f.amx_tile = (d >> 24 & 1u) != 0;
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) f.avx512bf16 = (a >> 5 & 1u) != 0;
  return f;
}

/// Linux gives a process the state of the tiles only when it asks.
bool AskForTiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

void AddX86Tables(std::vector<const SimdTable*>& tables) {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return;
  tables.push_back(avx2::Table());
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return;
  }
  tables.push_back(avx512::Table());
  const Leaf7 leaf = ReadLeaf7();
  if (!leaf.avx512bf16) return;
  tables.push_back(avx512bf16::Table());
  static const bool tiles =
      leaf.amx_tile && leaf.amx_bf16 && leaf.vnni && leaf.vbmi && AskForTiles();
  if (tiles) tables.push_back(amx::Table());
}

#endif

}  // namespace

std::vector<const SimdTable*> SupportedTables() {
  std::vector<const SimdTable*> tables{scalar::Table()};
#if defined(__x86_64__)
  AddX86Tables(tables);
#elif defined(__aarch64__)
  tables.push_back(neon::Table());  // part of the architecture
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
