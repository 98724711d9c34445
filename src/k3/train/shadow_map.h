// Where the gradient of a float in memory lives.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "k3/base/workspace.h"

namespace k3 {

/// Adjoint of memory: a range of floats has a shadow of the same size, and the gradient of the
/// float at offset i is at offset i of the shadow, whatever views the ops took of it.
class ShadowMap {
 public:
  /// The shadow belongs to the caller and is never cleared here: parameters.
  void AddParameter(const float* data, std::int64_t n, float* shadow);
  /// A block of a pass's workspace; its shadow is zero, and its memory is used again by later ones.
  void AddScratch(const float* data, std::int64_t n);
  /// Memory of one pass (states and cache pages): known, with a zero shadow, until ClearPass.
  /// Naming the same range twice is fine.
  void AddTransient(const float* data, std::int64_t n);

  /// Forgets all but the parameters: between passes a workspace may give its blocks back.
  void ClearPass();

  /// Shadow of p, or null when no range holds it. The range must hold all n floats.
  float* Find(const float* p, std::int64_t n) const;
  bool IsParameter(const float* p) const;

  std::int64_t bytes() const;

 private:
  enum class Kind : std::uint8_t { kParameter, kScratch, kTransient };
  struct Range {
    std::int64_t n;
    float* shadow;
    Kind kind;
    std::vector<float> owned;
  };
  const std::pair<const float* const, Range>* Holder(const float* p) const;

  std::map<const float*, Range> ranges_;   // by start, disjoint
  std::vector<std::vector<float>> spare_;  // of forgotten scratch
};

}  // namespace k3
