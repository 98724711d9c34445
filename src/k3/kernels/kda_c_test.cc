// What include/k3/kda.h promises without touching a GPU: refusals and sizes. The arithmetic is
// checked on a GPU by bench/gpu.
#include <gtest/gtest.h>
#include <k3/kda.h>

#include "k3/kernels/devices.h"

namespace {

k3_kda_batch Batch() { return {64, 1, nullptr, 2, 128}; }

TEST(KdaCInterfaceTest, WithoutCudaEveryCallSaysSo) {
  if (k3::BuiltWithCuda()) GTEST_SKIP() << "this build has the CUDA backend";
  const k3_kda_batch batch = Batch();
  EXPECT_EQ(k3_kda_forward(&batch, nullptr, nullptr, 0, nullptr, nullptr, K3_KDA_AUTO, nullptr, 0,
                           nullptr),
            K3_KDA_NO_CUDA);
  EXPECT_EQ(k3_kda_decode(&batch, nullptr, nullptr, 0, nullptr, nullptr, nullptr), K3_KDA_NO_CUDA);
  EXPECT_EQ(
      k3_kda_decode_fused(&batch, nullptr, nullptr, nullptr, nullptr, 0, nullptr, nullptr, nullptr),
      K3_KDA_NO_CUDA);
  EXPECT_LT(k3_kda_forward_workspace(&batch, -5.f, K3_KDA_AUTO), 0);
  EXPECT_STREQ(k3_kda_status_text(K3_KDA_NO_CUDA), "this build has no CUDA");
}

TEST(KdaCInterfaceTest, SizesFollowThePlan) {
  if (!k3::BuiltWithCuda()) GTEST_SKIP() << "this build has no CUDA backend";
  k3_kda_batch batch = Batch();
  EXPECT_EQ(k3_kda_forward_workspace(&batch, -5.f, K3_KDA_FUSED), 0);
  EXPECT_EQ(k3_kda_forward_workspace(&batch, 0.f, K3_KDA_RECURRENT), 0);
  EXPECT_GE(k3_kda_forward_workspace(&batch, -5.f, K3_KDA_SPLIT), 2 * 2 * 28 * 1024);
  EXPECT_LT(k3_kda_forward_workspace(&batch, -6.f, K3_KDA_FUSED), 0) << "the bound is too low";
  EXPECT_LT(k3_kda_backward_workspace(&batch, 0.f), 0) << "the softplus form has no backward";
  EXPECT_GE(k3_kda_backward_workspace(&batch, -5.f), 2 * 2 * 65536);
  batch.head_dim = 64;
  EXPECT_LT(k3_kda_forward_workspace(&batch, -5.f, K3_KDA_FUSED), 0);
}

TEST(KdaCInterfaceTest, RefusesBadArgumentsBeforeAnyLaunch) {
  if (!k3::BuiltWithCuda()) GTEST_SKIP() << "this build has no CUDA backend";
  alignas(16) static char bytes[64];
  const k3_kda_tensor tensor = {bytes, 256};
  const auto* floats = reinterpret_cast<const float*>(bytes);
  const k3_kda_inputs good = {tensor, tensor, tensor, tensor, {bytes, 2},
                              floats, floats, -5.f,   1.f};
  auto forward = [&](const k3_kda_batch& batch, const k3_kda_inputs& inputs) {
    return k3_kda_forward(&batch, &inputs, bytes, 256, nullptr, nullptr, K3_KDA_SPLIT, nullptr, 0,
                          nullptr);
  };
  for (const int dim : {0, 63, 96, 256}) {
    k3_kda_batch batch = Batch();
    batch.head_dim = dim;
    EXPECT_EQ(forward(batch, good), K3_KDA_INVALID) << dim;
  }
  k3_kda_batch batch = Batch();
  batch.n_tokens = -1;
  EXPECT_EQ(forward(batch, good), K3_KDA_INVALID);
  batch = Batch();
  batch.n_sequences = 2;  // without cu_seqlens
  EXPECT_EQ(forward(batch, good), K3_KDA_INVALID);
  batch = Batch();
  k3_kda_inputs inputs = good;
  inputs.k.data = bytes + 2;
  EXPECT_EQ(forward(batch, inputs), K3_KDA_INVALID) << "misaligned";
  inputs = good;
  inputs.v.row_stride = 252;
  EXPECT_EQ(forward(batch, inputs), K3_KDA_INVALID) << "rows overlap";
  for (const float bound : {1.f, -1e31f, __builtin_nanf("")}) {
    inputs = good;
    inputs.lower_bound = bound;
    EXPECT_EQ(forward(batch, inputs), K3_KDA_INVALID) << bound;
  }
  EXPECT_EQ(forward(batch, good), K3_KDA_INVALID) << "a null workspace where bytes are needed";
  EXPECT_EQ(
      k3_kda_forward(&batch, &good, bytes, 256, nullptr, nullptr, K3_KDA_SPLIT, bytes, 64, nullptr),
      K3_KDA_SMALL_WORKSPACE);
}

TEST(KdaCInterfaceTest, FusedDecodeRefusesHalfGivenParts) {
  if (!k3::BuiltWithCuda()) GTEST_SKIP() << "this build has no CUDA backend";
  alignas(16) static char bytes[64];
  const k3_kda_tensor tensor = {bytes, 256};
  auto* floats = reinterpret_cast<float*>(bytes);
  const k3_kda_inputs inputs = {tensor, tensor, tensor, tensor, {bytes, 2},
                                floats, floats, -5.f,   1.f};
  const k3_kda_conv conv = {{floats, floats, floats}, {bytes, bytes, bytes}, {}};
  const k3_kda_norm norm = {tensor, floats, 1e-5f};
  const k3_kda_batch batch = Batch();
  auto decode = [&](const k3_kda_conv& c, const k3_kda_norm& n) {
    return k3_kda_decode_fused(&batch, &inputs, &c, &n, bytes, 256, floats, nullptr, nullptr);
  };
  for (int i = 0; i < 3; ++i) {
    k3_kda_conv bad = conv;
    bad.weights[i] = nullptr;
    EXPECT_EQ(decode(bad, norm), K3_KDA_INVALID) << i;
    bad = conv;
    bad.weights[i] = floats + 1;
    EXPECT_EQ(decode(bad, norm), K3_KDA_INVALID) << "misaligned weights " << i;
    bad = conv;
    bad.tails[i] = nullptr;
    EXPECT_EQ(decode(bad, norm), K3_KDA_INVALID) << i;
    bad = conv;
    bad.tails[i] = bytes + 4;
    EXPECT_EQ(decode(bad, norm), K3_KDA_INVALID) << "a misaligned tail " << i;
    bad = conv;
    bad.token_tails[i] = bytes;
    EXPECT_EQ(decode(bad, norm), K3_KDA_INVALID) << "one of three token tails " << i;
  }
  for (const float eps : {0.f, -1.f, 1e31f, __builtin_nanf("")}) {
    k3_kda_norm bad = norm;
    bad.eps = eps;
    EXPECT_EQ(decode(conv, bad), K3_KDA_INVALID) << eps;
  }
  k3_kda_norm bad = norm;
  bad.weight = nullptr;
  EXPECT_EQ(decode(conv, bad), K3_KDA_INVALID);
  bad = norm;
  bad.gate.row_stride = 128;
  EXPECT_EQ(decode(conv, bad), K3_KDA_INVALID) << "rows overlap";
}

}  // namespace
