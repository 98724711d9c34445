#include "k3/runtime/self_check.h"

#include <map>

#include <gtest/gtest.h>

#include "k3/kernels/cpu/cpu_backend.h"
#include "k3/kernels/cpu/isa.h"
#include "support/golden.h"
#include "support/temp_dir.h"

namespace k3 {
namespace {

using testing::GoldenDir;

std::unique_ptr<Model> LoadGolden(const char* name) {
  auto loaded = Model::Load(GoldenDir() + "/" + name);
  EXPECT_TRUE(loaded.ok()) << (loaded.ok() ? "" : loaded.message());
  return loaded.ok() ? std::move(*loaded) : nullptr;
}

std::map<std::string, const SelfCheckRow*> ByName(const SelfCheckReport& report) {
  std::map<std::string, const SelfCheckRow*> rows;
  for (const SelfCheckRow& r : report.rows) {
    rows[(r.math == MathMode::kExact ? "exact " : "fast ") + r.name] = &r;
  }
  return rows;
}

TEST(SelfCheck, AllIdentitiesHoldAndLeaveNoFile) {
  for (const char* name : {"tiny-k3", "tiny-linear", "variants/gqa_hybrid"}) {
    const auto model = LoadGolden(name);
    ASSERT_NE(model, nullptr);
    testing::TempDir dir;
    SelfCheckOptions options;
    options.tokens = 140;
    options.scratch_dir = dir.path();
    const auto report = RunSelfCheck(*model, options);
    ASSERT_TRUE(report.ok()) << report.message();
    EXPECT_TRUE(report->ok()) << name;
    EXPECT_EQ(report->tokens, 140);
    EXPECT_EQ(dir.count(), 0);
    const auto rows = ByName(*report);
    ASSERT_EQ(rows.size(), 9u);
    EXPECT_GE(rows.at("exact cut anywhere")->cases, 10);
    EXPECT_EQ(rows.at("fast cut on the grid")->cases, 3);  // 64, 128, both
    EXPECT_FALSE(rows.at("fast fast against exact")->pass.has_value());
    // Products in bf16 move a random model's routers now and then; f32 chunks move nothing by much.
    const auto table = cpu::ChooseTable();
    ASSERT_TRUE(table.ok());
    EXPECT_LT(rows.at("fast fast against exact")->rel_l2, (*table)->fast == nullptr ? 1e-3 : 0.3);
  }
}

/// A backend with the mistake the check is for: a row depends on how many rows are beside it.
class BatchDependent final : public cpu::CpuBackend {
 public:
  using cpu::CpuBackend::CpuBackend;
  void Gemm(const GemmArgs& a) override {
    cpu::CpuBackend::Gemm(a);
    if (a.y.dim(0) == 1) a.y(0, 0) *= 1.0001f;
  }
};

TEST(SelfCheck, AResultThatDependsOnTheCutFailsWithItsSize) {
  const auto model = LoadGolden("tiny-k3");
  ASSERT_NE(model, nullptr);
  SelfCheckOptions options;
  options.tokens = 70;
  options.make_exec = [](int threads, MathMode math) {
    auto exec = std::make_unique<Exec>(threads, math, nullptr);
    exec->ops = std::make_unique<BatchDependent>(exec->pool, *cpu::ChooseTable().value());
    return exec;
  };
  const auto report = RunSelfCheck(*model, options);
  ASSERT_TRUE(report.ok()) << report.message();
  EXPECT_FALSE(report->ok());
  const auto rows = ByName(*report);
  const SelfCheckRow& cut = *rows.at("exact cut anywhere");
  EXPECT_EQ(cut.pass, false);
  EXPECT_GT(cut.different, 0);
  EXPECT_GT(cut.rel_l2, 0);
  EXPECT_EQ(rows.at("exact threads")->pass, true);  // those never cut
}

TEST(SelfCheck, RefusalsAndCancelling) {
  const auto model = LoadGolden("tiny-linear");
  ASSERT_NE(model, nullptr);
  SelfCheckOptions options;
  options.tokens = 7;
  EXPECT_FALSE(RunSelfCheck(*model, options).ok());
  options.tokens = 20;
  const auto cancelled = RunSelfCheck(*model, options, {}, [] { return true; });
  ASSERT_FALSE(cancelled.ok());
  EXPECT_EQ(cancelled.error().code, Code::kCancelled);
  options.scratch_dir = "/nonexistent-folder";
  const auto unwritable = RunSelfCheck(*model, options);
  ASSERT_FALSE(unwritable.ok());
  EXPECT_NE(unwritable.message().find("/nonexistent-folder"), std::string::npos);
}

}  // namespace
}  // namespace k3
