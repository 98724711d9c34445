// How fast this machine reads memory and multiplies, measured in well under a second.
#pragma once

#include <cstdint>
#include <string>

#include "k3/kernels/exec.h"

namespace k3 {

struct MachineSpeed {
  double read_bytes_per_s = 0;  // all threads read one large buffer, best of the repeats
  double f32_ops_per_s = 0;     // the Gemm of the backend on cached f32 matrices; a fused
                                // multiply-add counts two
  std::int64_t buffer_bytes = 0;
  int threads = 0;
  std::string method;  // one line for reports
};

/// Uses the threads and ops of `exec`; takes about half a second and `buffer_bytes` of memory for
/// a moment (0: 256 MiB).
MachineSpeed MeasureMachine(Exec& exec, std::int64_t buffer_bytes = 0);

}  // namespace k3
