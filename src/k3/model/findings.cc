#include "k3/model/findings.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "k3/tensor/tensor_ref.h"

namespace k3 {
namespace {

/// "a, b, c"; long lists keep their ends.
std::string ListText(const std::vector<std::int64_t>& numbers) {
  if (numbers.size() <= 12) return fmt::format("{}", fmt::join(numbers, ", "));
  return fmt::format("{}, {}, {}, ..., {}, {}", numbers[0], numbers[1], numbers[2],
                     numbers[numbers.size() - 2], numbers.back());
}

class Finder {
 public:
  explicit Finder(const Inventory& i) : i_(i), c_(i.config) {}

  std::vector<Finding> Run() {
    Layout();
    Attention();
    Kda();
    Mla();
    Gqa();
    Residual();
    FeedForward();
    Router();
    Output();
    TrunkStorage();
    Extra();
    return std::move(out_);
  }

 private:
  Basis Best() const {
    switch (i_.source) {
      case ShapeSource::kHeaders:
      case ShapeSource::kSomeHeaders:
        return Basis::kShapes;
      case ShapeSource::kIndex:
        return Basis::kNames;
      case ShapeSource::kConfig:
        break;
    }
    return Basis::kConfig;
  }
  void Say(std::string topic, std::string text, std::string evidence) {
    out_.push_back({std::move(topic), std::move(text), Best(), std::move(evidence)});
  }
  void SayConfig(std::string topic, std::string text, std::string key) {
    out_.push_back({std::move(topic), std::move(text), Basis::kConfig, std::move(key)});
  }
  /// A matrix packed in MXFP4 is found under its plain name too, with the shape it decodes to.
  const TensorGroup* Group(std::string_view suffix) {
    const TensorGroup* g = i_.Find(suffix);
    if (g != nullptr || !suffix.ends_with(".weight")) return g;
    g = i_.Find(std::string(suffix) + "_packed");
    if (g == nullptr || g->shape.size() != 2) return nullptr;
    unpacked_.push_back(*g);
    TensorGroup& plain = unpacked_.back();
    plain.pattern.resize(plain.pattern.size() - std::string_view("_packed").size());
    plain.shape[1] *= 2;
    plain.dtype = "MXFP4";
    return &plain;
  }
  /// A damaged file may give any shape: what reads one asks for a matrix.
  const TensorGroup* Matrix(std::string_view suffix) {
    const TensorGroup* g = Group(suffix);
    return g != nullptr && g->shape.size() == 2 ? g : nullptr;
  }
  /// "self_attn.q_proj.weight [256, 64], 9 of them"
  static std::string Show(const TensorGroup& g) {
    std::string_view name = g.pattern;
    constexpr std::string_view kLayers = "model.layers.*.";
    if (name.starts_with(kLayers)) name.remove_prefix(kLayers.size());
    return fmt::format("{} {}{}{}", name, ShapeString(g.shape),
                       g.dtype == "MXFP4" ? " as MXFP4" : "",
                       g.count > 1 ? fmt::format(", {} of them", g.count) : "");
  }
  std::vector<std::int64_t> Layers(AttentionKind kind) const {  // counted from 1, as configs do
    std::vector<std::int64_t> list;
    for (std::int64_t i = 0; i < c_.n_layers; ++i) {
      if (c_.attention[static_cast<std::size_t>(i)] == kind) list.push_back(i + 1);
    }
    return list;
  }

  void Layout();
  void Attention();
  void Kda();
  void Mla();
  void Gqa();
  void Residual();
  void FeedForward();
  void Experts(const TensorGroup& w1);
  void Storage(const TensorGroup& w1);
  void TrunkStorage();
  void Router();
  void Output();
  void Extra();

