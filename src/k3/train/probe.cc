#include "k3/train/probe.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <string_view>

#include <fmt/format.h>

#include "k3/kernels/exec.h"
#include "k3/kernels/forwarding_ops.h"

namespace k3 {
namespace {

constexpr std::size_t kDecayBins = 10;

double Dot(const float* a, const float* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

/// Entropy of softmax(scores) over log of their number; 0 for a single one.
double RelativeEntropy(std::vector<double>& scores) {
  if (scores.size() < 2) return 0;
  const double top = *std::max_element(scores.begin(), scores.end());
  double sum = 0, dot = 0;
  for (double& s : scores) {
    s -= top;
    const double e = std::exp(s);
    sum += e, dot += e * s;
  }
  return (std::log(sum) - dot / sum) / std::log(static_cast<double>(scores.size()));
}

/// Fills the entry of the layer that is running from what the ops see.
class Watching final : public ForwardingOps {
 public:
  using ForwardingOps::ForwardingOps;
  LayerProbe* layer = nullptr;  // set by the trace between ops

  void KdaGate(const KdaGateArgs& a) override {
    ForwardingOps::KdaGate(a);
    std::vector<double>& h = layer->decay_histogram;
    h.assign(kDecayBins, 0.0);
    const double one = 1.0 / static_cast<double>(std::max<std::int64_t>(1, a.g.size()));
    for (std::int64_t t = 0; t < a.g.dim(0); ++t) {
      for (std::int64_t d = 0; d < a.g.dim(1); ++d) {
        const double keep = std::exp(static_cast<double>(a.g(t, d)));
        layer->decay_mean += keep * one;
        const auto bin = static_cast<std::size_t>(std::clamp(keep, 0.0, 1.0) * kDecayBins);
        h[std::min(bin, kDecayBins - 1)] += one;
      }
    }
  }

  void Mla(const MlaArgs& a) override {
    ForwardingOps::Mla(a);
    if (a.sequences.empty()) return;  // a form that no sequence takes
    const MlaSequence& s = a.sequences.front();
    const std::int64_t R = a.kv_rank();
    const auto* w = static_cast<const float*>(a.kv_b.data);
    std::vector<float> absorbed(static_cast<std::size_t>(R));
    Entropy(a.n_heads, s.count, [&](std::int64_t h, std::int64_t t, std::vector<double>& scores) {
      const float* q = a.q.row(s.begin + t) + h * a.q_dim();
      std::fill(absorbed.begin(), absorbed.end(), 0.f);
      for (std::int64_t d = 0; d < a.nope_dim; ++d) {
        const float* row = w + (h * (a.nope_dim + a.v_dim) + d) * R;
        for (std::int64_t r = 0; r < R; ++r) absorbed[static_cast<std::size_t>(r)] += q[d] * row[r];
      }
      for (std::int64_t j = 0; j <= s.n_rows - s.count + t; ++j) {
        const float* key =
            s.pages[static_cast<std::size_t>(j / a.page_rows)] + j % a.page_rows * a.row_dim();
        scores.push_back(a.scale *
                         (Dot(absorbed.data(), key, R) + Dot(q + a.nope_dim, key + R, a.rope_dim)));
      }
    });
  }

  void Gqa(const GqaArgs& a) override {
    ForwardingOps::Gqa(a);
    if (a.sequences.empty()) return;
    const GqaSequence& s = a.sequences.front();
    const std::int64_t D = a.head_dim();
    const double scale = 1 / std::sqrt(static_cast<double>(D));
    Entropy(a.n_heads, s.count, [&](std::int64_t h, std::int64_t t, std::vector<double>& scores) {
      const float* q = a.q.row(s.begin + t) + h * D;
      const std::int64_t kv = h * a.n_kv_heads / a.n_heads;
      for (std::int64_t j = 0; j <= s.n_rows - s.count + t; ++j) {
        const float* key = s.key_pages[static_cast<std::size_t>(j / a.page_rows)] +
                           (j % a.page_rows * a.n_kv_heads + kv) * D;
        scores.push_back(scale * Dot(q, key, D));
      }
    });
  }

 private:
  template <class F>
  void Entropy(std::int64_t heads, std::int64_t count, F&& scores_of) {
    if (count < 2) return;
    double sum = 0;
    std::vector<double> scores;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t t = 1; t < count; ++t) {
        scores.clear();
        scores_of(h, t, scores);
        sum += RelativeEntropy(scores);
      }
    }
    layer->attention_entropy = sum / static_cast<double>(heads * (count - 1));
  }
};

/// Reads the values a traced pass shows, and tells the ops which layer runs.
class Reader final : public TraceSink {
 public:
  Reader(ProbeReport& report, Watching& ops) : report_(report), ops_(ops) {}

