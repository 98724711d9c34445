// Gradients of whole models against an independent float64 reverse pass.
#include <gtest/gtest.h>

#include "k3/train/gradient_pass.h"
#include "support/golden.h"
#include "support/train_golden.h"

namespace k3 {
namespace {

using testing::ByName;
using testing::Golden;
using testing::GoldenDir;

class VariantGradients : public ::testing::TestWithParam<const char*> {};

void CompareWithGolden(const std::string& name, const Parameters& params, double tolerance) {
  const Golden golden("variants/grads.safetensors");
  const auto l2 = golden.Floats(name + ".l2"), probe = golden.Floats(name + ".probe");
  const auto sorted = ByName(params);
  ASSERT_EQ(sorted.size(), l2.size());
  std::size_t i = 0;
  for (const auto& [key, p] : sorted) {
    const double norm = testing::L2(p->grad, p->size());
    EXPECT_NEAR(norm, l2[i], tolerance * l2[i] + 1e-9) << key;
    // The probe is a projection on a vector of length sqrt(n / 2).
    const double length = std::sqrt(static_cast<double>(p->size()) / 2 + 1);
    EXPECT_NEAR(testing::Probe(p->grad, p->size()), probe[i], tolerance * l2[i] * length + 1e-9)
        << key;
    if (golden.Has(name + ".grad." + key)) {
      const auto want = golden.Floats(name + ".grad." + key);
      ASSERT_EQ(static_cast<std::int64_t>(want.size()), p->size()) << key;
      EXPECT_LT(testing::RelativeL2(p->grad, want.data(), want.size()), tolerance) << key;
    }
    ++i;
  }
}

TEST_P(VariantGradients, EveryParameterEqualsTheGolden) {
  const std::string name = GetParam();
  const Golden golden("variants/grads.safetensors");
  const auto tokens = Golden("variants/" + name + ".safetensors").Ints("tokens");
  auto params = Parameters::Load(GoldenDir() + "/variants/" + name);
  ASSERT_TRUE(params.ok()) << params.message();
  // Fast mode runs the chunked recurrence and expanded keys: other ops, the same gradients.
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    GradientPass pass(**params, 2, math);
    (*params)->ZeroGrads();
    const std::span<const TokenId> all(tokens);
    const TrainRow row{all.first(all.size() - 1), all.subspan(1)};
    const double n = static_cast<double>(row.inputs.size());
    for (int repeat = 0; repeat < 2; ++repeat) {  // the second pass reuses warm memory
      (*params)->ZeroGrads();
      const auto loss = pass.Run({&row, 1}, 1.0 / n);
      ASSERT_TRUE(loss.ok()) << loss.message();
      EXPECT_NEAR(loss->nats / n, golden.Floats(name + ".loss")[0], 1e-5);
    }
    // 1e-3: f32 noise alone moves some tensors by 1e-4 (golden.json, grad_fp32_noise).
    CompareWithGolden(name, **params, 1e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(All, VariantGradients, ::testing::ValuesIn(testing::kVariants),
                         [](const auto& p) { return std::string(p.param); });

}  // namespace
}  // namespace k3
