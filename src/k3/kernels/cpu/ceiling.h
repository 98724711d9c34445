// What this machine can do at best, measured: the yardstick of a profile.
#pragma once

#include "k3/base/threads.h"
#include "k3/kernels/math_mode.h"

namespace k3::cpu {

struct Ceilings {
  double read_gb_s = 0;        // reading memory far larger than the caches
  double product_gflop_s = 0;  // dense products of the mode from the nearest cache
};

/// Takes about half a second on all threads of `pool`. The instruction set must have been accepted.
Ceilings MeasureCeilings(ThreadPool& pool, MathMode mode);

/// product_gflop_s alone: a tenth of a second, and no memory to speak of.
double MeasureProductRate(ThreadPool& pool, MathMode mode);

}  // namespace k3::cpu
