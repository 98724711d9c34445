#include "k3/model/model.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <fmt/format.h>

#include "k3/io/checkpoint.h"
#include "k3/layers/scratch.h"
#include "k3/model/pass_memory.h"

namespace k3 {

struct Model::Impl {
  ModelConfig config;
  Checkpoint checkpoint;
  std::unique_ptr<ModelWeights> weights;
  std::vector<std::string> warnings;
};

namespace {

/// Names values for the trace and hands them on; does nothing without a sink.
class Tracer : public ResidualObserver {
 public:
  explicit Tracer(TraceSink* sink) : sink_(sink) {}
  bool on() const { return sink_ != nullptr; }

  void Layer(std::int64_t layer, const char* what, CMat value) {
    if (on()) Record(fmt::format("layer.{}.{}", layer, what), value);
  }
  void Named(std::string_view name, CMat value) {
    if (on()) Record(name, value);
  }
  void Routing(std::int64_t layer, const RoutingTrace& r) {
    if (!on()) return;
    sink_->Record(fmt::format("layer.{}.expert_idx", layer),
                  {DType::kI32,
                   {r.experts.dim(0), r.experts.dim(1)},
                   reinterpret_cast<const std::byte*>(r.experts.data)});
    Layer(layer, "expert_weights", r.weights);
  }
  void DepthWeights(std::int64_t layer, std::optional<Site> site, CMat weights) override {
    Record(site ? fmt::format("depth_weights.layers.{}.{}", layer, SiteName(*site))
                : std::string("depth_weights.output_attn_res"),
           weights);
  }
  void Gate(std::int64_t layer, Site site, CMat logits) override {
    std::vector<float> gate(logits.data, logits.data + logits.size());
    for (float& g : gate) g = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(g))));
    Record(fmt::format("residual_gate.layers.{}.{}", layer, SiteName(site)),
           CMat(gate.data(), logits.shape));
  }

 private:
  static const char* SiteName(Site s) {
    return s == Site::kAttention ? "self_attention_res" : "mlp_res";
  }
  void Record(std::string_view name, CMat v) {
    sink_->Record(name,
                  {DType::kF32, {v.dim(0), v.dim(1)}, reinterpret_cast<const std::byte*>(v.data)});
  }
  TraceSink* sink_;
};

/// One forward pass over a packed batch: the stack of layers, written once.
class Pass {
 public:
  Pass(const ModelConfig& c, const ModelWeights& w, Exec& exec, Tracer& tracer)
      : c_(c), w_(w), exec_(exec), tracer_(tracer) {}

  /// Rows [T, H] that the head reads.
  CMat Run(std::span<const TokenId> tokens, std::vector<SequenceSlice>& slices,
           std::span<const SequenceInput> batch) {
    const auto T = static_cast<std::int64_t>(tokens.size());
    const Mat x = NewMat(exec_, T, c_.hidden);
    exec_.ops->Embed({tokens, w_.embedding, x});
    const auto stream = StartStream(c_.residual, c_.n_layers, c_.rms_eps, w_.residual, exec_, x,
                                    tracer_.on() ? &tracer_ : nullptr);
    const Mat normed = NewMat(exec_, T, c_.hidden), out = NewMat(exec_, T, c_.hidden);
    for (std::int64_t i = 0; i < c_.n_layers; ++i) {
      if (exec_.cancelled()) return normed;  // the caller looks too and throws it away
      for (std::size_t s = 0; s < slices.size(); ++s) slices[s].cache = &batch[s].state->layer(i);
      const ModelWeights::Layer& w = w_.layers[static_cast<std::size_t>(i)];
      exec_.ops->RmsNorm({stream->Read(i, Site::kAttention), w.attn_norm, c_.rms_eps, normed});
      tracer_.Layer(i, "attn_in", normed);
      Attention(i, w, normed, slices, out);
      tracer_.Layer(i, "attn_out", out);
      stream->Write(i, Site::kAttention, normed, out);

      exec_.ops->RmsNorm({stream->Read(i, Site::kFfn), w.ffn_norm, c_.rms_eps, normed});
      tracer_.Layer(i, "ffn_in", normed);
      FeedForward(i, w, normed, out);
      tracer_.Layer(i, "ffn_out", out);
      stream->Write(i, Site::kFfn, normed, out);
      tracer_.Layer(i, "stream", stream->live());
    }
    exec_.ops->RmsNorm({stream->Output(), w_.final_norm, c_.rms_eps, normed});
    tracer_.Named("final_hidden", normed);
    return normed;
  }

