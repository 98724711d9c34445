#include "k3/model/weights.h"

#include <algorithm>

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "k3/base/check.h"
#include "k3/model/matrix_form.h"
#include "k3/model/tensor_table.h"

namespace k3 {
namespace {

/// Looks tensors up by their name without prefix. CheckTensors has already accepted the checkpoint,
/// so an absent tensor is a bug of ours, not of the file.
class Binder {
 public:
  /// With `borrow`, f32 vectors stay where they are.
  Binder(const ModelConfig& config, const TensorMap& tensors, std::string prefix, bool borrow,
         ModelWeights& out)
      : c_(config), tensors_(tensors), prefix_(std::move(prefix)), borrow_(borrow), out_(out) {}

  void BindAll(bool has_head);

 private:
  const TensorRef* Find(const std::string& name) const {
    const auto it = tensors_.find(prefix_ + name);
    return it == tensors_.end() ? nullptr : &it->second;
  }
  const TensorRef& Get(const std::string& name) const {
    const TensorRef* t = Find(name);
    K3_CHECK(t != nullptr, "the tensor table names every tensor that is bound");
    return *t;
  }

  WeightRef Matrix(const std::string& name) const {
    return MatrixOf(tensors_, prefix_ + name + ".weight");
  }

  /// The first n elements (all of them when n < 0) as f32.
  CVec Vector(const std::string& name, std::int64_t n = -1) {
    const TensorRef& t = Get(name);
    if (borrow_) return CVec(reinterpret_cast<const float*>(t.data), {n >= 0 ? n : t.elements()});
    std::vector<float> values;
    K3_CHECK(ToFloats(t, values), "the tensor table checks dtypes");
    if (n >= 0) values.resize(static_cast<std::size_t>(n));
    return Own(std::move(values));
  }
  CVec Own(std::vector<float> values) {
    out_.owned.push_back(std::move(values));
    return CVec(out_.owned.back().data(), {static_cast<std::int64_t>(out_.owned.back().size())});
  }

  KdaWeights Kda(const std::string& a);
  MlaWeights Mla(const std::string& a);
  GqaWeights Gqa(const std::string& a);
  MoeWeights Moe(const std::string& b);
  DenseWeights Dense(const std::string& base) {
    return {Matrix(base + "gate_proj"), Matrix(base + "up_proj"), Matrix(base + "down_proj")};
  }
  CVec Product(const std::string& site);
  ResidualSite SiteOf(const std::string& name, bool output);

