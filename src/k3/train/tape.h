// Records the ops of a forward pass and runs their gradients backwards.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "k3/kernels/backend.h"
#include "k3/kernels/backward/backward.h"
#include "k3/kernels/exec.h"
#include "k3/train/shadow_map.h"

namespace k3 {

/// Ops that run at once on the backend it wraps and, between Start and Backward, are remembered.
///
/// Layers reuse memory and work in place, so gradients belong to memory, not to values: going
/// backwards, an op that wrote y takes the shadow of y, clears it, and adds to the shadows of what
/// it read. Inputs that a backward op needs are kept where they are and copied only when a later op
/// is about to overwrite them. Everything that is differentiated must therefore be written by ops.
///
/// Weights are f32; those without a parameter range (AddParameter) get no gradient.
/// One pass at a time, on the thread that runs the pass.
class TapeBackend : public Backend {
 public:
  /// Wraps the ops of `exec`, and shadows its workspace.
  TapeBackend(Exec& exec, std::unique_ptr<Backend> inner, const cpu::SimdTable& simd);
  /// Puts a tape in front of the ops of `exec`, which owns it from then on.
  static TapeBackend& Install(Exec& exec);

  ShadowMap& shadows() { return shadows_; }
  const grad::Context& context() const { return context_; }
  /// Backward products as Bf16Ops makes the forward ones.
  void RoundBf16(bool on) { context_.round_bf16 = on; }

  /// Forgets the last pass and starts to record.
  void Start();
  /// Stops recording and prepares the shadows. Gradients of the pass's results are then added to
  /// Shadow(result), and Backward is called.
  void Finish();
  /// All recorded ops, last one first.
  void Backward();

  Mat Shadow(CMat value) const;

  /// Sees every Route op of a recorded pass after it ran.
  std::function<void(const RouteArgs&)> on_route;
  /// Adds to dlogits when the pass runs backwards. `experts` are those chosen then.
  std::function<void(const RouteArgs&, CMat logits, View<const std::int32_t, 2> experts,
                     Mat dlogits)>
      on_route_backward;

  /// Bytes of saved inputs of the last pass, and of shadows.
  std::int64_t saved_bytes() const;
  std::int64_t shadow_bytes() const { return shadows_.bytes(); }

#define K3_DECLARE_OP(name) void name(const name##Args& args) override;
  K3_FOR_EACH_OP(K3_DECLARE_OP)
#undef K3_DECLARE_OP
  void KdaRecurrent(const KdaArgs& args) override;
  void KdaChunk(const KdaArgs& args) override;

 private:
  /// An input some backward op needs: a view of live memory until that is overwritten.
  struct Saved {
    CMat view;
    std::vector<float> copy;
  };
  /// The gradient of an op's output; cleared in memory when it goes out of scope, or at once (with
  /// a copy to read from) when the op worked in place.
  class Taken;

  const Saved* Save(CMat value);
  void BeforeWrite(CMat target);
  void Push(std::function<void()> backward) { ops_.push_back(std::move(backward)); }
  void RecordKda(const KdaArgs& args, bool chunked);

  Mat GradOf(const WeightRef& w) const;
  Vec GradOf(CVec w) const;
  float* GradOf(const float* home) const { return shadows_.Find(home, 1); }

  Exec& exec_;
  std::unique_ptr<Backend> inner_;
  grad::Context context_;
  ShadowMap shadows_;
  bool recording_ = false;
  std::vector<std::function<void()>> ops_;
  std::deque<Saved> saved_;
  std::vector<Saved*> live_;  // those that are still views
};

}  // namespace k3