 private:
  void Attention(std::int64_t i, const ModelWeights::Layer& w, CMat x,
                 std::span<const SequenceSlice> slices, Mat out) {
    const Workspace::Mark mark(exec_.ws);
    switch (c_.attention[static_cast<std::size_t>(i)]) {
      case AttentionKind::kKda: {
        CMat decay;
        KdaForward(c_.kda, c_.rms_eps, w.kda, exec_, x, slices, out,
                   tracer_.on() ? &decay : nullptr);
        return tracer_.Layer(i, "log_decay", decay);
      }
      case AttentionKind::kMla:
        return MlaForward(c_.mla, c_.n_heads, w.mla, exec_, x, slices, out);
      case AttentionKind::kGqa:
        return GqaForward(c_.gqa, c_.n_heads, c_.rms_eps, w.gqa, exec_, x, slices, out);
    }
  }

  void FeedForward(std::int64_t i, const ModelWeights::Layer& w, CMat x, Mat out) {
    const Workspace::Mark mark(exec_.ws);
    if (!c_.is_moe(i)) return DenseForward(c_.activation(), w.dense, exec_, x, out);
    RoutingTrace routing;
    MoeForward(c_.moe, c_.activation(), c_.rms_eps, w.moe, exec_, x, out,
               tracer_.on() ? &routing : nullptr);
    tracer_.Routing(i, routing);
  }

  const ModelConfig& c_;
  const ModelWeights& w_;
  Exec& exec_;
  Tracer& tracer_;
};

Status CheckTokens(std::span<const SequenceInput> batch, std::int64_t vocab) {
  for (const SequenceInput& s : batch) {
    for (std::size_t i = 0; i < s.tokens.size(); ++i) {
      if (s.tokens[i] < 0 || s.tokens[i] >= vocab) {
        return Error{Code::kInvalidArgument, fmt::format("token {} at position {}: expected 0..{}",
                                                         s.tokens[i], i, vocab - 1)};
      }
    }
  }
  return {};
}

/// The first row of a sequence whose scores are asked for; its length when none is.
std::int64_t FirstScored(const SequenceInput& s) {
  const auto count = static_cast<std::int64_t>(s.tokens.size());
  return s.logits == LogitRows::kAll    ? 0
         : s.logits == LogitRows::kLast ? std::max<std::int64_t>(0, count - 1)
                                        : count;
}

/// Says which part made a score NaN or infinite: the output layer, or what it read.
Error NotFinite(CMat hidden, std::int64_t row, std::int64_t column, float value) {
  bool hidden_finite = true;
  for (std::int64_t d = 0; d < hidden.dim(1); ++d) hidden_finite &= std::isfinite(hidden(row, d));
  return {
      Code::kNumeric,
      hidden_finite
          ? fmt::format("lm_head.weight: the score of token {} is {}, expected a finite number",
                        column, value)
          : fmt::format("the hidden state before lm_head.weight is not finite (score {})", value)};
}

}  // namespace

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::~Model() = default;