  const ModelConfig& c_;
  const TensorMap& tensors_;
  std::string prefix_;
  bool borrow_;
  ModelWeights& out_;
};

KdaWeights Binder::Kda(const std::string& a) {
  KdaWeights w;
  auto conv = [&](const char* stream) {
    const CVec v = Vector(fmt::format("{}{}_conv1d.weight", a, stream));
    return CMat(v.data, {c_.kda.width(), c_.kda.conv_kernel});
  };
  w.q = Matrix(a + "q_proj"), w.k = Matrix(a + "k_proj"), w.v = Matrix(a + "v_proj");
  w.o = Matrix(a + "o_proj");
  w.conv_q = conv("q"), w.conv_k = conv("k"), w.conv_v = conv("v");
  w.f_a = Matrix(a + "f_a_proj"), w.f_b = Matrix(a + "f_b_proj");
  w.dt_bias = Vector(a + "dt_bias");
  w.a_log = Vector(a + "A_log", c_.kda.n_heads);  // stored padded with zeros (spec D4)
  w.b = Matrix(a + "b_proj");
  if (c_.kda.full_rank_gate) {
    w.g = Matrix(a + "g_proj");
  } else {
    w.g_a = Matrix(a + "g_a_proj"), w.g_b = Matrix(a + "g_b_proj");
  }
  w.o_norm = Vector(a + "o_norm.weight");
  return w;
}

MlaWeights Binder::Mla(const std::string& a) {
  MlaWeights w;
  if (c_.mla.q_lora_rank > 0) {
    w.q_a = Matrix(a + "q_a_proj"), w.q_b = Matrix(a + "q_b_proj");
    w.q_a_norm = Vector(a + "q_a_layernorm.weight");
  } else {
    w.q = Matrix(a + "q_proj");
  }
  w.kv_a = Matrix(a + "kv_a_proj_with_mqa"), w.kv_b = Matrix(a + "kv_b_proj");
  w.kv_a_norm = Vector(a + "kv_a_layernorm.weight");
  if (c_.mla.output_gate) w.g = Matrix(a + "g_proj");
  w.o = Matrix(a + "o_proj");
  return w;
}

GqaWeights Binder::Gqa(const std::string& a) {
  GqaWeights w;
  w.q = Matrix(a + "q_proj"), w.k = Matrix(a + "k_proj"), w.v = Matrix(a + "v_proj");
  w.o = Matrix(a + "o_proj");
  if (c_.gqa.output_gate) w.g = Matrix(a + "g_proj");
  if (c_.gqa.qk_norm) {
    w.q_norm = Vector(a + "q_norm.weight"), w.k_norm = Vector(a + "k_norm.weight");
  }
  return w;
}

MoeWeights Binder::Moe(const std::string& b) {
  MoeWeights w;
  w.router = Matrix(b + "gate");
  w.router_bias = Vector(b + "gate.e_score_correction_bias");
  if (c_.moe.router == RouterSpace::kEncoder) w.router_encoder = Matrix(b + "router_encoder");
  if (c_.moe.latent > 0) {
    w.latent_down = Matrix(b + "routed_expert_down_proj");
    w.latent_up = Matrix(b + "routed_expert_up_proj");
    if (c_.moe.latent_norm) w.latent_norm = Vector(b + "routed_expert_norm.weight");
  }
  if (c_.moe.n_shared > 0) w.shared = Dense(b + "shared_experts.");
  for (std::int64_t e = 0; e < c_.moe.n_experts; ++e) {
    const std::string name = fmt::format("{}experts.{}.", b, e);
    w.experts.push_back({Matrix(name + "w1"), Matrix(name + "w3"), Matrix(name + "w2")});
  }
  return w;
}

/// Factors that stay in place may change: then the product is computed anew.
CVec Binder::Product(const std::string& site) {
  const CVec norm = Vector(site + "_norm.weight"), proj = Vector(site + "_proj.weight");
  if (borrow_) {
    const CVec product = Own(std::vector<float>(static_cast<std::size_t>(c_.hidden)));
    out_.products.push_back({norm.data, proj.data, out_.owned.back().data(), c_.hidden});
    return product;
  }
  std::vector<float>& product = out_.owned[out_.owned.size() - 2];
  for (std::size_t d = 0; d < product.size(); ++d) product[d] *= proj.data[d];
  return norm;
}

ResidualSite Binder::SiteOf(const std::string& name, bool output) {
  ResidualSite s;
  const ResidualConfig& r = c_.residual;
  if (c_.uses_attn_res()) {
    s.mix = Product(name);
    if (r.attn_res_gate) s.gamma = Vector(name + "_gamma").data;
  }
  if (output) return s;
  const bool scaled = r.mode == ResidualMode::kScaled || r.mode == ResidualMode::kNormScaled;
  if (scaled && !r.fixed_depth_alpha) s.alpha = Vector(name + "_alpha").data;
  if (r.mode == ResidualMode::kNormScaled) s.out_norm = Vector(name + "_out_norm.weight");
  if (r.mode == ResidualMode::kGated || r.mode == ResidualMode::kGatedChannel) {
    s.gate = Matrix(name + "_gate");
    s.gate_bias = Vector(name + "_gate.bias");
  }
  return s;
}

void Binder::BindAll(bool has_head) {
  out_.embedding = Matrix("model.embed_tokens");
  for (std::int64_t i = 0; i < c_.n_layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    ModelWeights::Layer w;
    w.attn_norm = Vector(layer + "input_layernorm.weight");
    w.ffn_norm = Vector(layer + "post_attention_layernorm.weight");
    const AttentionKind kind = c_.attention[static_cast<std::size_t>(i)];
    if (kind == AttentionKind::kKda) w.kda = Kda(layer + "self_attn.");
    if (kind == AttentionKind::kMla) w.mla = Mla(layer + "self_attn.");
    if (kind == AttentionKind::kGqa) w.gqa = Gqa(layer + "self_attn.");
    if (c_.is_moe(i)) {
      w.moe = Moe(layer + "block_sparse_moe.");
    } else {
      w.dense = Dense(layer + "mlp.");
    }
    out_.layers.push_back(std::move(w));
    out_.residual.attention.push_back(SiteOf(layer + "self_attention_res", false));
    out_.residual.ffn.push_back(c_.residual.attention_only ? ResidualSite()
                                                           : SiteOf(layer + "mlp_res", false));
  }
  if (c_.uses_attn_res()) out_.residual.output = SiteOf("model.output_attn_res", true);
  out_.final_norm = Vector("model.norm.weight");
  out_.head = has_head ? Matrix("lm_head") : out_.embedding;
  RefreshProducts(out_);
}

/// What changes the arithmetic and no shape shows: two models that differ here alone may not share
/// a state.
std::string Settings(const ModelConfig& c) {
  const MoeConfig& m = c.moe;
  const ResidualConfig& r = c.residual;
  std::string out = fmt::format("{} {} {} {}/", c.rms_eps, static_cast<int>(c.act), c.situ_beta,
                                c.situ_linear_beta.value_or(0.f));
  for (const AttentionKind kind : c.attention) out += fmt::format("{}", static_cast<int>(kind));
  out += fmt::format("/{} {} {}/{} {} {} {}/{} {} {} {} {} {}/", c.n_heads, c.kda.n_heads,
                     c.kda.lower_bound.value_or(0.f), c.mla.qk_nope_dim, c.mla.v_dim,
                     c.mla.output_gate, c.mla.norm_eps, c.gqa.n_kv_heads, c.gqa.head_dim,
                     c.gqa.rope, c.gqa.rope_theta, c.gqa.output_gate, c.gqa.qk_norm);
  out +=
      fmt::format("{} {} {} {} {} {} {} {} {} {} {}/", m.top_k, m.latent_norm, m.renormalize,
                  m.routed_scale, m.n_group, m.topk_group, static_cast<int>(m.score), m.first_dense,
                  m.layer_freq, static_cast<int>(m.router), static_cast<int>(m.encoder_act));
  return out + fmt::format("{} {} {} {} {}\n", static_cast<int>(r.mode), r.block_size,
                           r.attention_only, r.fixed_depth_alpha, r.attn_res_gate);
}

/// Hash of the settings, of every name, dtype and shape, and of the first and last bytes of every
/// tensor that is not a routed expert (reading those too would touch a page of each of half a
/// million tensors), plus the experts' bytes themselves when the model is small.
std::uint64_t Fingerprint(const ModelConfig& config, const Checkpoint& files,
                          std::int64_t total_bytes) {
  constexpr std::int64_t kEdge = 4096, kSmallModel = std::int64_t{1} << 26;
  XXH3_state_t* state = XXH3_createState();
  XXH3_64bits_reset(state);
  auto add = [&](const void* p, std::int64_t n) {
    if (n > 0) XXH3_64bits_update(state, p, static_cast<std::size_t>(n));
  };
  const std::string settings = Settings(config);
  add(settings.data(), static_cast<std::int64_t>(settings.size()));
  for (const auto& [name, t] : files.tensors()) {
    const std::string head = fmt::format("{} {} {}\n", name, Name(t.dtype), ShapeString(t.shape));
    add(head.data(), static_cast<std::int64_t>(head.size()));
    if (total_bytes <= kSmallModel || t.bytes() <= 2 * kEdge) {
      if (total_bytes <= kSmallModel || name.find(".experts.") == std::string::npos) {
        add(t.data, t.bytes());
      }
    } else if (name.find(".experts.") == std::string::npos) {
      add(t.data, kEdge);
      add(t.data + t.bytes() - kEdge, kEdge);
    }
  }
  const std::uint64_t hash = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  return hash;
}

}  // namespace

Result<std::unique_ptr<ModelWeights>> BindWeights(const ModelConfig& config,
                                                  const Checkpoint& checkpoint) {
  K3_ASSIGN(const TensorCheck check, CheckTensors(config, checkpoint));
  auto weights = std::make_unique<ModelWeights>();
  weights->warnings = check.warnings;
  Binder(config, checkpoint.tensors(), check.prefix, false, *weights).BindAll(check.has_head);
  for (const auto& [name, t] : checkpoint.tensors()) {
    if (name.starts_with(check.prefix)) weights->bytes += t.bytes();
  }
  weights->fingerprint = Fingerprint(config, checkpoint, weights->bytes);
  return weights;
}

Result<std::unique_ptr<ModelWeights>> BindTensors(const ModelConfig& config,
                                                  const TensorMap& tensors) {
  std::size_t expected = 0;
  K3_TRY(ForEachTensor(config, [&](const TensorSpec& spec) -> Status {
    const auto it = tensors.find(spec.name);
    if (it == tensors.end()) {
      return Error{Code::kNotFound, fmt::format("missing tensor {}", spec.name)};
    }
    const TensorRef& t = it->second;
    if (t.shape != spec.shape || t.dtype != DType::kF32) {
      return Error{Code::kCorrupt,
                   fmt::format("wrong shape {}: found {} {}, expected F32 {}", spec.name,
                               Name(t.dtype), ShapeString(t.shape), ShapeString(spec.shape))};
    }
    K3_CHECK(reinterpret_cast<std::uintptr_t>(t.data) % alignof(float) == 0, "aligned in memory");
    ++expected;
    return {};
  }));
  if (tensors.size() != expected) {
    return Error{Code::kCorrupt,
                 fmt::format("found {} tensors, expected {}", tensors.size(), expected)};
  }
  auto weights = std::make_unique<ModelWeights>();
  Binder(config, tensors, "", true, *weights).BindAll(!config.tied_embeddings);
  for (const auto& [name, t] : tensors) weights->bytes += t.bytes();
  return weights;
}

void RefreshProducts(ModelWeights& weights) {
  for (const ModelWeights::Product& p : weights.products) {
    for (std::int64_t d = 0; d < p.n; ++d) p.product[d] = p.norm[d] * p.proj[d];
  }
}

}  // namespace k3