  void Record(std::string_view name, const TensorRef& value) override {
    if (name.starts_with("layer.") && name.ends_with(".attn_in")) {
      const auto index = std::strtoll(std::string(name.substr(6)).c_str(), nullptr, 10);
      ops_.layer = &report_.layers[static_cast<std::size_t>(index)];
      Compare(*ops_.layer, value);
    } else if (name.starts_with("depth_weights.")) {
      report_.depth_weights.emplace_back(name.substr(14), ColumnMeans(value));
    } else if (name.starts_with("residual_gate.")) {
      const std::vector<double> means = ColumnMeans(value);
      double mean = 0;
      for (const double m : means) mean += m / static_cast<double>(means.size());
      report_.scales.emplace_back(std::string(name), mean);
    }
  }

 private:
  static std::vector<double> ColumnMeans(const TensorRef& v) {
    const std::int64_t rows = v.shape[0], cols = v.shape[1];
    const auto* p = reinterpret_cast<const float*>(v.data);
    std::vector<double> means(static_cast<std::size_t>(cols));
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      means[static_cast<std::size_t>(i % cols)] += p[i] / static_cast<double>(rows);
    }
    return means;
  }

  void Compare(LayerProbe& layer, const TensorRef& v) {
    const std::int64_t rows = v.shape[0], width = v.shape[1];
    const auto* p = reinterpret_cast<const float*>(v.data);
    if (!before_.empty()) {
      double sum = 0;
      for (std::int64_t t = 0; t < rows; ++t) {
        const float *a = p + t * width, *b = before_.data() + t * width;
        const double size = std::sqrt(Dot(a, a, width) * Dot(b, b, width));
        sum += size > 0 ? Dot(a, b, width) / size : 0.0;
      }
      layer.similarity = sum / static_cast<double>(rows);
      layer.has_similarity = true;
    }
    before_.assign(p, p + rows * width);
  }

  ProbeReport& report_;
  Watching& ops_;
  std::vector<float> before_;
};

const char* Name(AttentionKind kind) {
  switch (kind) {
    case AttentionKind::kKda:
      return "kda";
    case AttentionKind::kMla:
      return "mla";
    case AttentionKind::kGqa:
      return "gqa";
  }
  return "";
}

}  // namespace

Result<ProbeReport> ProbeModel(const Parameters& params, std::span<const TokenId> tokens) {
  ProbeReport report;
  const ModelConfig& c = params.config();
  for (std::int64_t i = 0; i < c.n_layers; ++i) {
    LayerProbe layer;
    layer.layer = i, layer.kind = Name(c.attention[static_cast<std::size_t>(i)]);
    report.layers.push_back(std::move(layer));
  }
  Exec exec(1);
  auto owner = std::make_unique<Watching>(std::move(exec.ops));
  Watching& ops = *owner;
  exec.ops = std::move(owner);
  Reader reader(report, ops);
  ModelState state = params.model().NewState();
  const SequenceInput row{tokens, &state, LogitRows::kNone};
  CMat hidden;
  K3_TRY(params.model().ForwardHidden({&row, 1}, exec, hidden, &reader));
  for (const Parameter& p : params.list()) {
    if (p.spec.name.ends_with("_alpha") || p.spec.name.ends_with("_gamma")) {
      report.scales.emplace_back(p.spec.name, p.value[0]);
    }
  }
  return report;
}

}  // namespace k3