Result<std::unique_ptr<Model>> Model::Load(const std::string& dir, Residence residence) {
  auto impl = std::make_unique<Impl>();
  K3_ASSIGN(impl->config, ReadModelConfig(dir));
  K3_ASSIGN(impl->checkpoint, Checkpoint::Open(dir, residence));
  K3_ASSIGN(impl->weights, BindWeights(impl->config, impl->checkpoint));
  const std::vector<std::string>* lists[] = {&impl->config.warnings, &impl->checkpoint.warnings(),
                                             &impl->weights->warnings};
  for (const auto* list : lists) {
    impl->warnings.insert(impl->warnings.end(), list->begin(), list->end());
  }
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

const ModelConfig& Model::config() const { return impl_->config; }
std::uint64_t Model::fingerprint() const { return impl_->weights->fingerprint; }
const std::vector<std::string>& Model::warnings() const { return impl_->warnings; }
std::int64_t Model::weight_bytes() const { return impl_->weights->bytes; }
bool Model::weights_copied() const { return impl_->checkpoint.copied(); }
ModelState Model::NewState() const { return ModelState(impl_->config); }

Result<std::unique_ptr<Model>> Model::FromTensors(const ModelConfig& config,
                                                  const TensorMap& tensors) {
  auto impl = std::make_unique<Impl>();
  impl->config = config;
  K3_ASSIGN(impl->weights, BindTensors(config, tensors));
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

void Model::RefreshWeights() { RefreshProducts(*impl_->weights); }
const ModelWeights& Model::weights() const { return *impl_->weights; }

Status Model::ForwardHidden(std::span<const SequenceInput> batch, Exec& exec, CMat& hidden,
                            TraceSink* trace) const {
  const ModelConfig& c = impl_->config;
  K3_TRY(CheckTokens(batch, c.vocab));
  std::vector<TokenId> tokens;
  std::vector<SequenceSlice> slices;
  std::int64_t scored = 0;
  for (const SequenceInput& s : batch) {
    const auto begin = static_cast<std::int64_t>(tokens.size());
    const auto count = static_cast<std::int64_t>(s.tokens.size());
    scored += count - FirstScored(s);
    tokens.insert(tokens.end(), s.tokens.begin(), s.tokens.end());
    slices.push_back({begin, count, s.state->position(), nullptr});
  }
  exec.ws.Reset();
  hidden = CMat(nullptr, {0, c.hidden});
  if (tokens.empty()) return {};
  exec.ws.Reserve(PassBytes(c, static_cast<std::int64_t>(tokens.size()), scored));
  Tracer tracer(trace);
  hidden = Pass(c, *impl_->weights, exec, tracer).Run(tokens, slices, batch);
  if (exec.cancelled()) return Error{Code::kCancelled, ""};
  for (std::size_t s = 0; s < batch.size(); ++s) batch[s].state->Advance(slices[s].count);
  return {};
}

Status Model::Forward(std::span<const SequenceInput> batch, Exec& exec, std::vector<float>& logits,
                      TraceSink* trace) const {
  const ModelConfig& c = impl_->config;
  std::vector<std::int64_t> wanted;  // rows of the batch whose scores are asked for
  std::int64_t begin = 0;
  for (const SequenceInput& s : batch) {
    const auto count = static_cast<std::int64_t>(s.tokens.size());
    for (std::int64_t t = FirstScored(s); t < count; ++t) wanted.push_back(begin + t);
    begin += count;
  }
  CMat final_hidden;
  K3_TRY(ForwardHidden(batch, exec, final_hidden, trace));
  logits.assign(wanted.size() * static_cast<std::size_t>(c.vocab), 0.f);

  const auto n = static_cast<std::int64_t>(wanted.size());
  if (n == 0) return {};
  const Mat hidden = NewMat(exec, n, c.hidden);
  exec.ops->CopyRows({final_hidden, wanted, hidden});
  const Mat scores(logits.data(), {n, c.vocab});
  exec.ops->Gemm({hidden, impl_->weights->head, scores});
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t v = 0; v < c.vocab; ++v) {
      if (!std::isfinite(scores(i, v))) return NotFinite(hidden, i, v, scores(i, v));
    }
  }
  return {};
}

}  // namespace k3
