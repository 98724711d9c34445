#include "k3/kernels/exec.h"

#include "k3/base/check.h"
#include "k3/kernels/cpu/cpu_backend.h"
#include "k3/kernels/cpu/isa.h"

namespace k3 {

Exec::Exec(int threads, MathMode mode) : pool(threads), math(mode) {
  const auto table = cpu::ChooseTable();
  K3_CHECK(table.ok(), "the instruction set was checked at start");
  ops = std::make_unique<cpu::CpuBackend>(pool, **table, &math);
}

Exec::Exec(int threads, MathMode mode, std::unique_ptr<Backend> backend)
    : pool(threads), math(mode), ops(std::move(backend)) {}

}  // namespace k3
