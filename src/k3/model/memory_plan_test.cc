// Expected numbers come from the specification (sections 1, 6, 7), not from the code.
#include "k3/model/memory_plan.h"

#include <gtest/gtest.h>

#include <cmath>

#include "k3/io/checkpoint.h"
#include "k3/model/model_state.h"
#include "k3/model/pass_memory.h"
#include "k3/model/weights.h"
#include "support/golden.h"

namespace k3 {
namespace {

const std::string kPlanConfigs = std::string(K3_SOURCE_DIR) + "/tests/configs/";
constexpr std::int64_t kKdaState = std::int64_t{69} * 96 * 128 * 128 * 4;  // 434 MB
constexpr std::int64_t kRowBf16 = 27648;                                   // bytes a token
constexpr std::int64_t kTB = 1'000'000'000'000;

const Inventory& K3() {
  static const Inventory i = [] {
    auto taken = TakeInventory(kPlanConfigs + "k3-text-config.json");
    EXPECT_TRUE(taken.ok()) << taken.message();
    return std::move(taken).value();
  }();
  return i;
}

MemoryPlan Plan(const Inventory& i, const PlanOptions& o) {
  auto p = MakePlan(i, o);
  EXPECT_TRUE(p.ok()) << (p.ok() ? "" : p.message());
  return p.ok() ? std::move(*p) : MemoryPlan();
}

std::int64_t Bytes(const MemoryPlan& p, const char* name) {
  const PlanPart* part = p.Find(name);
  EXPECT_NE(part, nullptr) << name;
  return part != nullptr ? part->bytes : -1;
}

TEST(MemoryPlan, K3AtThreeContexts) {
  EXPECT_EQ(kKdaState, 434'110'464);
  for (const std::int64_t context :
       {std::int64_t{4096}, std::int64_t{131072}, std::int64_t{1048576}}) {
    PlanOptions o;
    o.context = context;
    const MemoryPlan p = Plan(K3(), o);
    EXPECT_EQ(p.row_bytes_bf16, kRowBf16);
    EXPECT_EQ(p.row_bytes, 2 * kRowBf16);
    EXPECT_EQ(Bytes(p, "KDA state"), kKdaState);
    EXPECT_EQ(Bytes(p, "convolution tails"), std::int64_t{69} * 3 * 3 * 12288 * 4);
    EXPECT_EQ(Bytes(p, "MLA rows"), context * 2 * kRowBf16);
    EXPECT_EQ(p.Find("MLA rows")->bf16_bytes, context * kRowBf16);
    EXPECT_NEAR(static_cast<double>(Bytes(p, "weights: routed expert")), 1.447e12, 0.001e12);
    EXPECT_NEAR(static_cast<double>(p.mapped_bytes), 1.56e12, 0.005e12);
  }
}

TEST(MemoryPlan, BatchesMultiplyStatesAndNotWeights) {
  PlanOptions o;
  const MemoryPlan one = Plan(K3(), o);
  o.batch = 7;
  const MemoryPlan seven = Plan(K3(), o);
  EXPECT_EQ(Bytes(seven, "KDA state"), 7 * kKdaState);
  EXPECT_EQ(Bytes(seven, "MLA rows"), 7 * Bytes(one, "MLA rows"));
  EXPECT_EQ(seven.mapped_bytes, one.mapped_bytes);
}

TEST(MemoryPlan, VerdictsAndWhatWouldFit) {
  PlanOptions o;
  o.context = 131072;
  o.memory = 2 * kTB;
  const MemoryPlan fits = Plan(K3(), o);
  EXPECT_EQ(fits.verdict, PlanVerdict::kFits);
  EXPECT_EQ(fits.largest_context, 1048576);
  EXPECT_GT(fits.largest_batch, 1);
  o.memory = 64'000'000'000;
  const MemoryPlan disk = Plan(K3(), o);
  EXPECT_EQ(disk.verdict, PlanVerdict::kFromDisk);
  o.memory = 1'000'000'000;
  const MemoryPlan none = Plan(K3(), o);
  EXPECT_EQ(none.verdict, PlanVerdict::kTooLarge);
  EXPECT_LT(none.largest_context, 131072);

  // What is said to fit fits, and one more does not.
  PlanOptions at = o;
  at.memory = 64'000'000'000;
  at.context = disk.largest_context;
  EXPECT_LE(Plan(K3(), at).heap_bytes, at.memory);
  if (at.context < 1048576) {
    at.context += 64;  // rows come in pages
    EXPECT_GT(Plan(K3(), at).heap_bytes, at.memory);
  }
}

TEST(MemoryPlan, WhatWouldFitLeavesRoomForTheWeights) {
  PlanOptions o;
  o.context = 131072;
  o.memory = Plan(K3(), o).total_bytes();
  const MemoryPlan p = Plan(K3(), o);
  EXPECT_EQ(p.verdict, PlanVerdict::kFits);
  EXPECT_EQ(p.largest_context, 131072);  // rows come in pages of 64
  EXPECT_EQ(p.largest_batch, 1);
}

// With many sequences a decoding step is the larger pass.
TEST(MemoryPlan, ActivationsAreThoseOfTheLargerPass) {
  PlanOptions o;
  o.prefill_chunk = 64;
  o.batch = 4096;
  EXPECT_EQ(Bytes(Plan(K3(), o), "activations"), PassBytes(K3().config, 4096, 4096));
  o.batch = 1;
  EXPECT_EQ(Bytes(Plan(K3(), o), "activations"), PassBytes(K3().config, 64, 1));
}

TEST(MemoryPlan, TheEnginesCheckCountsTheHeapOfThePlan) {
  const PlanOptions o;
  const MemoryPlan p = Plan(K3(), o);
  const std::int64_t loaded =
      Bytes(p, "tensor tables") + Bytes(p, "tokenizer") + Bytes(p, "program");
  EXPECT_EQ(HeapBytesToRun(K3().config, o), p.heap_bytes - loaded);
}

TEST(MemoryPlan, CostOfAStepIsActiveWeightsAndState) {
  PlanOptions o;
  o.context = 4096;
  const StepCost one = Plan(K3(), o).decode;
  // The trunk in bf16 without the embedding table, and 16 experts in each of 92 layers.
  const double trunk = 2 * (56'743'648'000.0 - 163840.0 * 7168);
  EXPECT_NEAR(one.weight_bytes, trunk + 92.0 * 16 * 17'547'264, 0.001 * trunk);
  EXPECT_NEAR(one.state_bytes, 2.0 * (kKdaState + 69.0 * 3 * 3 * 12288 * 4) + 4096.0 * 2 * kRowBf16,
              1.0);
  // Sums of products over the cached rows, 576 wide for scores and 512 for values, in 24 layers
  // of 96 heads; and the delta rule in 69 layers of 96 states of 128 x 128.
  const double attention = 24.0 * 2 * 96 * 4096 * (576 + 512) + 69.0 * 7 * 96 * 128 * 128;
  EXPECT_NEAR(one.operations, 2 * 104'189'612'640.0 + attention, 1e6);
  o.batch = 64;
  const StepCost many = Plan(K3(), o).decode;
  // Weights are shared, experts partly: 64 tokens that choose 16 of 896 at random meet this share.
  const double met = 1 - std::pow(1 - 16.0 / 896, 64);
  EXPECT_NEAR(many.weight_bytes, trunk + met * 92 * 896 * 17'547'264, 0.001 * trunk);
}

TEST(MemoryPlan, DecodedVectorsAreWhatLoadingDecodes) {
  for (const char* name : {"tiny-k3", "tiny-linear", "variants/gated_channel", "variants/gqa_rope",
                           "variants/norm_scaled"}) {
    const std::string dir = testing::GoldenDir() + "/" + name;
    auto inventory = TakeInventory(dir);
    auto checkpoint = Checkpoint::Open(dir);
    ASSERT_TRUE(inventory.ok() && checkpoint.ok());
    auto weights = BindWeights(inventory->config, *checkpoint);
    ASSERT_TRUE(weights.ok());
    std::int64_t decoded = 0;
    for (const auto& v : (*weights)->owned) decoded += static_cast<std::int64_t>(4 * v.size());
    EXPECT_EQ(Bytes(Plan(*inventory, {}), "decoded vectors"), decoded) << name;
  }
}

TEST(MemoryPlan, HostileSizesAreRefusedNotWrapped) {
  PlanOptions o;
  o.context = 1048577;
  EXPECT_NE(MakePlan(K3(), o).message().find("1048576"), std::string::npos);
  o.context = 1048576;
  o.batch = std::int64_t{1} << 40;
  EXPECT_FALSE(MakePlan(K3(), o).ok());
  EXPECT_GE(HeapBytesToRun(K3().config, o), std::int64_t{1} << 58);
}

}  // namespace
}  // namespace k3
