#include "k3/model/tensor_table.h"

#include <fmt/format.h>

#include <initializer_list>
#include <utility>

#include "k3/base/check.h"

namespace k3 {
namespace {

/// Builds names and shapes and hands each spec to the visitor; after an error the rest is skipped.
class Lister {
 public:
  Lister(const ModelConfig& c, const std::function<Status(const TensorSpec&)>& visit)
      : c_(c), visit_(visit) {}

  Status Run() {
    Put("model.embed_tokens.weight", {c_.vocab, c_.hidden}, TensorRole::kEmbedding);
    for (std::int64_t i = 0; i < c_.n_layers && status_.ok(); ++i) Layer(i);
    spec_.layer = -1;
    base_.clear();
    Put("model.norm.weight", {c_.hidden}, TensorRole::kNorm);
    if (c_.uses_attn_res()) Mix("model.output_attn_res");
    if (c_.residual.attn_res_gate)
      PutF32("model.output_attn_res_gamma", {1}, TensorRole::kResidual);
    if (!c_.tied_embeddings) Put("lm_head.weight", {c_.vocab, c_.hidden}, TensorRole::kHead);
    return status_;
  }

 private:
  using Shape = std::initializer_list<std::int64_t>;

  void Emit(std::string_view name, Shape shape, TensorRole role, bool f32) {
    if (!status_.ok()) return;
    spec_.name.assign(base_).append(name);
    spec_.shape.assign(shape);
    spec_.role = role;
    spec_.f32 = f32;
    status_ = visit_(spec_);
  }
  void Put(std::string_view name, Shape shape, TensorRole role) { Emit(name, shape, role, false); }
  void PutF32(std::string_view name, Shape shape, TensorRole role) {
    Emit(name, shape, role, true);
  }

  void Mix(const std::string& site) {
    Put(site + "_norm.weight", {c_.hidden}, TensorRole::kResidual);
    Put(site + "_proj.weight", {1, c_.hidden}, TensorRole::kResidual);
  }

  void Layer(std::int64_t i) {
    spec_.layer = static_cast<std::int32_t>(i);
    const std::string layer = fmt::format("model.layers.{}.", i);
    base_ = layer;
    Put("input_layernorm.weight", {c_.hidden}, TensorRole::kNorm);
    Put("post_attention_layernorm.weight", {c_.hidden}, TensorRole::kNorm);
    Site("self_attention_res");
    if (!c_.residual.attention_only) Site("mlp_res");
    base_ = layer + "self_attn.";
    switch (c_.attention[static_cast<std::size_t>(i)]) {
      case AttentionKind::kKda:
        Kda();
        break;
      case AttentionKind::kMla:
        Mla();
        break;
      case AttentionKind::kGqa:
        Gqa();
        break;
    }
    if (c_.is_moe(i)) {
      Moe(layer + "block_sparse_moe.");
    } else {
      base_ = layer + "mlp.";
      Mlp("", c_.intermediate, TensorRole::kDense);
    }
  }

  void Site(const std::string& s) {
    constexpr TensorRole kRole = TensorRole::kResidual;
    const ResidualMode mode = c_.residual.mode;
    if (c_.uses_attn_res()) Mix(s);
    if (c_.residual.attn_res_gate) PutF32(s + "_gamma", {1}, kRole);
    const bool alpha = mode == ResidualMode::kScaled || mode == ResidualMode::kNormScaled;
    if (alpha && !c_.residual.fixed_depth_alpha) PutF32(s + "_alpha", {1}, kRole);
    if (mode == ResidualMode::kNormScaled) Put(s + "_out_norm.weight", {c_.hidden}, kRole);
    if (mode == ResidualMode::kGated || mode == ResidualMode::kGatedChannel) {
      const std::int64_t rows = mode == ResidualMode::kGated ? 1 : c_.hidden;
      Put(s + "_gate.weight", {rows, c_.hidden}, kRole);
      PutF32(s + "_gate.bias", {rows}, kRole);
    }
  }

  void Kda() {
    constexpr TensorRole kRole = TensorRole::kAttention;
    const std::int64_t h = c_.hidden, p = c_.kda.width(), k = c_.kda.head_dim, n = c_.kda.n_heads;
    for (const char* stream : {"q", "k", "v"}) {
      Put(fmt::format("{}_proj.weight", stream), {p, h}, kRole);
      PutF32(fmt::format("{}_conv1d.weight", stream), {p, 1, c_.kda.conv_kernel}, kRole);
    }
    Put("f_a_proj.weight", {k, h}, kRole);
    Put("f_b_proj.weight", {p, k}, kRole);
    Put("b_proj.weight", {n, h}, kRole);
    PutF32("A_log", {n}, kRole);
    PutF32("dt_bias", {p}, kRole);
    PutF32("o_norm.weight", {k}, kRole);
    if (c_.kda.full_rank_gate) {
      Put("g_proj.weight", {p, h}, kRole);
    } else {
      Put("g_a_proj.weight", {k, h}, kRole);
      Put("g_b_proj.weight", {p, k}, kRole);
    }
    Put("o_proj.weight", {h, p}, kRole);
  }

