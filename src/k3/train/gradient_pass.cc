#include "k3/train/gradient_pass.h"

#include <algorithm>

#include <fmt/format.h>

namespace k3 {

GradientPass::GradientPass(Parameters& params, int threads, MathMode math)
    : params_(params), exec_(threads, math), tape_(TapeBackend::Install(exec_)) {
  params.Register(tape_.shadows());
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
  tape_.Start();
  auto forward = Forward(rows, targets);
  tape_.Finish();
  if (!forward.ok()) return forward.error();
  const CMat hidden = *forward;

  const WeightRef& w = params_.model().weights().head;
  const CMat head(static_cast<const float*>(w.data), {w.rows, w.cols});
  grad::CrossEntropyArgs<float> loss;
  loss.hidden = hidden, loss.head = head, loss.targets = targets;
  loss.scale = static_cast<float>(scale);
  loss.dhidden = tape_.Shadow(hidden), loss.dhead = tape_.Shadow(head);
  LossSum sum;
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
