// The loss with a teacher against central differences.
#include <algorithm>

#include "k3/kernels/backward/check_test_util.h"

namespace k3::grad::testing {
namespace {

constexpr std::int64_t kTokens = 300, kVocab = 5, H = 3, kTeacherH = 4;  // more than one chunk

std::vector<double> Scores(const std::vector<double>& x, const std::vector<double>& w,
                           std::int64_t t, std::int64_t width, double r) {
  std::vector<double> z;
  for (std::int64_t v = 0; v < kVocab; ++v) {
    double sum = 0;
    for (std::int64_t d = 0; d < width; ++d) {
      sum +=
          x[static_cast<std::size_t>(t * width + d)] * w[static_cast<std::size_t>(v * width + d)];
    }
    z.push_back(r * sum);
  }
  double sum = 0;
  for (const double s : z) sum += std::exp(s);
  for (double& s : z) s -= std::log(sum);
  return z;  // logarithms of the probabilities
}

struct Sums {
  double nats = 0, divergence = 0;
};

void Check(double weight, double temperature) {
  Rng rng(21);
  std::vector<TokenId> targets;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    targets.push_back(static_cast<TokenId>(rng.Next() % (kVocab + 1)) - 1);
  }
  const auto teacher_hidden = Random(rng, kTokens * kTeacherH);
  const auto teacher_head = Random(rng, kVocab * kTeacherH);
  Bag<double> b;
  b.in = {{"hidden", Random(rng, kTokens * H)}, {"head", Random(rng, kVocab * H)}};
  auto sums = [&](Bag<double>& p) {
    Sums s;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const TokenId y = targets[static_cast<std::size_t>(t)];
      if (y < 0) continue;
      s.nats -= Scores(p.in["hidden"], p.in["head"], t, H, 1)[static_cast<std::size_t>(y)];
      const auto own = Scores(p.in["hidden"], p.in["head"], t, H, 1 / temperature);
      const auto q = Scores(teacher_hidden, teacher_head, t, kTeacherH, 1 / temperature);
      for (std::size_t v = 0; v < q.size(); ++v) s.divergence += std::exp(q[v]) * (q[v] - own[v]);
    }
    s.divergence *= temperature * temperature;
    return s;
  };
  CheckGradients(
      "distil", b,
      [&](Bag<double>& p) {
        const Sums s = sums(p);
        return std::vector<double>{(1 - weight) * s.nats + weight * s.divergence};
      },
      [&]<class S>(const Context& ctx, Bag<S>& p) {
        const std::vector<S> rows(teacher_hidden.begin(), teacher_hidden.end());
        const std::vector<S> head(teacher_head.begin(), teacher_head.end());
        double divergence = -1;
        CrossEntropyArgs<S> a;
        a.hidden = p.M("hidden", kTokens, H), a.head = p.M("head", kVocab, H);
        a.targets = targets, a.scale = p.dy[0];
        a.dhidden = p.D("hidden", kTokens, H), a.dhead = p.D("head", kVocab, H);
        a.teacher_hidden = View<const S, 2>(rows.data(), {kTokens, kTeacherH});
        a.teacher_head = View<const S, 2>(head.data(), {kVocab, kTeacherH});
        a.teacher_weight = weight, a.temperature = temperature, a.divergence = &divergence;
        const double nats = CrossEntropy<S>(ctx, a);
        const Sums want = sums(b);
        EXPECT_NEAR(nats, want.nats, 1e-3);
        EXPECT_NEAR(divergence, want.divergence, 1e-3);
      });
}

TEST(GradientCheck, DistilledCrossEntropy) {
  Check(0.5, 1);
  Check(1, 2);
  Check(0.3, 0.5);
}

TEST(Distillation, ATeacherThatIsTheStudentTeachesNothing) {
  Rng rng(5);
  const auto hidden = Random(rng, 4 * H), head = Random(rng, kVocab * H);
  const std::vector<TokenId> targets{0, 1, -1, 2};
  std::vector<double> dhidden(hidden.size());
  const auto table = cpu::ChooseTable();
  const Context ctx(Pool(), **table);
  double divergence = -1;
  CrossEntropyArgs<double> a;
  a.hidden = a.teacher_hidden = View<const double, 2>(hidden.data(), {4, H});
  a.head = a.teacher_head = View<const double, 2>(head.data(), {kVocab, H});
  a.targets = targets, a.dhidden = View<double, 2>(dhidden.data(), {4, H});
  a.teacher_weight = 1, a.temperature = 2, a.divergence = &divergence;
  CrossEntropy(ctx, a);
  EXPECT_NEAR(divergence, 0, 1e-12);
  for (const double d : dhidden) EXPECT_NEAR(d, 0, 1e-12);
}

}  // namespace
}  // namespace k3::grad::testing