  const Inventory& i_;
  const ModelConfig& c_;
  std::vector<Finding> out_;
  std::deque<TensorGroup> unpacked_;
};

void Finder::Layout() {
  const std::string names = i_.prefix.empty() ? "flat names" : "names under language_model.";
  Say("layout", fmt::format("{} layers, hidden width {}, {}", c_.n_layers, c_.hidden, names),
      fmt::format("model.embed_tokens.weight [{}, {}]", c_.vocab, c_.hidden));
  if (i_.index_total_size && i_.source == ShapeSource::kHeaders) {
    const bool same = *i_.index_total_size == i_.bytes;
    Say("index",
        same ? "the index agrees with the shards about the number of bytes"
             : "the index and the shards disagree about the number of bytes",
        fmt::format("metadata.total_size {}, data of the shards {}", *i_.index_total_size,
                    i_.bytes));
  }
}

void Finder::Attention() {
  std::string text, evidence;
  const auto add = [&](AttentionKind kind, const char* name, const char* tensor) {
    const auto layers = Layers(kind);
    if (layers.empty()) return;
    text += fmt::format("{}{} {}", text.empty() ? "" : " + ", layers.size(), name);
    if (const TensorGroup* g = Group(tensor)) {
      evidence += fmt::format("{}{}", evidence.empty() ? "" : "; ", Show(*g));
    }
    if (kind != AttentionKind::kKda) {
      evidence += fmt::format(", in layers {} (from 1)", ListText(layers));
    }
  };
  add(AttentionKind::kKda, "KDA", "self_attn.A_log");
  add(AttentionKind::kMla, "MLA", "self_attn.kv_a_proj_with_mqa.weight");
  add(AttentionKind::kGqa, "grouped-query", "self_attn.k_proj.weight");
  Say("attention", "layers: " + text, evidence);
}

constexpr const char* kDecayKeys =
    "linear_attn_config.gate_lower_bound, unless k3_variant.decay says otherwise";

void Finder::Kda() {
  const TensorGroup* a_log = Group("self_attn.A_log");
  if (a_log == nullptr || !c_.has(AttentionKind::kKda)) return;
  const std::int64_t state = c_.kda.width() * c_.kda.head_dim;
  const TensorGroup* f_b = Group("self_attn.f_b_proj.weight");
  Say("state",
      fmt::format("KDA state of fixed size: {} values a layer at any context ({} heads of "
                  "{} x {})",
                  state, c_.kda.n_heads, c_.kda.head_dim, c_.kda.head_dim),
      f_b != nullptr ? Show(*f_b) : "");
  std::int64_t stored = 1;
  for (const std::int64_t d : a_log->shape) stored *= d;
  if (i_.source == ShapeSource::kHeaders && stored > c_.kda.n_heads) {
    Say("padding", fmt::format("A_log is padded: {} values for {} heads", stored, c_.kda.n_heads),
        Show(*a_log));
  }
  if (const TensorGroup* conv = Group("self_attn.q_conv1d.weight")) {
    Say("convolution",
        fmt::format("short convolution over {} tokens before q, k and v", c_.kda.conv_kernel),
        Show(*conv));
  }
  if (c_.kda.lower_bound) {
    SayConfig("decay", fmt::format("decay bounded at {:g}", *c_.kda.lower_bound), kDecayKeys);
  } else {
    SayConfig("decay", "unbounded softplus decay", kDecayKeys);
  }
  const TensorGroup* low = Matrix("self_attn.g_a_proj.weight");
  if (low != nullptr) {
    Say("KDA output gate", fmt::format("low rank: {}", low->shape[0]), Show(*low));
  } else {
    Say("KDA output gate", "full rank", "no self_attn.g_a_proj; g_proj in KDA layers");
  }
}

void Finder::Mla() {
  const TensorGroup* kv_a = Matrix("self_attn.kv_a_proj_with_mqa.weight");
  const TensorGroup* kv_b = Matrix("self_attn.kv_b_proj.weight");
  if (kv_a == nullptr || kv_b == nullptr) return;
  Say("key-value compression",
      fmt::format("{} values a token and layer instead of {}", kv_a->shape[0], kv_b->shape[0]),
      fmt::format("{}; {}", Show(*kv_a), Show(*kv_b)));
  if (const TensorGroup* q_a = Matrix("self_attn.q_a_proj.weight")) {
    Say("query compression", fmt::format("queries through rank {}", q_a->shape[0]), Show(*q_a));
  } else {
    Say("query compression", "none: queries are projected directly", "no self_attn.q_a_proj");
  }
  SayConfig("MLA output gate", c_.mla.output_gate ? "gated" : "not gated",
            "mla_use_output_gate, and g_proj in MLA layers");
}

void Finder::Gqa() {
  const TensorGroup* k = Group("self_attn.k_proj.weight");
  if (k == nullptr || !c_.has(AttentionKind::kGqa)) return;
  const std::int64_t kv = c_.gqa.n_kv_heads, d = c_.gqa.head_dim;
  // A KDA layer has a k_proj too; the width tells them apart unless both are as wide.
  Say("grouped queries",
      fmt::format(
          "{} key-value heads for {} query heads: {} values a token and layer instead of {}", kv,
          c_.n_heads, 2 * kv * d, 2 * c_.n_heads * d),
      fmt::format("self_attn.k_proj.weight [{}, {}]", kv * d, c_.hidden));
  SayConfig("positions",
            c_.gqa.rope ? fmt::format("rotary, theta {:g}", c_.gqa.rope_theta) : "none",
            "k3_variant.attention.gqa.rope");
}

void Finder::Residual() {
  const TensorGroup* proj = Group("self_attention_res_proj.weight");
  const TensorGroup* alpha = Group("self_attention_res_alpha");
  const TensorGroup* gate = Matrix("self_attention_res_gate.weight");
  const TensorGroup* gamma = Group("self_attention_res_gamma");
  if (proj != nullptr) {
    Say("residual",
        c_.residual.mode == ResidualMode::kBlockAttnRes
            ? fmt::format("cross-layer residual (attention over depth), block {}",
                          c_.residual.block_size)
            : "cross-layer residual: attention over the outputs of all earlier layers",
        Show(*proj) + (c_.residual.mode == ResidualMode::kBlockAttnRes
                           ? "; the block is attn_res_block_size of the config"
                           : ""));
    if (gamma != nullptr) Say("residual gate", "a learned gate on the mix", Show(*gamma));
  } else if (gate != nullptr) {
    Say("residual", gate->shape[0] == 1 ? "gated: one gate a token" : "gated: one gate a channel",
        Show(*gate));
  } else if (alpha != nullptr) {
    const TensorGroup* norm = Group("self_attention_res_out_norm.weight");
    Say("residual",
        norm != nullptr ? "normed and scaled by a learned factor" : "scaled by a learned factor",
        Show(*alpha));
  } else if (c_.residual.fixed_depth_alpha) {
    SayConfig("residual", "scaled by (2L)^-1/2", "k3_variant.residual.alpha_schedule");
  } else {
    Say("residual", "plain", "the config names no tensor of a residual site");
  }
}

void Finder::FeedForward() {
  if (const TensorGroup* dense = Matrix("mlp.gate_proj.weight")) {
    Say("dense layers",
        fmt::format("{} of {} layers, width {}", dense->count, c_.n_layers, dense->shape[0]),
        Show(*dense));
  }
  const TensorGroup* packed = Matrix("experts.*.w1.weight_packed");
  const TensorGroup* plain = Matrix("experts.*.w1.weight");
  const TensorGroup* w1 = packed != nullptr ? packed : plain;
  if (w1 == nullptr) return;
  Experts(*w1);
  Storage(*w1);
}

void Finder::Experts(const TensorGroup& w1) {
  const bool packed = w1.pattern.ends_with("_packed");
  const std::int64_t width = packed ? 2 * w1.shape[1] : w1.shape[1];
  const TensorGroup* down = Group("routed_expert_down_proj.weight");
  std::string share = "half";
  if (2 * width != c_.hidden) {
    share = fmt::format("{:.3g}", static_cast<double>(width) / static_cast<double>(c_.hidden));
  }
  if (down != nullptr) {
    const TensorGroup* norm = Group("routed_expert_norm.weight");
    Say("experts",
        fmt::format("experts run at width {}, {} of hidden{}", width, share,
                    norm != nullptr ? ", normed after combining" : ""),
        fmt::format("{}; {}{}", Show(w1), Show(*down),
                    norm != nullptr ? "; " + Show(*norm) : std::string()));
  } else {
    Say("experts", fmt::format("experts run at the full hidden width {}", width),
        Show(w1) + "; no routed_expert_down_proj");
  }
  const std::int64_t per_layer = c_.moe.n_experts;
  SayConfig("routing", fmt::format("{} of {} experts a token", c_.moe.top_k, per_layer),
            "num_experts_per_token");
  if (const TensorGroup* shared = Matrix("shared_experts.gate_proj.weight")) {
    Say("shared experts",
        fmt::format("{} of them as one of width {}", shared->shape[0] / c_.moe.intermediate,
                    shared->shape[0]),
        Show(*shared));
  }
}

void Finder::Storage(const TensorGroup& w1) {
  if (w1.pattern.ends_with("_packed")) {
    const TensorGroup* scale = Group("experts.*.w1.weight_scale");
    Say("expert storage", "MXFP4: 4 bits a value and one 8-bit scale for 32, 4.25 bits in all",
        Show(w1) + (scale != nullptr ? "; " + Show(*scale) : ""));
  } else {
    Say("expert storage", w1.dtype, Show(w1));
  }
  if (i_.source != ShapeSource::kHeaders || i_.experts == 0) return;
  Say("expert reads",
      i_.contiguous_experts == i_.experts
          ? fmt::format("every expert is one contiguous read of {} bytes", i_.bytes_per_expert)
          : fmt::format("{} of {} experts lie in one piece; the others need several reads",
                        i_.contiguous_experts, i_.experts),
      "data_offsets of the headers");
}

/// Matrices of the trunk that are stored as codes with scales.
void Finder::TrunkStorage() {
  const struct {
    std::string_view suffix, text;
  } forms[] = {
      {".weight_scale_inv", "fp8-e4m3: 8 bits a value and a 32-bit scale for 128 x 128"},
      {".weight_packed", "MXFP4: 4 bits a value and one 8-bit scale for 32, 4.25 bits in all"},
      {".weight_scale", "int8: 8 bits a value and one 16-bit scale for 32, 8.5 bits in all"}};
  for (const auto& form : forms) {
    std::int64_t count = 0;
    const TensorGroup* first = nullptr;
    for (const TensorGroup& g : i_.groups) {
      const bool expert = g.role == Name(TensorRole::kRoutedExpert);
      const bool mxfp4 = form.suffix == ".weight_scale" && g.dtype != "BF16";
      const bool ours = g.role != kVisionRole && g.role != kUnexpectedRole;
      if (!ours || expert || mxfp4 || !g.pattern.ends_with(form.suffix)) continue;
      count += g.count;
      if (first == nullptr) first = &g;
    }
    if (first == nullptr) continue;
    Say("trunk storage", fmt::format("{} matrices in {}", count, form.text), Show(*first));
  }
}

void Finder::Router() {
  const TensorGroup* gate = Matrix("block_sparse_moe.gate.weight");
  if (gate == nullptr) return;
  const std::int64_t in = gate->shape[1];
  std::string text = "router reads the hidden state";
  std::string evidence = Show(*gate);
  if (const TensorGroup* encoder = Group("router_encoder.weight")) {
    text = fmt::format("router reads a small encoder of width {}", in);
    evidence += "; " + Show(*encoder);
  } else if (in != c_.hidden) {
    text = fmt::format("router reads the latent of width {}", in);
  } else if (c_.moe.latent == c_.hidden) {
    text += " (or a latent as wide: the shape cannot tell)";
  }
  Say("router", text, evidence);
  if (const TensorGroup* bias = Group("e_score_correction_bias")) {
    Say("balancing", "selection uses a bias for each expert; which rule set it is not in the file",
        Show(*bias));
  }
}

void Finder::Output() {
  const TensorGroup* head = Group("lm_head.weight");
  if (head != nullptr) {
    Say("output", "an output matrix of its own", Show(*head));
  } else {
    Say("output", "the embedding is the output matrix too", "no lm_head.weight");
  }
  SayConfig("activation",
            c_.act == HiddenAct::kSitu
                ? fmt::format("SiTU, beta {:g}{}", c_.situ_beta,
                              c_.situ_linear_beta
                                  ? fmt::format(", linear beta {:g}", *c_.situ_linear_beta)
                                  : std::string())
                : "SwiGLU",
            "hidden_act");
}

void Finder::Extra() {
  if (i_.vision_tensors > 0) {
    Say("vision",
        fmt::format("a vision part of {} tensors; this engine does not use it", i_.vision_tensors),
        "vision_tower.*, mm_projector.*");
  }
  if (i_.unexpected_tensors == 0) return;
  std::string names;
  std::size_t shown = 0;
  for (const TensorGroup& g : i_.groups) {
    if (g.role != kUnexpectedRole || ++shown > 5) continue;
    names += fmt::format("{}{}", names.empty() ? "" : "; ", Show(g));
  }
  Say("extra tensors",
      fmt::format("{} tensors that the config does not name", i_.unexpected_tensors), names);
}

}  // namespace

std::string_view Name(Basis basis) {
  switch (basis) {
    case Basis::kShapes:
      return "shapes";
    case Basis::kNames:
      return "tensor names";
    case Basis::kConfig:
      return "config";
  }
  return "";
}

std::vector<Finding> FindFacts(const Inventory& inventory) { return Finder(inventory).Run(); }

std::vector<std::string> CannotBeKnown(const Inventory& inventory) {
  const ModelConfig& c = inventory.config;
  std::vector<std::string> list;
  if (c.has(AttentionKind::kKda)) {
    list.push_back("whether decay is bounded, and where: A_log and dt_bias look the same");
  }
  if (c.residual.mode == ResidualMode::kBlockAttnRes) {
    list.push_back("the residual block: every layer has the same mix tensors whatever it is");
  }
  if (c.has(AttentionKind::kGqa)) list.push_back("rotary positions and their theta: no tensor");
  if (c.moe.n_experts > 0) {
    list.push_back("how many experts a token takes, renormalisation and scale of their weights");
    list.push_back("how experts were balanced: quantiles, steps or a loss leave the same bias");
  }
  list.push_back("the activation and its betas, and the epsilons of norms");
  list.push_back("the context it was trained at, and on which text");
  return list;
}

}  // namespace k3
