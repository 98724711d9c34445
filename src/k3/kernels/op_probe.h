// Which ops each backend of this build has, shown by running them: a small case of every op on
// every backend of this machine, compared with the reference.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

enum class ProbeState : std::uint8_t {
  kReference,       // judges the others
  kAgrees,          // ran here, within tolerance of the reference
  kDiffers,         // ran here, and is wrong
  kNotHere,         // in this build, but this machine cannot run it
  kNotImplemented,  // not in this build
};
std::string_view Name(ProbeState state);  // "reference", "agrees", "differs", ...

struct OpProbeCell {
  std::string backend;  // "ref", "scalar", "avx2", "avx512", "cuda"
  ProbeState state = ProbeState::kNotImplemented;
  double rel_l2 = 0;  // against the reference, where it ran
};

struct OpProbeRow {
  std::string op;
  std::vector<OpProbeCell> cells;  // the same backends in every row
};

/// Takes some milliseconds. The list of ops is K3_FOR_EACH_OP: an op without a case here does not
/// compile.
std::vector<OpProbeRow> ProbeOps();

constexpr double kProbeTolerance = 1e-4;  // the widest tolerance of an op's contract

}  // namespace k3
