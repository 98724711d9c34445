// Which instruction sets this build and machine can use, and which one is in use.
#pragma once

#include <string>
#include <vector>

#include "k3/base/status.h"
#include "k3/kernels/cpu/simd_table.h"

namespace k3::cpu {

/// Tables that this machine can run, slowest (scalar) first.
std::vector<const SimdTable*> SupportedTables();

/// The fastest supported table, or the one named by the environment variable K3_ISA. An unknown or
/// unsupported name is an error that lists the names that would work.
Result<const SimdTable*> ChooseTable();

/// Name of the table in use ("avx512"), for reports; "scalar" when the choice is an error.
std::string ActiveIsaName();

}  // namespace k3::cpu
