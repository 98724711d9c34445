// How far the scores of an Exec are from the float64 reference.
#pragma once

#include <cstdint>
#include <span>

#include "k3/base/ids.h"
#include "k3/base/status.h"
#include "k3/kernels/exec.h"
#include "k3/model/model.h"

namespace k3 {

/// error = |got - want| / |want| over all scores of all tokens. `want` is computed with the experts
/// that `got` took: where two experts nearly tie, rounding may take the other one, which says
/// nothing about the arithmetic but moves every later layer. Their weights are the reference's own.
struct ReferenceCheck {
  std::int64_t tokens = 0;
  double error = 0, tolerance = 0;
  std::int64_t choices = 0;        // experts chosen, over tokens and layers
  std::int64_t other_choices = 0;  // of these, those that the reference would not have taken
  double other_share() const;
  /// Ties are rare, so a wrong router is not taken for one: other choices may be at most an eighth.
  bool passed() const { return error <= tolerance && other_share() <= 0.125; }
};

/// Reads `ids` from an empty state with `exec` and with the reference. `exec` must compute on the
/// host; its ops are wrapped during the call. Errors: those of Model::Forward.
Result<ReferenceCheck> CheckAgainstReference(const Model& model, Exec& exec,
                                             std::span<const TokenId> ids);

}  // namespace k3
