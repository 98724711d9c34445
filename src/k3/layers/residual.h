// How sublayers read from and join the residual stream: plain, scaled, gated, or an attention over
// depth. Spec sections 4, 5 and 15.5.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "k3/kernels/exec.h"
#include "k3/layers/config.h"
#include "k3/tensor/view.h"
#include "k3/tensor/weight.h"

namespace k3 {

/// The learned parts of one place where the stream is read or written. Unused ones are empty.
struct ResidualSite {
  CVec mix;                      // [H]: norm weight times projection, for the attention over depth
  const float* gamma = nullptr;  // gate on that mix
  const float* alpha = nullptr;  // learned scale of the sublayer's output
  CVec out_norm;                 // [H]: norm of the sublayer's output
  WeightRef gate;                // [1, H] or [H, H]
  CVec gate_bias;                // [1] or [H]
};

/// Sites of a model: two a layer, and the one at the output.
struct ResidualWeights {
  std::vector<ResidualSite> attention, ffn;  // by layer
  ResidualSite output;
};

enum class Site : std::uint8_t { kAttention, kFfn };

/// Sees the softmax weights over depth, or the gates, of a site. For traces.
class ResidualObserver {
 public:
  virtual ~ResidualObserver() = default;
  virtual void DepthWeights(std::int64_t layer, std::optional<Site> site, CMat weights) = 0;
  virtual void Gate(std::int64_t layer, Site site, CMat logits) = 0;
};

/// The stream of one forward pass over T tokens. Per layer: Read(kAttention), Write(kAttention),
/// Read(kFfn), Write(kFfn); after the last layer Output. All memory is the pass's workspace.
class ResidualStream {
 public:
  virtual ~ResidualStream() = default;
  /// What the sublayer reads, before its own norm. Valid until the next call.
  virtual CMat Read(std::int64_t layer, Site site) = 0;
  /// Joins the sublayer's output y; `n` is the normed input it was computed from.
  virtual void Write(std::int64_t layer, Site site, CMat n, CMat y) = 0;
  /// The row that later mixes call live (spec: p); the newest sublayer output in full_attn_res.
  virtual CMat live() const = 0;
  /// What the final norm reads.
  virtual CMat Output() = 0;
};

/// Starts a stream from the embedding [T, H], which must outlive it.
std::unique_ptr<ResidualStream> StartStream(const ResidualConfig& config, std::int64_t n_layers,
                                            float rms_eps, const ResidualWeights& w, Exec& exec,
                                            Mat embedding, ResidualObserver* observer);

}  // namespace k3