  void Mla() {
    constexpr TensorRole kRole = TensorRole::kAttention;
    const MlaConfig& m = c_.mla;
    const std::int64_t h = c_.hidden, n = c_.n_heads;
    if (m.q_lora_rank > 0) {
      Put("q_a_proj.weight", {m.q_lora_rank, h}, kRole);
      Put("q_a_layernorm.weight", {m.q_lora_rank}, kRole);
      Put("q_b_proj.weight", {n * m.q_dim(), m.q_lora_rank}, kRole);
    } else {
      Put("q_proj.weight", {n * m.q_dim(), h}, kRole);
    }
    Put("kv_a_proj_with_mqa.weight", {m.row_dim(), h}, kRole);
    Put("kv_a_layernorm.weight", {m.kv_lora_rank}, kRole);
    Put("kv_b_proj.weight", {n * (m.qk_nope_dim + m.v_dim), m.kv_lora_rank}, kRole);
    if (m.output_gate) Put("g_proj.weight", {n * m.v_dim, h}, kRole);
    Put("o_proj.weight", {h, n * m.v_dim}, kRole);
  }

  void Gqa() {
    constexpr TensorRole kRole = TensorRole::kAttention;
    const std::int64_t h = c_.hidden, d = c_.gqa.head_dim;
    const std::int64_t q = c_.n_heads * d, kv = c_.gqa.n_kv_heads * d;
    Put("q_proj.weight", {q, h}, kRole);
    Put("k_proj.weight", {kv, h}, kRole);
    Put("v_proj.weight", {kv, h}, kRole);
    if (c_.gqa.output_gate) Put("g_proj.weight", {q, h}, kRole);
    if (c_.gqa.qk_norm) {
      Put("q_norm.weight", {d}, kRole);
      Put("k_norm.weight", {d}, kRole);
    }
    Put("o_proj.weight", {h, q}, kRole);
  }

  void Mlp(const std::string& name, std::int64_t width, TensorRole role) {
    Put(name + "gate_proj.weight", {width, c_.hidden}, role);
    Put(name + "up_proj.weight", {width, c_.hidden}, role);
    Put(name + "down_proj.weight", {c_.hidden, width}, role);
  }

  void Moe(const std::string& block) {
    const MoeConfig& m = c_.moe;
    const std::int64_t h = c_.hidden, z = c_.expert_width(), inter = m.intermediate;
    base_ = block;
    const std::int64_t router_in = m.router == RouterSpace::kLatent    ? z
                                   : m.router == RouterSpace::kEncoder ? m.encoder_dim
                                                                       : h;
    Put("gate.weight", {m.n_experts, router_in}, TensorRole::kRouter);
    PutF32("gate.e_score_correction_bias", {m.n_experts}, TensorRole::kRouter);
    if (m.router == RouterSpace::kEncoder) {
      Put("router_encoder.weight", {m.encoder_dim, h}, TensorRole::kRouter);
    }
    if (m.latent > 0) {
      Put("routed_expert_down_proj.weight", {z, h}, TensorRole::kLatent);
      Put("routed_expert_up_proj.weight", {h, z}, TensorRole::kLatent);
      if (m.latent_norm) Put("routed_expert_norm.weight", {z}, TensorRole::kLatent);
    }
    if (m.n_shared > 0) Mlp("shared_experts.", inter * m.n_shared, TensorRole::kSharedExpert);
    for (std::int64_t e = 0; e < m.n_experts && status_.ok(); ++e) {
      spec_.expert = static_cast<std::int32_t>(e);
      base_ = fmt::format("{}experts.{}.", block, e);
      Put("w1.weight", {inter, z}, TensorRole::kRoutedExpert);
      Put("w2.weight", {z, inter}, TensorRole::kRoutedExpert);
      Put("w3.weight", {inter, z}, TensorRole::kRoutedExpert);
    }
    spec_.expert = -1;
  }

  const ModelConfig& c_;
  const std::function<Status(const TensorSpec&)>& visit_;
  TensorSpec spec_;
  std::string base_;
  Status status_;
};

}  // namespace

std::string_view Name(TensorRole role) {
  switch (role) {
    case TensorRole::kEmbedding:
      return "embedding";
    case TensorRole::kHead:
      return "head";
    case TensorRole::kNorm:
      return "norm";
    case TensorRole::kResidual:
      return "residual";
    case TensorRole::kAttention:
      return "attention";
    case TensorRole::kDense:
      return "dense";
    case TensorRole::kRouter:
      return "router";
    case TensorRole::kLatent:
      return "latent";
    case TensorRole::kSharedExpert:
      return "shared expert";
    case TensorRole::kRoutedExpert:
      return "routed expert";
  }
  return "?";
}

Status ForEachTensor(const ModelConfig& config,
                     const std::function<Status(const TensorSpec&)>& visit) {
  return Lister(config, visit).Run();
}

std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config) {
  std::vector<TensorSpec> list;
  const Status status = ForEachTensor(config, [&list](const TensorSpec& spec) {
    list.push_back(spec);
    return Status();
  });
  K3_CHECK(status.ok(), "a visitor that never fails");
  return list;
}

}  // namespace k3
