// Every implementation of the ops that this machine can run.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "k3/base/threads.h"
#include "k3/kernels/cpu/cpu_backend.h"
#include "k3/kernels/cpu/isa.h"

namespace k3::testing {

struct NamedBackend {
  std::string name;
  std::function<std::unique_ptr<Backend>()> make;
};

inline ThreadPool& TestPool() {
  static ThreadPool pool(2);
  return pool;
}

/// The CPU tables, slowest first; the reference before them when asked for.
inline std::vector<NamedBackend> Backends(bool with_reference) {
  std::vector<NamedBackend> all;
  if (with_reference) all.push_back({"ref", [] { return std::make_unique<ReferenceBackend>(); }});
  for (const cpu::SimdTable* table : cpu::SupportedTables()) {
    all.push_back({table->name, [table]() -> std::unique_ptr<Backend> {
                     return std::make_unique<cpu::CpuBackend>(TestPool(), *table);
                   }});
  }
  return all;
}

}  // namespace k3::testing
