// Hostile arguments of include/k3/kda.h, a row each. They are judged before a device is asked, so
// this runs with and without CUDA, and without a GPU. What device memory may hold is the business
// of bench/gpu/kda_hostile.cu.
#include "k3/kernels/kda_check_internal.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "k3/kernels/devices.h"

namespace k3 {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int64_t k2To40 = std::int64_t{1} << 40, k2To62 = std::int64_t{1} << 62;

/// Somewhere aligned to 256 that is never read: the checks look at addresses alone.
template <class T>
T* At(std::uintptr_t n, std::uintptr_t off = 0) {
  return reinterpret_cast<T*>(n * 4096 + off);
}

/// Arguments of every call, valid until a row of a table spoils one of them.
struct Call {
  k3_kda_batch batch = {100, 2, At<std::int32_t>(1), 4, 128};
  k3_kda_inputs inputs = {{At<void>(2), 512},
                          {At<void>(3), 512},
                          {At<void>(4), 512},
                          {At<void>(5), 512},
                          {At<void>(6), 4},
                          At<float>(7),
                          At<float>(8),
                          -5.f,
                          0.088f};
  void* o = At<void>(9);
  std::int64_t o_row = 512;
  float *initial = At<float>(10), *final = At<float>(11), *token_states = At<float>(12);
  k3_kda_plan plan = K3_KDA_SPLIT;
  void* workspace = At<void>(13);
  std::size_t workspace_bytes = std::size_t{1} << 40;
  k3_kda_conv conv = {{At<float>(14), At<float>(15), At<float>(16)},
                      {At<void>(17), At<void>(18), At<void>(19)},
                      {At<void>(20), At<void>(21), At<void>(22)}};
  k3_kda_norm norm = {{At<void>(23), 512}, At<float>(24), 1e-5f};
  k3_kda_tensor d_o = {At<void>(25), 512};
  float* d_final = At<float>(26);
  k3_kda_gradients gradients = {At<void>(27),  At<void>(28),  At<void>(29),  At<void>(30),
                                At<float>(31), At<float>(32), At<float>(33), At<float>(34)};
  const k3_kda_batch* batch_at = &batch;
  const k3_kda_inputs* inputs_at = &inputs;
  const k3_kda_gradients* gradients_at = &gradients;

  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  k3_kda_status Forward() const {
    return k3_kda_forward(batch_at, inputs_at, o, o_row, initial, final, plan, workspace,
                          workspace_bytes, nullptr);
  }
  k3_kda_status Decode() const {
    return k3_kda_decode(batch_at, inputs_at, o, o_row, initial, token_states, nullptr);
  }
  k3_kda_status Fused() const {
    return k3_kda_decode_fused(batch_at, inputs_at, &conv, &norm, o, o_row, initial, token_states,
                               nullptr);
  }
  k3_kda_status Backward() const {
    return k3_kda_backward(batch_at, inputs_at, initial, d_o, d_final, gradients_at, workspace,
                           workspace_bytes, nullptr);
  }
};

using Spoil = std::function<void(Call&)>;
struct Row {
  std::string what;
  Spoil spoil;
};

/// Rows that every call has to refuse.
std::vector<Row> BatchRows() {
  std::vector<Row> rows = {
      {"no batch", [](Call& c) { c.batch_at = nullptr; }},
      {"no inputs", [](Call& c) { c.inputs_at = nullptr; }},
      {"no cu_seqlens", [](Call& c) { c.batch.cu_seqlens = nullptr; }},
      {"cu_seqlens askew", [](Call& c) { c.batch.cu_seqlens = At<std::int32_t>(1, 2); }},
      {"no a_log", [](Call& c) { c.inputs.a_log = nullptr; }},
      {"no a_log, no tokens", [](Call& c) { c.inputs.a_log = nullptr, c.batch.n_tokens = 0; }},
      {"a_log askew", [](Call& c) { c.inputs.a_log = At<float>(7, 1); }},
      {"no dt_bias", [](Call& c) { c.inputs.dt_bias = nullptr; }},
      {"no dt_bias, no tokens", [](Call& c) { c.inputs.dt_bias = nullptr, c.batch.n_tokens = 0; }},
      {"dt_bias askew", [](Call& c) { c.inputs.dt_bias = At<float>(8, 4); }},
      {"no beta", [](Call& c) { c.inputs.beta.data = nullptr; }},
      {"beta askew", [](Call& c) { c.inputs.beta.data = At<void>(6, 1); }},
      {"beta stride 3", [](Call& c) { c.inputs.beta.row_stride = 3; }},
      {"beta stride -4", [](Call& c) { c.inputs.beta.row_stride = -4; }},
      {"beta stride 2^40", [](Call& c) { c.inputs.beta.row_stride = k2To40; }},
      {"state askew", [](Call& c) { c.initial = At<float>(10, 8); }},
  };
  for (const std::int64_t n : {std::int64_t{-1}, std::int64_t{1} << 30, k2To62, INT64_MIN}) {
    rows.push_back({"tokens " + std::to_string(n), [n](Call& c) { c.batch.n_tokens = n; }});
  }
  for (const std::int32_t n : {-1, INT32_MIN, INT32_MAX, 1 << 26}) {  // x 4 heads: 2^28 pairs
    rows.push_back({"sequences " + std::to_string(n), [n](Call& c) { c.batch.n_sequences = n; }});
  }
  for (const std::int32_t n : {0, -1, 4097, INT32_MAX, INT32_MIN}) {
    rows.push_back({"heads " + std::to_string(n), [n](Call& c) { c.batch.n_heads = n; }});
  }
  for (const std::int32_t n : {0, -128, 1, 63, 96, 127, 256, INT32_MAX}) {
    rows.push_back({"head_dim " + std::to_string(n), [n](Call& c) { c.batch.head_dim = n; }});
  }
  for (const float x : {kNan, 1.f, kInf, -kInf, 1e-30f, -1e30f}) {
    rows.push_back({"bound " + std::to_string(x), [x](Call& c) { c.inputs.lower_bound = x; }});
  }
  for (const float x : {kNan, kInf, -kInf}) {
    rows.push_back({"scale " + std::to_string(x), [x](Call& c) { c.inputs.scale = x; }});
  }
  return rows;
}

/// Rows for one tensor: its address and its stride.
void AddTensor(std::vector<Row>& rows, const std::string& name,
               const std::function<k3_kda_tensor&(Call&)>& get) {
  rows.push_back({"no " + name, [get](Call& c) { get(c).data = nullptr; }});
  for (const std::uintptr_t off : {1u, 2u, 8u}) {
    rows.push_back({name + " + " + std::to_string(off),
                    [get, off](Call& c) { get(c).data = At<void>(40, off); }});
  }
  for (const std::int64_t stride :
       {std::int64_t{0}, std::int64_t{504}, std::int64_t{516}, std::int64_t{-512},
        (std::int64_t{1} << 32) + 8, k2To40, k2To62, INT64_MIN, INT64_MAX - 7}) {
    rows.push_back({name + " stride " + std::to_string(stride),
                    [get, stride](Call& c) { get(c).row_stride = stride; }});
  }
}

std::vector<Row> InputRows() {
  std::vector<Row> rows = BatchRows();
  AddTensor(rows, "q", [](Call& c) -> k3_kda_tensor& { return c.inputs.q; });
  AddTensor(rows, "k", [](Call& c) -> k3_kda_tensor& { return c.inputs.k; });
  AddTensor(rows, "v", [](Call& c) -> k3_kda_tensor& { return c.inputs.v; });
  AddTensor(rows, "f", [](Call& c) -> k3_kda_tensor& { return c.inputs.f; });
  return rows;
}

/// The same and those of an output.
std::vector<Row> ForwardRows() {
  std::vector<Row> rows = InputRows();
  rows.push_back({"no o", [](Call& c) { c.o = nullptr; }});
  rows.push_back({"o askew", [](Call& c) { c.o = At<void>(9, 8); }});
  rows.push_back({"o is q", [](Call& c) { c.inputs.q.data = c.o; }});
  rows.push_back({"o is v", [](Call& c) { c.inputs.v.data = c.o; }});
  rows.push_back({"o is beta", [](Call& c) { c.inputs.beta.data = c.o; }});
  for (const std::int64_t stride : {std::int64_t{504}, std::int64_t{516}, k2To40, INT64_MIN}) {
    rows.push_back({"o stride " + std::to_string(stride), [stride](Call& c) { c.o_row = stride; }});
  }
  return rows;
}

void ExpectStatus(const std::vector<Row>& rows, k3_kda_status (Call::*call)() const,
                  k3_kda_status expected) {
  for (const Row& row : rows) {
    Call c;
    row.spoil(c);
    EXPECT_EQ((c.*call)(), expected) << row.what;
  }
}

/// Sound calls would be queued if a GPU were here, with addresses that point nowhere.
bool MayRunSoundCalls() { return ListGpuDevices().empty(); }

TEST(KdaCheckTest, SoundCallsAskForADevice) {
  if (!MayRunSoundCalls()) GTEST_SKIP() << "a GPU is here";
  const std::vector<Row> rows = {
      {"as it is", [](Call&) {}},
      {"no states", [](Call& c) { c.final = c.d_final = c.token_states = nullptr; }},
      {"no tokens, no tensors",
       [](Call& c) {
         c.batch.n_tokens = 0, c.o = nullptr, c.norm.gate = c.d_o = {};
         c.inputs.q = c.inputs.k = c.inputs.v = c.inputs.f = c.inputs.beta = {};
       }},
      {"no sequences", [](Call& c) { c.batch.n_sequences = 0; }},
      {"one sequence without cu_seqlens",
       [](Call& c) { c.batch.n_sequences = 1, c.batch.cu_seqlens = nullptr; }},
      {"negative scale", [](Call& c) { c.inputs.scale = -1.f; }},
      {"beta at any element", [](Call& c) { c.inputs.beta.data = At<void>(6, 2); }},
      {"widest stride", [](Call& c) { c.inputs.q.row_stride = std::int64_t{1} << 32; }},
      {"4096 heads",
       [](Call& c) {
         c.batch.n_heads = 4096, c.o_row = c.inputs.beta.row_stride = 4096 * 128;
         for (auto* x : {&c.inputs.q, &c.inputs.k, &c.inputs.v, &c.inputs.f, &c.norm.gate, &c.d_o})
           x->row_stride = 4096 * 128;
       }},
  };
  for (const auto call : {&Call::Forward, &Call::Decode, &Call::Fused, &Call::Backward}) {
    ExpectStatus(rows, call, K3_KDA_NO_CUDA);
  }
  Call c;
  c.inputs.lower_bound = -8.f, c.plan = K3_KDA_AUTO, c.workspace = nullptr, c.workspace_bytes = 0;
  EXPECT_EQ(c.Forward(), K3_KDA_NO_CUDA);
  EXPECT_EQ(k3_kda_decode_fused(&c.batch, &c.inputs, nullptr, nullptr, c.o, c.o_row, c.initial,
                                nullptr, nullptr),
            K3_KDA_NO_CUDA);
}

TEST(KdaCheckTest, ForwardRefuses) {
  std::vector<Row> rows = ForwardRows();
  rows.push_back({"final state askew", [](Call& c) { c.final = At<float>(11, 4); }});
  rows.push_back({"no workspace", [](Call& c) { c.workspace = nullptr; }});
  rows.push_back({"workspace askew", [](Call& c) { c.workspace = At<void>(13, 8); }});
  rows.push_back({"split, D 64", [](Call& c) { c.batch.head_dim = 64; }});
  rows.push_back({"split, softplus", [](Call& c) { c.inputs.lower_bound = 0.f; }});
  rows.push_back({"split, bound -8", [](Call& c) { c.inputs.lower_bound = -8.f; }});
  for (const int plan : {-1, 4, 1 << 30}) {
    rows.push_back({"plan " + std::to_string(plan),
                    [plan](Call& c) { c.plan = static_cast<k3_kda_plan>(plan); }});
  }
  ExpectStatus(rows, &Call::Forward, K3_KDA_INVALID);
}

TEST(KdaCheckTest, DecodeRefuses) {
  std::vector<Row> rows = ForwardRows();
  rows.push_back({"no state", [](Call& c) { c.initial = nullptr; }});
  rows.push_back({"token states askew", [](Call& c) { c.token_states = At<float>(12, 4); }});
  ExpectStatus(rows, &Call::Decode, K3_KDA_INVALID);

  AddTensor(rows, "gate", [](Call& c) -> k3_kda_tensor& { return c.norm.gate; });
  rows.push_back({"no norm weight", [](Call& c) { c.norm.weight = nullptr; }});
  rows.push_back({"norm weight askew", [](Call& c) { c.norm.weight = At<float>(24, 4); }});
  for (const float x : {0.f, -1.f, kNan, kInf}) {
    rows.push_back({"eps " + std::to_string(x), [x](Call& c) { c.norm.eps = x; }});
  }
  for (int i = 0; i < 3; ++i) {
    const std::string n = " " + std::to_string(i);
    rows.push_back({"no weights" + n, [i](Call& c) { c.conv.weights[i] = nullptr; }});
    rows.push_back({"weights askew" + n, [i](Call& c) { c.conv.weights[i] = At<float>(14, 4); }});
    rows.push_back({"no tails" + n, [i](Call& c) { c.conv.tails[i] = nullptr; }});
    rows.push_back({"tails askew" + n, [i](Call& c) { c.conv.tails[i] = At<void>(17, 4); }});
    rows.push_back({"no token tails" + n, [i](Call& c) { c.conv.token_tails[i] = nullptr; }});
    rows.push_back(
        {"token tails askew" + n, [i](Call& c) { c.conv.token_tails[i] = At<void>(20, 2); }});
  }
  ExpectStatus(rows, &Call::Fused, K3_KDA_INVALID);
}

TEST(KdaCheckTest, BackwardRefuses) {
  std::vector<Row> rows = InputRows();
  AddTensor(rows, "d_o", [](Call& c) -> k3_kda_tensor& { return c.d_o; });
  rows.push_back({"no gradients", [](Call& c) { c.gradients_at = nullptr; }});
  rows.push_back({"d_final askew", [](Call& c) { c.d_final = At<float>(26, 4); }});
  rows.push_back(
      {"d_initial askew", [](Call& c) { c.gradients.d_initial_state = At<float>(34, 4); }});
  using G = k3_kda_gradients;
  for (void* G::* out : {&G::dq, &G::dk, &G::dv, &G::df}) {
    rows.push_back({"no output", [out](Call& c) { c.gradients.*out = nullptr; }});
    rows.push_back({"output askew", [out](Call& c) { c.gradients.*out = At<void>(27, 8); }});
    rows.push_back({"output is k", [out](Call& c) { c.inputs.k.data = c.gradients.*out; }});
    rows.push_back({"output is d_o", [out](Call& c) { c.d_o.data = c.gradients.*out; }});
  }
  for (float* G::* out : {&G::dbeta, &G::da_log, &G::ddt_bias}) {
    rows.push_back({"no sum", [out](Call& c) { c.gradients.*out = nullptr; }});
    rows.push_back({"sum askew", [out](Call& c) { c.gradients.*out = At<float>(31, 2); }});
  }
  rows.push_back({"no workspace", [](Call& c) { c.workspace = nullptr; }});
  rows.push_back({"workspace askew", [](Call& c) { c.workspace = At<void>(13, 8); }});
  rows.push_back({"D 64", [](Call& c) { c.batch.head_dim = 64; }});
  rows.push_back({"softplus", [](Call& c) { c.inputs.lower_bound = 0.f; }});
  rows.push_back({"bound -8", [](Call& c) { c.inputs.lower_bound = -8.f; }});
  ExpectStatus(rows, &Call::Backward, K3_KDA_INVALID);
}

TEST(KdaCheckTest, WorkspaceMayNotBeAByteShort) {
  Call c;
  for (const bool backward : {false, true}) {
    const std::int64_t bytes = backward ? k3_kda_backward_workspace(&c.batch, -5.f)
                                        : k3_kda_forward_workspace(&c.batch, -5.f, K3_KDA_SPLIT);
    ASSERT_GT(bytes, 0);
    for (const std::int64_t given : {bytes - 1, std::int64_t{1}, std::int64_t{0}}) {
      c.workspace_bytes = static_cast<std::size_t>(given);
      EXPECT_EQ(backward ? c.Backward() : c.Forward(), K3_KDA_SMALL_WORKSPACE) << given;
    }
    c.workspace_bytes = static_cast<std::size_t>(bytes);
    if (MayRunSoundCalls()) {
      EXPECT_EQ(backward ? c.Backward() : c.Forward(), K3_KDA_NO_CUDA);
    }
  }
}

TEST(KdaCheckTest, SizeQueriesAnswerForAnyBatch) {
  for (const Row& row : BatchRows()) {
    Call c;
    row.spoil(c);
    if (c.batch_at == nullptr || c.batch.n_heads != 4 || c.batch.n_tokens < 0) {
      EXPECT_LT(k3_kda_forward_workspace(c.batch_at, -5.f, K3_KDA_AUTO), 0) << row.what;
      EXPECT_LT(k3_kda_backward_workspace(c.batch_at, -5.f), 0) << row.what;
    }
  }
  const Call c;
  for (const float bound : {kNan, 1.f, -kInf}) {
    EXPECT_LT(k3_kda_forward_workspace(&c.batch, bound, K3_KDA_AUTO), 0) << bound;
    EXPECT_LT(k3_kda_backward_workspace(&c.batch, bound), 0) << bound;
  }
  // The largest that is taken: no product overflows, and one grid holds the gradient's blocks.
  k3_kda_batch large = {(std::int64_t{1} << 30) - 1, 65535, At<std::int32_t>(1), 4096, 128};
  EXPECT_GT(k3_kda_forward_workspace(&large, -5.f, K3_KDA_SPLIT), std::int64_t{1} << 50);
  EXPECT_LT(k3_kda_backward_workspace(&large, -5.f), 0);
  large.n_sequences = 1;
  large.n_heads = 60;
  EXPECT_GT(k3_kda_backward_workspace(&large, -5.f), std::int64_t{1} << 40);
}

TEST(KdaCheckTest, SizesFollowThePlan) {
  k3_kda_batch batch = {64, 1, nullptr, 2, 128};
  EXPECT_EQ(k3_kda_forward_workspace(&batch, -5.f, K3_KDA_FUSED), 0);
  EXPECT_EQ(k3_kda_forward_workspace(&batch, 0.f, K3_KDA_RECURRENT), 0);
  EXPECT_GE(k3_kda_forward_workspace(&batch, -5.f, K3_KDA_SPLIT), 2 * 2 * 28 * 1024);
  EXPECT_LT(k3_kda_forward_workspace(&batch, -6.f, K3_KDA_FUSED), 0) << "the bound is too low";
  EXPECT_LT(k3_kda_backward_workspace(&batch, 0.f), 0) << "the softplus form has no backward";
  EXPECT_GE(k3_kda_backward_workspace(&batch, -5.f), 2 * 2 * 65536);
  batch.head_dim = 64;
  EXPECT_LT(k3_kda_forward_workspace(&batch, -5.f, K3_KDA_FUSED), 0);
}

TEST(KdaCheckTest, EveryStatusHasItsText) {
  for (int status = -1; status <= 6; ++status) {
    const char* text = k3_kda_status_text(static_cast<k3_kda_status>(status));
    ASSERT_NE(text, nullptr);
    EXPECT_EQ(std::string(text) == "not a status", status < 0 || status > 4) << status;
  }
}

}  // namespace
}  // namespace k3
