#include "k3/eval/reference_check.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "k3/base/check.h"
#include "k3/kernels/forwarding_ops.h"

namespace k3 {
namespace {

/// The experts of every routing op of a pass, in order.
using Choices = std::vector<std::vector<std::int32_t>>;

class RouteRecorder : public ForwardingOps {
 public:
  RouteRecorder(std::unique_ptr<Backend> inner, Choices& choices)
      : ForwardingOps(std::move(inner)), choices_(choices) {}
  void Route(const RouteArgs& a) override {
    inner_->Route(a);
    choices_.emplace_back(a.experts.data, a.experts.data + a.experts.size());
  }
  std::unique_ptr<Backend> TakeInner() { return std::move(inner_); }

 private:
  Choices& choices_;
};

/// Takes the recorded experts, with the weights that the reference gives them.
class RouteReplay : public ReferenceBackend {
 public:
  explicit RouteReplay(const Choices& choices) : choices_(choices) {}

  void Route(const RouteArgs& a) override {
    K3_CHECK(next_ < choices_.size(), "the reference routes more often");
    const std::vector<std::int32_t>& taken = choices_[next_++];
    K3_CHECK(static_cast<std::int64_t>(taken.size()) == a.experts.size(), "other tokens");
    ReferenceBackend::Route(a);
    std::vector<float> bias(static_cast<std::size_t>(a.logits.dim(1)));
    for (std::int64_t t = 0; t < a.experts.dim(0); ++t) {
      const auto row = std::span(taken).subspan(static_cast<std::size_t>(t * a.k),
                                                static_cast<std::size_t>(a.k));
      const std::span own(a.experts.row(t), row.size());
      for (const std::int32_t e : row) other_ += std::find(own.begin(), own.end(), e) == own.end();
      // Scores are at most one: a bias of two puts the recorded experts before all others.
      std::fill(bias.begin(), bias.end(), 0.f);
      for (const std::int32_t e : row) bias[static_cast<std::size_t>(e)] = 2.f;
      RouteArgs one = a;
      one.logits = CMat(a.logits.row(t), {1, a.logits.dim(1)});
      one.bias = CVec(bias.data(), {a.logits.dim(1)});
      one.n_group = one.topk_group = 1;
      one.experts = View<std::int32_t, 2>(a.experts.row(t), {1, a.k});
      one.weights = Mat(a.weights.row(t), {1, a.k});
      ReferenceBackend::Route(one);
    }
  }
  std::int64_t other() const { return other_; }

 private:
  const Choices& choices_;
  std::size_t next_ = 0;
  std::int64_t other_ = 0;
};

Status Scores(const Model& model, Exec& exec, std::span<const TokenId> ids,
              std::vector<float>& logits) {
  ModelState state = model.NewState();
  const SequenceInput input{ids, &state, LogitRows::kAll};
  return model.Forward({&input, 1}, exec, logits);
}

Status RecordedScores(const Model& model, Exec& exec, std::span<const TokenId> ids,
                      Choices& choices, std::vector<float>& logits) {
  auto recorder = std::make_unique<RouteRecorder>(std::move(exec.ops), choices);
  RouteRecorder& r = *recorder;
  exec.ops = std::move(recorder);
  Status s = Scores(model, exec, ids, logits);
  exec.ops = r.TakeInner();
  return s;
}

}  // namespace

double ReferenceCheck::other_share() const {
  return choices > 0 ? static_cast<double>(other_choices) / static_cast<double>(choices) : 0.0;
}

Result<ReferenceCheck> CheckAgainstReference(const Model& model, Exec& exec,
                                             std::span<const TokenId> ids) {
  Choices choices;
  std::vector<float> got, want;
  K3_TRY(RecordedScores(model, exec, ids, choices, got));
  auto replay = std::make_unique<RouteReplay>(choices);
  const RouteReplay& replayed = *replay;
  Exec reference(1, MathMode::kExact, std::move(replay));
  reference.cancel = exec.cancel;
  K3_TRY(Scores(model, reference, ids, want));

  double difference = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    difference += d * d;
    size += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  ReferenceCheck check;
  check.tokens = static_cast<std::int64_t>(ids.size());
  check.error = size > 0 ? std::sqrt(difference / size) : 0.0;
  // Exact: f32 rounding over the depth. Fast: 8-bit rounding of every product's inputs.
  check.tolerance = exec.math == MathMode::kExact ? 2e-5 : 5e-2;
  for (const auto& layer : choices) check.choices += static_cast<std::int64_t>(layer.size());
  check.other_choices = replayed.other();
  return check;
}

}  // namespace k3
