// Where the time of a forward pass goes: a backend that times another one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "k3/kernels/backend.h"

namespace k3 {

/// Calls, time and work of one kind of op. Products with weights are kept apart by shape.
struct ProfileRow {
  std::string name;
  std::int64_t calls = 0;
  double seconds = 0;
  double flops = 0;  // additions and multiplications the op needs, not what an algorithm spends
  double bytes = 0;  // weights, states and cache rows it must read and write; 0 when not counted
};

/// Runs every op on `inner` and adds up wall time. Ops must finish before they return, as they do
/// on the CPU. Costs two clock reads an op.
class ProfilingBackend : public Backend {
 public:
  explicit ProfilingBackend(std::unique_ptr<Backend> inner);
  ~ProfilingBackend() override;

#define K3_DECLARE_OP(name) void name(const name##Args& args) override;
  K3_FOR_EACH_OP(K3_DECLARE_OP)
#undef K3_DECLARE_OP
  void KdaRecurrent(const KdaArgs& args) override;
  void KdaChunk(const KdaArgs& args) override;

  /// Slowest first.
  std::vector<ProfileRow> Rows() const;
  void Clear();
  /// Ops run either way; while it is off nobody counts them. On at first.
  void SetRecording(bool on);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
