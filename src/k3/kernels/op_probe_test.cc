#include "k3/kernels/op_probe.h"

#include <set>

#include <gtest/gtest.h>

#include "k3/kernels/backend.h"
#include "k3/kernels/cpu/isa.h"
#include "k3/kernels/cuda_backend.h"

namespace k3 {
namespace {

TEST(OpProbe, EveryOpRunsOnEveryTableOfThisMachineAndAgrees) {
  const auto rows = ProbeOps();
  std::set<std::string> ops;
  for (const OpProbeRow& row : rows) {
    ops.insert(row.op);
    std::size_t ran = 0;
    for (const OpProbeCell& cell : row.cells) {
      EXPECT_NE(cell.state, ProbeState::kDiffers) << row.op << " on " << cell.backend;
      if (cell.backend != "cuda") ran += cell.state == ProbeState::kAgrees;
    }
    EXPECT_EQ(ran, cpu::SupportedTables().size()) << row.op;
    EXPECT_EQ(row.cells.front().state, ProbeState::kReference);
    ASSERT_EQ(row.cells.back().backend, "cuda");
    EXPECT_EQ(row.cells.back().state == ProbeState::kNotImplemented, !CudaHas(row.op)) << row.op;
  }
#define K3_EXPECT_OP(name) EXPECT_TRUE(ops.contains(#name)) << #name;
  K3_FOR_EACH_OP(K3_EXPECT_OP)
#undef K3_EXPECT_OP
  EXPECT_TRUE(ops.contains("KdaChunk"));
}

}  // namespace
}  // namespace k3
