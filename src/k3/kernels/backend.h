// The coarse ops that layers are written in. One implementation per device.
#pragma once

#include "k3/kernels/attn_res.h"
#include "k3/kernels/elementwise.h"
#include "k3/kernels/gemm.h"
#include "k3/kernels/gqa.h"
#include "k3/kernels/kda.h"
#include "k3/kernels/mla.h"
#include "k3/kernels/moe.h"
#include "k3/kernels/norm.h"
#include "k3/kernels/short_conv.h"

namespace k3 {

/// X-macro over all ops: name of the method; its arguments are <Name>Args.
/// KdaRecurrent and KdaChunk share KdaArgs and are listed by hand where needed.
#define K3_FOR_EACH_OP(X) \
  X(RmsNorm)              \
  X(GatedRmsNorm)         \
  X(L2Norm)               \
  X(Gemm)                 \
  X(Embed)                \
  X(GatedAct)             \
  X(Residual)             \
  X(Pointwise)            \
  X(Sigmoid)              \
  X(SigmoidGate)          \
  X(AddBias)              \
  X(CopyRows)             \
  X(StoreRows)            \
  X(ShortConv)            \
  X(KdaGate)              \
  X(Mla)                  \
  X(Gqa)                  \
  X(Rope)                 \
  X(AttnRes)              \
  X(Route)                \
  X(ExpertMlp)

/// Shapes and aliasing are the caller's duty; nothing checks them. Ops do not fail: a dead
/// device is reported by the pass that used it. Contracts stand at the argument types.
class Backend {
 public:
  virtual ~Backend() = default;
#define K3_DECLARE_OP(name) virtual void name(const name##Args& args) = 0;
  K3_FOR_EACH_OP(K3_DECLARE_OP)
#undef K3_DECLARE_OP
  virtual void KdaRecurrent(const KdaArgs& args) = 0;
  virtual void KdaChunk(const KdaArgs& args) = 0;
};

/// The plain reference of every op: serial, float64 inside, written to be read. Judges the others.
class ReferenceBackend : public Backend {
 public:
#define K3_DECLARE_OP(name) void name(const name##Args& args) override;
  K3_FOR_EACH_OP(K3_DECLARE_OP)
#undef K3_DECLARE_OP
  void KdaRecurrent(const KdaArgs& args) override;
  void KdaChunk(const KdaArgs& args) override;
};

}  // namespace k3
