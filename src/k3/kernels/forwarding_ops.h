// Ops of another backend: a base for those that watch or change a few of them.
#pragma once

#include <memory>
#include <utility>

#include "k3/kernels/backend.h"

namespace k3 {

class ForwardingOps : public Backend {
 public:
  explicit ForwardingOps(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}
#define K3_FORWARD(name) \
  void name(const name##Args& args) override { inner_->name(args); }
  K3_FOR_EACH_OP(K3_FORWARD)
#undef K3_FORWARD
  void KdaRecurrent(const KdaArgs& args) override { inner_->KdaRecurrent(args); }
  void KdaChunk(const KdaArgs& args) override { inner_->KdaChunk(args); }

 protected:
  std::unique_ptr<Backend> inner_;
};

}  // namespace k3
