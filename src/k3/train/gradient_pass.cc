#include "k3/train/gradient_pass.h"

#include <algorithm>

#include <fmt/format.h>

#include "k3/train/bf16_ops.h"
#include "k3/train/teacher.h"

namespace k3 {

namespace {

Exec& Prepared(Exec& exec, const Parameters& params, const NoiseSource& noise) {
  exec.ops = MakeNoiseOps(std::move(exec.ops), noise);
  if (params.compute().bf16) exec.ops = MakeBf16Ops(std::move(exec.ops));
  return exec;
}

}  // namespace

GradientPass::GradientPass(Parameters& params, int threads, MathMode math)
    : params_(params),
      exec_(threads, math),
      tape_(TapeBackend::Install(Prepared(exec_, params, noise_))) {
  tape_.RoundBf16(params.compute().bf16);
  params.Register(tape_.shadows());
}

void GradientPass::PlantNoise(std::int64_t layer, std::uint64_t seed) {
  const ModelWeights::Layer& w = params_.model().weights().layers[static_cast<std::size_t>(layer)];
  for (const WeightRef* o : {&w.kda.o, &w.mla.o, &w.gqa.o}) {
    if (!o->empty()) noise_ = {o->data, seed};
  }
}

Result<CMat> GradientPass::Forward(std::span<const TrainRow> rows, std::vector<TokenId>& targets) {
  const TokenId vocab = static_cast<TokenId>(params_.config().vocab);
  states_.clear();
  states_.reserve(rows.size());
  std::vector<SequenceInput> batch;
  for (const TrainRow& r : rows) {
    if (r.inputs.size() != r.targets.size()) {
      return Error{Code::kInvalidArgument, fmt::format("a row has {} inputs and {} targets",
                                                       r.inputs.size(), r.targets.size())};
    }
    for (const TokenId t : r.targets) {
      if (t >= vocab) {
        return Error{Code::kInvalidArgument, fmt::format("target {}: expected below {}", t, vocab)};
      }
    }
    states_.push_back(params_.model().NewState());
    batch.push_back({r.inputs, &states_.back(), LogitRows::kNone});
    targets.insert(targets.end(), r.targets.begin(), r.targets.end());
  }
  CMat hidden;
  K3_TRY(params_.model().ForwardHidden(batch, exec_, hidden));
  return hidden;
}

Result<GradientPass::LossSum> GradientPass::Run(std::span<const TrainRow> rows, double scale) {
  std::vector<TokenId> targets;
  grad::CrossEntropyArgs<float> loss;
  LossSum sum;
  if (teacher_ != nullptr) {
    K3_ASSIGN(loss.teacher_hidden, teacher_->Hidden(rows));
    loss.teacher_head = teacher_->head(), loss.divergence = &sum.divergence;
    loss.teacher_weight = teacher_->options().weight;
    loss.temperature = teacher_->options().temperature;
  }
  tape_.Start();
  auto forward = Forward(rows, targets);
  tape_.Finish();
  if (!forward.ok()) return forward.error();
  const CMat hidden = *forward;

  const WeightRef& w = params_.model().weights().head;
  const CMat head(static_cast<const float*>(w.data), {w.rows, w.cols});
  loss.hidden = hidden, loss.head = head, loss.targets = targets;
  loss.scale = static_cast<float>(scale);
  loss.dhidden = tape_.Shadow(hidden), loss.dhead = tape_.Shadow(head);
  sum.nats = grad::CrossEntropy(tape_.context(), loss);
  sum.counted = std::count_if(targets.begin(), targets.end(), [](TokenId t) { return t >= 0; });
  tape_.Backward();
  params_.SplitProducts();
  return sum;
}

std::int64_t GradientPass::held_bytes() const {
  std::int64_t n = static_cast<std::int64_t>(exec_.ws.reserved_bytes());
  n += tape_.saved_bytes() + tape_.shadow_bytes();
  for (const ModelState& s : states_) n += s.bytes();
  return n;
}

Result<GradientPass::LossSum> GradientPass::Evaluate(std::span<const TrainRow> rows) {
  std::vector<TokenId> targets;
  K3_ASSIGN(const CMat hidden, Forward(rows, targets));
  const WeightRef& w = params_.model().weights().head;
  grad::CrossEntropyArgs<float> loss;
  loss.hidden = hidden, loss.targets = targets;
  loss.head = CMat(static_cast<const float*>(w.data), {w.rows, w.cols});
  LossSum sum;
  sum.nats = grad::CrossEntropy(tape_.context(), loss);
  sum.counted = std::count_if(targets.begin(), targets.end(), [](TokenId t) { return t >= 0; });
  return sum;
}

}  // namespace k3
