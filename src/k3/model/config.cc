#include "k3/model/config.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "k3/io/json.h"
#include "k3/io/mapped_file.h"
#include "k3/model/config_variant.h"

namespace k3 {
namespace {

using config_internal::kMaxDim;
using config_internal::kMaxHeadDim;
using config_internal::kMaxHeads;
using config_internal::kMaxLayers;
using nlohmann::json;

constexpr std::int64_t kMaxExperts = 1 << 16;
constexpr std::int64_t kMaxExpertsInAll = 1 << 20;  // over all layers
constexpr double kMaxParameters = 1e15;
constexpr double kMaxFloat = static_cast<double>(std::numeric_limits<float>::max());
constexpr double kTiny = 1e-30;  // smallest accepted value of what must be positive

/// The objects a config is read from. `text` is the root itself in a flat config.
struct Readers {
  JsonReader root;
  JsonReader text;
  bool nested;
  std::string where;

  Error Refuse(std::string words) const {
    return {Code::kCorrupt, fmt::format("{}: {}", where, words)};
  }
};

Error UnknownValue(const JsonReader& r, std::string_view key, std::string_view expected) {
  Error error = r.Bad(key, *r.Find(key), expected);
  error.code = Code::kUnsupported;
  return error;
}

/// Refuses a string key whose value is not one of `allowed`; absent is fine.
Status CheckWord(const JsonReader& r, std::string_view key,
                 std::initializer_list<std::string_view> allowed) {
  K3_ASSIGN(const auto word, r.OptString(key));
  if (!word) return {};
  for (const auto a : allowed) {
    if (*word == a) return {};
  }
  return UnknownValue(r, key, fmt::format("{}", fmt::join(allowed, " or ")));
}

Status CheckModelType(const Readers& in, ModelConfig* c) {
  if (c->has_variant) return {};
  bool found = false;
  for (const JsonReader* r : {&in.root, &in.text}) {
    K3_TRY(CheckWord(*r, "model_type", {"kimi_k3", "kimi_linear"}));
    found = found || r->Has("model_type");
  }
  if (!found) c->warnings.push_back(in.where + ": model_type is missing; taken as kimi_linear");
  return {};
}

Status ReadSizes(const Readers& in, ModelConfig* c) {
  const JsonReader& t = in.text;
  K3_ASSIGN(c->hidden, t.Int("hidden_size", 1, kMaxDim));
  K3_ASSIGN(c->n_layers, t.Int("num_hidden_layers", 1, kMaxLayers));
  K3_ASSIGN(c->vocab, t.Int("vocab_size", 1, kMaxDim));
  K3_ASSIGN(c->n_heads, t.Int("num_attention_heads", 1, kMaxHeads, 0));
  K3_ASSIGN(c->intermediate, t.Int("intermediate_size", 1, kMaxDim, 0));
  const char* positions =
      t.Has("max_position_embeddings") ? "max_position_embeddings" : "model_max_length";
  K3_ASSIGN(const auto max_positions, t.OptInt(positions, 1, std::int64_t{1} << 40));
  if (!max_positions) {
    c->warnings.push_back(in.where + ": max_position_embeddings is missing; taken as 1048576");
  }
  c->max_positions = max_positions.value_or(1048576);
  return {};
}

Status ReadNorms(const Readers& in, ModelConfig* c) {
  const char* key = in.text.Has("rms_norm_eps") ? "rms_norm_eps" : "norm_eps";
  K3_ASSIGN(const auto eps, in.text.OptNumber(key, kTiny, 1.0));
  if (!eps) c->warnings.push_back(in.where + ": rms_norm_eps is missing; taken as 1e-5");
  c->rms_eps = static_cast<float>(eps.value_or(1e-5));
  K3_ASSIGN(const auto mla_eps, in.text.OptNumber("mla_norm_eps", kTiny, 1.0));
  c->mla.norm_eps = static_cast<float>(mla_eps.value_or(1e-6));
  return {};
}

Status ReadActivation(const JsonReader& t, ModelConfig* c) {
  K3_TRY(CheckWord(t, "hidden_act", {"situ", "silu"}));
  K3_ASSIGN(const auto act, t.OptString("hidden_act"));
  if (!act) return t.Missing("hidden_act");
  if (*act == "silu") return {};
  c->act = HiddenAct::kSitu;
  K3_ASSIGN(const double beta, t.Number("activation_situ_beta", kTiny, kMaxFloat));
  K3_ASSIGN(const auto linear, t.OptNumber("activation_situ_linear_beta", kTiny, kMaxFloat));
  c->situ_beta = static_cast<float>(beta);
  if (linear) c->situ_linear_beta = static_cast<float>(*linear);
  return {};
}

Status CheckGroups(const Readers& in, const MoeConfig& m) {
  if (m.top_k > m.n_experts) {
    return in.Refuse(
        fmt::format("num_experts_per_token is {}, but num_experts is {}", m.top_k, m.n_experts));
  }
  if (m.n_experts % m.n_group != 0) {
    return in.Refuse(fmt::format("num_experts {} is not a multiple of num_expert_group {}",
                                 m.n_experts, m.n_group));
  }
  if (m.topk_group > m.n_group) {
    return in.Refuse(
        fmt::format("topk_group is {}, but num_expert_group is {}", m.topk_group, m.n_group));
  }
  const std::int64_t eligible = m.n_experts / m.n_group * m.topk_group;
  if (m.top_k > eligible) {
    return in.Refuse(fmt::format(
        "num_experts_per_token is {}, but topk_group leaves only {} experts", m.top_k, eligible));
  }
  return {};
}

Status ReadRouting(const JsonReader& t, MoeConfig* m) {
  K3_TRY(CheckWord(t, "moe_router_activation_func", {"sigmoid", "softmax"}));
  K3_TRY(CheckWord(t, "topk_method", {"noaux_tc"}));
  K3_ASSIGN(const auto score, t.OptString("moe_router_activation_func"));
  m->score = score == "softmax" ? ScoreFunction::kSoftmax : ScoreFunction::kSigmoid;
  K3_ASSIGN(m->renormalize, t.Bool("moe_renormalize", true));
  K3_ASSIGN(const auto scale, t.OptNumber("routed_scaling_factor", kTiny, kMaxFloat));
  m->routed_scale = static_cast<float>(scale.value_or(1.0));
  K3_ASSIGN(m->n_group, t.Int("num_expert_group", 1, kMaxExperts, 1));
  K3_ASSIGN(m->topk_group, t.Int("topk_group", 1, kMaxExperts, 1));
  return {};
}

Status ReadMoe(const Readers& in, ModelConfig* c) {
  const JsonReader& t = in.text;
  MoeConfig& m = c->moe;
  K3_ASSIGN(m.n_experts, t.Int("num_experts", 0, kMaxExperts, 0));
  K3_ASSIGN(m.first_dense, t.Int("first_k_dense_replace", 0, kMaxLayers, 0));
  K3_ASSIGN(m.layer_freq, t.Int("moe_layer_freq", 1, kMaxLayers, 1));
  if (m.n_experts == 0) return {};
  K3_ASSIGN(m.top_k, t.Int("num_experts_per_token", 1, kMaxExperts));
  K3_ASSIGN(m.n_shared, t.Int("num_shared_experts", 0, 256, 0));
  K3_ASSIGN(m.intermediate, t.Int("moe_intermediate_size", 1, kMaxDim));
  K3_ASSIGN(m.latent, t.Int("routed_expert_hidden_size", 1, kMaxDim, 0));
  K3_ASSIGN(m.latent_norm, t.Bool("latent_moe_use_norm", false));
  K3_TRY(ReadRouting(t, &m));
  return CheckGroups(in, m);
}

Status ReadKda(const std::optional<JsonReader>& linear, ModelConfig* c) {
  if (!linear) return {};
  K3_ASSIGN(c->kda.n_heads, linear->Int("num_heads", 1, kMaxHeads, 0));
  K3_ASSIGN(c->kda.head_dim, linear->Int("head_dim", 1, kMaxHeadDim, 0));
  K3_ASSIGN(c->kda.conv_kernel, linear->Int("short_conv_kernel_size", 1, 64, 4));
  K3_ASSIGN(c->kda.full_rank_gate, linear->Bool("use_full_rank_gate", false));
  K3_ASSIGN(const auto bound, linear->OptNumber("gate_lower_bound", -kMaxFloat, kMaxFloat));
  if (bound) c->kda.lower_bound = static_cast<float>(*bound);
  return {};
}

Status CheckKda(const Readers& in, const std::optional<JsonReader>& linear, const ModelConfig& c) {
  if (!c.has(AttentionKind::kKda)) return {};
  if (!linear) return in.Refuse("kda layer needs linear_attn_config");
  if (c.kda.n_heads == 0) {
    return in.Refuse(
        "kda layer needs linear_attn_config.num_heads: key linear_attn_config.num_heads is "
        "missing");
  }
  if (c.kda.head_dim == 0) return linear->Missing("head_dim");
  return {};
}

Status ReadMla(const Readers& in, ModelConfig* c) {
  if (!c->has(AttentionKind::kMla)) return {};
  const JsonReader& t = in.text;
  MlaConfig& m = c->mla;
  if (!t.Has("kv_lora_rank")) {
    return in.Refuse("mla layer needs kv_lora_rank: key kv_lora_rank is missing");
  }
  K3_ASSIGN(m.kv_lora_rank, t.Int("kv_lora_rank", 1, kMaxDim));
  K3_ASSIGN(m.q_lora_rank, t.Int("q_lora_rank", 1, kMaxDim, 0));
  K3_ASSIGN(m.qk_nope_dim, t.Int("qk_nope_head_dim", 1, kMaxHeadDim));
  K3_ASSIGN(m.qk_rope_dim, t.Int("qk_rope_head_dim", 0, kMaxHeadDim));
  K3_ASSIGN(m.v_dim, t.Int("v_head_dim", 1, kMaxHeadDim));
  K3_ASSIGN(m.output_gate, t.Bool("mla_use_output_gate", false));
  K3_ASSIGN(const auto nope, t.OptBool("mla_use_nope"));
  if (nope == false) return UnknownValue(t, "mla_use_nope", "true: this family has no rotary MLA");
  if (!nope) c->warnings.push_back(in.where + ": mla_use_nope is missing; taken as true");
  return {};
}

/// Absent, or blocks of 128 x 128.
Status CheckBlocks(const JsonReader& r, std::string_view key) {
  K3_ASSIGN(const auto blocks, r.OptIntList(key, 1, kMaxDim));
  if (!blocks || *blocks == std::vector<std::int64_t>{128, 128}) return {};
  return Error{Code::kUnsupported, fmt::format("{}: {} is [{}], expected [128, 128]", r.where(),
                                               r.Path(key), fmt::join(*blocks, ", "))};
}

/// What a group says about its weights must be what the format is here.
Status CheckQuantizedWeights(const JsonReader& w, std::string_view format) {
  if (format == "float-quantized") {
    K3_TRY(CheckWord(w, "type", {"float"}));
    K3_TRY(CheckWord(w, "strategy", {"block"}));
    K3_TRY(w.Int("num_bits", 8, 8, 8).status());
    return CheckBlocks(w, "block_structure");
  }
  const bool int8 = format == "int-quantized";
  const std::int64_t bits = int8 ? 8 : 4;
  K3_TRY(CheckWord(w, "type", {int8 ? "int" : "float"}));
  K3_TRY(CheckWord(w, "strategy", {"group"}));
  K3_TRY(w.Int("num_bits", bits, bits, bits).status());
  return w.Int("group_size", 32, 32, 32).status();
}

/// Checks quantization_config, when there is one; `mxfp4` is set when it names that format.
Status CheckQuantization(const JsonReader& r, bool* mxfp4) {
  K3_ASSIGN(const auto q, r.Object("quantization_config"));
  if (!q) return {};
  K3_TRY(CheckWord(*q, "quant_method", {"compressed-tensors", "fp8"}));
  K3_ASSIGN(const auto method, q->OptString("quant_method"));
  if (method == "fp8") {
    K3_TRY(CheckWord(*q, "fmt", {"e4m3"}));
    if (!q->Has("weight_block_size")) return q->Missing("weight_block_size");
    return CheckBlocks(*q, "weight_block_size");
  }
  const std::initializer_list<std::string_view> formats{"mxfp4-pack-quantized", "float-quantized",
                                                        "int-quantized"};
  K3_ASSIGN(const auto outer, q->OptString("format"));
  if (!outer) return q->Missing("format");
  if (*outer != "mixed-precision") K3_TRY(CheckWord(*q, "format", formats));
  *mxfp4 = *mxfp4 || outer == "mxfp4-pack-quantized";
  K3_ASSIGN(const auto groups, q->Object("config_groups"));
  if (!groups) return {};
  for (const auto& [name, unused] : groups->object().items()) {
    K3_ASSIGN(const auto group, groups->Object(name));
    if (!group) continue;
    K3_TRY(CheckWord(*group, "format", formats));
    K3_ASSIGN(const auto own, group->OptString("format"));
    const std::string format = own.value_or(*outer);
    if (format == "mixed-precision") return group->Missing("format");
    *mxfp4 = *mxfp4 || format == "mxfp4-pack-quantized";
    K3_ASSIGN(const auto weights, group->Object("weights"));
    if (weights) K3_TRY(CheckQuantizedWeights(*weights, format));
  }
  return {};
}

Status ReadTied(const Readers& in, ModelConfig* c) {
  K3_ASSIGN(const auto outer, in.root.OptBool("tie_word_embeddings"));
  K3_ASSIGN(const auto inner, in.text.OptBool("tie_word_embeddings"));
  if (outer && inner && *outer != *inner) {
    return in.Refuse(fmt::format(
        "tie_word_embeddings is {}, but text_config.tie_word_embeddings is {}", *outer, *inner));
  }
  c->tied_embeddings = outer ? *outer : inner.value_or(false);
  return {};
}

/// Ids stand in the root, else in text_config.
Result<std::vector<TokenId>> ReadIds(const Readers& in, const char* key, std::int64_t vocab) {
  const JsonReader& r = in.root.Has(key) ? in.root : in.text;
  K3_ASSIGN(const auto list, r.OptIntList(key, 0, vocab - 1, true));
  std::vector<TokenId> ids;
  if (!list) return ids;
  for (const auto id : *list) ids.push_back(static_cast<TokenId>(id));
  return ids;
}

Status ReadSpecialIds(const Readers& in, ModelConfig* c) {
  K3_ASSIGN(c->eos, ReadIds(in, "eos_token_id", c->vocab));
  for (const auto& [key, id] :
       {std::pair("bos_token_id", &c->bos), std::pair("pad_token_id", &c->pad)}) {
    K3_ASSIGN(const auto ids, ReadIds(in, key, c->vocab));
    if (ids.size() > 1) return in.Refuse(fmt::format("{} is a list, expected one id", key));
    if (!ids.empty()) *id = ids[0];
  }
  return {};
}

/// An upper estimate of a layer's attention weights.
double AttentionParameters(const ModelConfig& c) {
  const auto d = [](std::int64_t x) { return static_cast<double>(x); };
  const double kda = 8 * d(c.kda.width()) * (d(c.hidden) + d(c.kda.head_dim));
  const double mla_out = d(c.n_heads) * d(c.mla.q_dim() + c.mla.qk_nope_dim + 3 * c.mla.v_dim);
  const double mla = mla_out * d(c.hidden + c.mla.q_lora_rank + c.mla.kv_lora_rank) +
                     d(c.hidden) * d(c.mla.q_lora_rank + c.mla.row_dim());
  const double gqa = 3 * d(c.n_heads + c.gqa.n_kv_heads) * d(c.gqa.head_dim) * d(c.hidden);
  return kda + mla + gqa;
}

/// A model whose weights could not be counted in 64 bits, or whose tensor list would not fit into
/// memory, is a mistake or an attack.
Status CheckTotal(const Readers& in, const ModelConfig& c) {
  const auto d = [](std::int64_t x) { return static_cast<double>(x); };
  const MoeConfig& m = c.moe;
  const double hidden = d(c.hidden);
  std::int64_t experts = 0;
  double total = 2 * d(c.vocab) * hidden + d(c.n_layers) * AttentionParameters(c);
  if (c.residual.mode == ResidualMode::kGatedChannel) total += 2 * d(c.n_layers) * hidden * hidden;
  for (std::int64_t i = 0; i < c.n_layers; ++i) {
    if (!c.is_moe(i)) {
      total += 3 * hidden * d(c.intermediate);
      continue;
    }
    experts += m.n_experts;
    total +=
        d(m.n_experts) * (3 * d(c.expert_width()) * d(m.intermediate) + hidden + d(m.encoder_dim));
    total += hidden * (3 * d(m.n_shared) * d(m.intermediate) + 2 * d(m.latent) + d(m.encoder_dim));
  }
  if (experts > kMaxExpertsInAll) {
    return in.Refuse(fmt::format("num_experts {} over the layers gives {} experts, more than {}",
                                 m.n_experts, experts, kMaxExpertsInAll));
  }
  if (total > kMaxParameters) {
    return in.Refuse(fmt::format("the dimensions describe {:.3g} parameters, more than {:.3g}",
                                 total, kMaxParameters));
  }
  return {};
}

/// What is needed only when some layer uses it.
Status CheckNeeds(const Readers& in, const std::optional<JsonReader>& linear,
                  const ModelConfig& c) {
  K3_TRY(CheckKda(in, linear, c));
  const bool heads = c.has(AttentionKind::kMla) || c.has(AttentionKind::kGqa);
  if (heads && c.n_heads == 0) return in.text.Missing("num_attention_heads");
  for (std::int64_t i = 0; i < c.n_layers; ++i) {
    if (!c.is_moe(i) && c.intermediate == 0) return in.text.Missing("intermediate_size");
  }
  return {};
}

Result<ModelConfig> Parse(const Readers& in) {
  ModelConfig c;
  c.nested = in.nested;
  if (in.nested && in.root.Has("k3_variant"))
    return in.Refuse("k3_variant belongs inside text_config");
  config_internal::Variant variant;
  if (const json* v = in.text.Find("k3_variant")) {
    c.has_variant = true;
    K3_ASSIGN(variant, config_internal::ParseVariant(*v, in.where));
  }
  K3_TRY(CheckModelType(in, &c));
  K3_TRY(ReadSizes(in, &c));
  K3_TRY(ReadNorms(in, &c));
  K3_TRY(ReadActivation(in.text, &c));
  K3_TRY(ReadMoe(in, &c));
  K3_ASSIGN(const auto linear, in.text.Object("linear_attn_config"));
  K3_TRY(ReadKda(linear, &c));
  K3_ASSIGN(const auto block_size, in.text.OptInt("attn_res_block_size", 1, kMaxDim));
  K3_TRY(config_internal::ApplyVariant(variant, linear, block_size, in.where, &c));
  K3_TRY(ReadMla(in, &c));
  K3_TRY(CheckNeeds(in, linear, c));
  K3_TRY(CheckTotal(in, c));
  K3_TRY(CheckQuantization(in.root, &c.packed_experts));
  K3_TRY(CheckQuantization(in.text, &c.packed_experts));
  K3_TRY(ReadTied(in, &c));
  K3_TRY(ReadSpecialIds(in, &c));
  K3_ASSIGN(const auto nextn, in.text.Int("num_nextn_predict_layers", 0, kMaxLayers, 0));
  if (nextn > 0) {
    c.warnings.push_back(fmt::format(
        "{}: num_nextn_predict_layers is {}; the extra layers are ignored", in.where, nextn));
  }
  return c;
}

}  // namespace

Result<ModelConfig> ParseModelConfig(std::string_view text, std::string_view where) {
  K3_ASSIGN(const json root, ParseJson(text, where));
  if (!root.is_object()) {
    return Error{Code::kCorrupt,
                 fmt::format("{}: is {}, expected an object", where, PrintableValue(root))};
  }
  const JsonReader reader(root, where);
  K3_ASSIGN(const auto nested, reader.Object("text_config"));
  return Parse({reader, nested.value_or(reader), nested.has_value(), std::string(where)});
}

Result<ModelConfig> ReadModelConfig(const std::string& dir) {
  const std::string path =
      dir.empty() || dir.back() == '/' ? dir + "config.json" : dir + "/config.json";
  K3_ASSIGN(const std::string text, ReadTextFile(path, std::size_t{1} << 24));
  return ParseModelConfig(text, path);
}

}  // namespace k3
