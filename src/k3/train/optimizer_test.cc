// Steps of the optimisers against their equations, and clipping.
#include "k3/train/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "k3/base/rng.h"
#include "k3/io/safetensors.h"
#include "k3/train/gradient_pass.h"
#include "k3/train/train_state.h"
#include "k3/train/trainer.h"
#include "support/golden.h"
#include "support/temp_dir.h"
#include "support/train_run.h"

namespace k3 {
namespace {

using testing::GoldenDir;
using testing::SmallRun;
using testing::TempDir;
using testing::WriteTrainData;

std::unique_ptr<Parameters> ReleasedVariant() {
  auto p = Parameters::Load(GoldenDir() + "/variants/released");
  EXPECT_TRUE(p.ok()) << (p.ok() ? "" : p.message());
  return std::move(*p);
}

struct Stepper {
  std::unique_ptr<Parameters> params = ReleasedVariant();
  GradientPass pass{*params, 2};
  const grad::Context& context = pass.tape().context();
  Rng rng{3};

  std::vector<float> RandomGradients() {
    for (std::int64_t i = 0; i < params->total(); ++i) {
      params->grads()[i] = static_cast<float>(rng.Uniform() - 0.5);
    }
    return {params->grads(), params->grads() + params->total()};
  }
};

TEST(Optimiser, TwoMuonStepsFollowTheEquation) {
  Stepper s;
  MuonOptions muon;
  muon.enabled = true, muon.momentum = 0.9, muon.decay = 0.2;
  Optimizer o(*s.params, {}, muon);
  const Parameter& p = *s.params->Find("model.layers.0.self_attn.q_proj.weight");
  const std::int64_t rows = o.block_rows(p), cols = p.cols(), n = rows * cols;
  ASSERT_LT(rows, p.rows()) << "more than one head";
  const auto size = static_cast<std::size_t>(n);
  const std::int64_t at = (p.rows() - rows) * cols;  // the last head
  std::vector<float> w(p.value + at, p.value + at + n), buf(size), u(size);
  const double lr = 0.05, size_factor = 0.2 * std::sqrt(static_cast<double>(std::max(rows, cols)));
  for (const float scale : {0.25f, 1.0f}) {  // a clipped step, then one that is not
    s.RandomGradients();
    for (std::size_t i = 0; i < size; ++i) {
      const float g = p.grad[at + static_cast<std::int64_t>(i)] * scale;
      buf[i] = 0.9f * buf[i] + g;
      u[i] = g + 0.9f * buf[i];
    }
    NewtonSchulz(s.context, u.data(), rows, cols);
    for (std::size_t i = 0; i < size; ++i) {
      w[i] = static_cast<float>(w[i] - lr * (size_factor * u[i] + 0.2 * w[i]));
    }
    o.Step(s.context, 1e-3, lr, scale);
  }
  for (std::int64_t i = 0; i < n; ++i) {
    ASSERT_NEAR(p.value[at + i], w[static_cast<std::size_t>(i)], 1e-5) << i;
  }
}

TEST(Optimiser, ClippingScalesGradientsBeforeTheStep) {
  // The same as a step on smaller gradients: moments, and so all later steps, must not see more.
  std::vector<std::vector<float>> ends;
  for (const bool scaled : {true, false}) {
    Stepper s;
    MuonOptions muon;
    muon.enabled = true;
    Optimizer o(*s.params, {}, muon);
    for (const float scale : {0.125f, 1.0f}) {
      s.RandomGradients();
      if (!scaled) {
        for (std::int64_t i = 0; i < s.params->total(); ++i) s.params->grads()[i] *= scale;
      }
      o.Step(s.context, 1e-2, 1e-2, scaled ? static_cast<double>(scale) : 1.0);
    }
    ends.emplace_back(s.params->values(), s.params->values() + s.params->total());
  }
  EXPECT_EQ(ends[0], ends[1]);
}

TEST(Optimiser, TheTrainerClipsToTheNorm) {
  // AdamW's first step has the same size whatever the gradients; its moments have not.
  TempDir dir;
  WriteTrainData(dir / "data");
  auto squares = [&](double clip, const std::string& out) {
    TrainConfig c = SmallRun(dir, out);
    c.steps = 1, c.muon.enabled = false, c.clip = clip, c.schedule.warmup = 1;
    c.schedule.total = 1;
    auto t = Trainer::Open(c);
    EXPECT_TRUE(t.ok()) << (t.ok() ? "" : t.message());
    double norm = 0;
    EXPECT_TRUE((*t)->Run({0, nullptr, [&](const StepReport& r) { norm = r.grad_norm; }}).ok());
    const auto f = SafetensorsFile::Open(StatePath(c.out + "/checkpoints", 1));
    EXPECT_TRUE(f.ok());
    const TensorRef& m = f->tensors().find("first")->second;
    double sum = 0;
    for (std::int64_t i = 0; i < m.bytes() / 4; ++i) {
      const double v = reinterpret_cast<const float*>(m.data)[i];
      sum += v * v;
    }
    return std::make_pair(norm, std::sqrt(sum) / 0.1);  // m = (1 - beta1) g
  };
  const auto free = squares(0, "free");
  EXPECT_NEAR(free.second, free.first, 1e-3 * free.first);
  const double clip = free.first / 8;
  const auto clipped = squares(clip, "clipped");
  EXPECT_DOUBLE_EQ(clipped.first, free.first) << "what is reported is the norm before";
  EXPECT_NEAR(clipped.second, clip, 1e-3 * clip);
  EXPECT_NEAR(squares(8 * free.first, "wide").second, free.first, 1e-3 * free.first);
}

}  // namespace
}  // namespace k3
