#include "k3/eval/reference_check.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "k3/kernels/forwarding_ops.h"

namespace k3 {
namespace {

/// The reference with mistakes: experts by other rules, or weights scaled.
class Mistaken : public ForwardingOps {
 public:
  explicit Mistaken(std::int64_t wrong_every, float weight = 1.f)
      : ForwardingOps(std::make_unique<ReferenceBackend>()),
        wrong_every_(wrong_every),
        weight_(weight) {}

  void Route(const RouteArgs& a) override {
    inner_->Route(a);
    for (std::int64_t t = 0; t < a.experts.dim(0); ++t) {
      a.weights(t, 0) *= weight_;  // not all: a norm follows
      if (wrong_every_ > 0 && rows_++ % wrong_every_ == 0) LastByAnother(a, t);
    }
  }

 private:
  /// Gives the last place to the expert that comes next after all chosen ones.
  void LastByAnother(const RouteArgs& a, std::int64_t t) {
    const std::int64_t E = a.logits.dim(1);
    std::vector<float> bias(static_cast<std::size_t>(E));
    for (std::int64_t e = 0; e < E; ++e) bias[static_cast<std::size_t>(e)] = a.bias(e);
    bias[static_cast<std::size_t>(a.experts(t, a.k - 1))] = -9.f;
    RouteArgs one = a;
    one.logits = CMat(a.logits.row(t), {1, E});
    one.bias = CVec(bias.data(), {E});
    one.experts = View<std::int32_t, 2>(a.experts.row(t), {1, a.k});
    one.weights = Mat(a.weights.row(t), {1, a.k});
    inner_->Route(one);
  }

  std::int64_t wrong_every_, rows_ = 0;
  float weight_;
};

ReferenceCheck Check(std::unique_ptr<Backend> ops, MathMode math = MathMode::kExact) {
  auto model = Model::Load(std::string(K3_SOURCE_DIR) + "/tests/golden/tiny-k3");
  EXPECT_TRUE(model.ok());
  Exec exec(1, math, std::move(ops));
  const Backend* before = exec.ops.get();
  const std::vector<TokenId> ids{1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 7, 11};
  const auto check = CheckAgainstReference(**model, exec, ids);
  EXPECT_TRUE(check.ok());
  EXPECT_EQ(exec.ops.get(), before) << "the ops are given back";
  return *check;
}

TEST(ReferenceCheck, TheReferenceAgreesWithItself) {
  const ReferenceCheck c = Check(std::make_unique<ReferenceBackend>());
  EXPECT_EQ(c.error, 0.0);
  EXPECT_EQ(c.other_choices, 0);
  EXPECT_GT(c.choices, 0);
  EXPECT_EQ(c.tokens, 12);
  EXPECT_TRUE(c.passed());
}

TEST(ReferenceCheck, OneOtherExpertIsCountedAndNotTakenForAnError) {
  const ReferenceCheck c = Check(std::make_unique<Mistaken>(20));
  EXPECT_GT(c.other_choices, 0);
  EXPECT_LT(c.error, 1e-6) << "the reference took the same expert, with the same weight";
  EXPECT_TRUE(c.passed());
}

TEST(ReferenceCheck, WrongWeightsFail) {
  const ReferenceCheck c = Check(std::make_unique<Mistaken>(0, 1.1f));
  EXPECT_GT(c.error, c.tolerance);
  EXPECT_FALSE(c.passed());
}

TEST(ReferenceCheck, AWrongRouterFailsThoughTheScoresAgree) {
  const ReferenceCheck c = Check(std::make_unique<Mistaken>(1));
  EXPECT_LT(c.error, 1e-6);
  EXPECT_GT(c.other_share(), 0.125);
  EXPECT_FALSE(c.passed());
}

}  // namespace
}  // namespace k3
