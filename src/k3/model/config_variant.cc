#include "k3/model/config_variant.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

namespace k3::config_internal {
namespace {

using nlohmann::json;

template <class E>
struct Named {
  std::string_view word;
  E value;
};

constexpr std::array<Named<ResidualMode>, 7> kModes{{
    {"block_attn_res", ResidualMode::kBlockAttnRes},
    {"full_attn_res", ResidualMode::kFullAttnRes},
    {"plain", ResidualMode::kPlain},
    {"scaled", ResidualMode::kScaled},
    {"gated", ResidualMode::kGated},
    {"gated_channel", ResidualMode::kGatedChannel},
    {"norm_scaled", ResidualMode::kNormScaled},
}};
constexpr std::array<Named<RouterSpace>, 3> kSpaces{{
    {"hidden", RouterSpace::kHidden},
    {"latent", RouterSpace::kLatent},
    {"encoder", RouterSpace::kEncoder},
}};
constexpr std::array<Named<EncoderAct>, 4> kEncoderActs{{
    {"silu", EncoderAct::kSilu},
    {"tanh", EncoderAct::kTanh},
    {"relu", EncoderAct::kRelu},
    {"none", EncoderAct::kNone},
}};
constexpr std::array<Named<AttentionKind>, 3> kKinds{{
    {"kda", AttentionKind::kKda},
    {"mla", AttentionKind::kMla},
    {"gqa", AttentionKind::kGqa},
}};
constexpr std::array<Named<bool>, 2> kSites{{{"both", false}, {"attention", true}}};
constexpr std::array<Named<bool>, 2> kSchedules{{{"learned", false}, {"fixed_depth", true}}};
constexpr std::array<Named<bool>, 2> kWidths{{{"latent", true}, {"hidden", false}}};
constexpr std::array<Named<bool>, 2> kForms{{{"bounded", true}, {"softplus", false}}};
constexpr std::array<Named<bool>, 2> kRopes{{{"none", false}, {"neox", true}}};

template <class E, std::size_t N>
std::optional<E> Lookup(const json& v, const std::array<Named<E>, N>& words) {
  if (!v.is_string()) return std::nullopt;
  for (const auto& [word, value] : words) {
    if (v.get_ref<const std::string&>() == word) return value;
  }
  return std::nullopt;
}

std::optional<double> AsNumber(const json& v) {
  if (!v.is_number()) return std::nullopt;
  const double d = v.get<double>();
  // Every number ends up in float arithmetic.
  if (!(std::abs(d) <= static_cast<double>(std::numeric_limits<float>::max()))) return std::nullopt;
  return d;
}

std::optional<double> AsPositive(const json& v) {
  const auto d = AsNumber(v);
  return d && *d > 0 ? d : std::nullopt;
}

template <std::int64_t kMax>
std::optional<std::int64_t> AsPositiveInt(const json& v) {
  if (!v.is_number_unsigned()) return std::nullopt;
  const auto u = v.get<std::uint64_t>();
  if (u == 0 || u > static_cast<std::uint64_t>(kMax)) return std::nullopt;
  return static_cast<std::int64_t>(u);
}

std::optional<bool> AsBool(const json& v) {
  if (!v.is_boolean()) return std::nullopt;
  return v.get<bool>();
}

std::optional<std::vector<AttentionKind>> AsKinds(const json& v) {
  if (!v.is_array() || v.empty() || v.size() > 16 * static_cast<std::size_t>(kMaxLayers)) {
    return std::nullopt;
  }
  std::vector<AttentionKind> kinds;
  for (const json& e : v) {
    const auto kind = Lookup(e, kKinds);
    if (!kind) return std::nullopt;
    kinds.push_back(*kind);
  }
  return kinds;
}

/// Reads one object of k3_variant. Keys are claimed one by one; Done refuses what nobody claimed.
class Section {
 public:
  Section(const json* object, std::string path, std::string_view where)
      : object_(object), path_(std::move(path)), where_(where) {}

  static Result<Section> Open(const json& v, std::string path, std::string_view where) {
    if (!v.is_object()) {
      return Error{Code::kCorrupt, fmt::format("{}: bad value {}: {}, expected an object", where,
                                               path, PrintableValue(v))};
    }
    return Section(&v, std::move(path), where);
  }

  /// A nested section; an absent one reads as empty.
  Result<Section> Child(const char* key) {
    const json* v = Claim(key);
    if (!v) return Section(nullptr, path_ + "." + key, where_);
    return Open(*v, path_ + "." + key, where_);
  }

  /// Sets *out to convert(value) when the key is present.
  template <class T, class Convert>
  Status Read(const char* key, std::optional<T>* out, Convert convert) {
    const json* v = Claim(key);
    if (!v) return {};
    *out = convert(*v);
    if (*out) return {};
    return Error{Code::kCorrupt,
                 fmt::format("{}: bad value {}.{}: {}", where_, path_, key, PrintableValue(*v))};
  }
  template <class E, std::size_t N>
  Status ReadWord(const char* key, std::optional<E>* out, const std::array<Named<E>, N>& words) {
    return Read(key, out, [&](const json& v) { return Lookup(v, words); });
  }

  Status Done() const {
    if (!object_) return {};
    for (const auto& [key, value] : object_->items()) {
      if (std::find(claimed_.begin(), claimed_.end(), key) == claimed_.end()) {
        return Error{Code::kCorrupt,
                     fmt::format("{}: unknown key {}.{}", where_, path_, Printable(key))};
      }
    }
    return {};
  }

  bool present() const { return object_ != nullptr; }

 private:
  const json* Claim(const char* key) {
    claimed_.emplace_back(key);
    if (!object_) return nullptr;
    const auto it = object_->find(key);
    return it == object_->end() || it->is_null() ? nullptr : &*it;
  }

  const json* object_;
  std::string path_;
  std::string_view where_;
  std::vector<std::string_view> claimed_;
};

Status ReadResidual(Section s, Variant* v) {
  K3_TRY(s.ReadWord("mode", &v->mode, kModes));
  K3_TRY(s.ReadWord("sites", &v->attention_only, kSites));
  K3_TRY(s.ReadWord("alpha_schedule", &v->fixed_depth, kSchedules));
  K3_TRY(s.Read("alpha_init", &v->alpha_init, AsNumber));
  K3_TRY(s.Read("attn_res_gate", &v->attn_res_gate, AsBool));
  return s.Done();
}

Status ReadRouter(Section s, Variant* v) {
  K3_TRY(s.ReadWord("space", &v->router, kSpaces));
  K3_TRY(s.Read("encoder_dim", &v->encoder_dim, AsPositiveInt<kMaxDim>));
  K3_TRY(s.ReadWord("encoder_act", &v->encoder_act, kEncoderActs));
  return s.Done();
}

Status ReadAttention(Section s, Variant* v) {
  K3_TRY(s.Read("layers", &v->layers, AsKinds));
  K3_TRY(s.Read("pattern", &v->pattern, AsKinds));
  K3_ASSIGN(Section gqa, s.Child("gqa"));
  K3_TRY(s.Done());
  v->has_gqa = gqa.present();
  K3_TRY(gqa.Read("num_kv_heads", &v->n_kv_heads, AsPositiveInt<kMaxHeads>));
  K3_TRY(gqa.Read("head_dim", &v->gqa_head_dim, AsPositiveInt<kMaxHeadDim>));
  K3_TRY(gqa.ReadWord("rope", &v->rope, kRopes));
  K3_TRY(gqa.Read("rope_theta", &v->rope_theta, AsPositive));
  K3_TRY(gqa.Read("output_gate", &v->output_gate, AsBool));
  K3_TRY(gqa.Read("qk_norm", &v->qk_norm, AsBool));
  return gqa.Done();
}

/// Returns the error of the first condition that holds.
class Refusals {
 public:
  explicit Refusals(std::string_view where) : where_(where) {}
  Refusals& If(bool condition, std::string_view words) {
    if (condition && words_.empty()) words_ = words;
    return *this;
  }
  Status status() const {
    if (words_.empty()) return {};
    return Error{Code::kCorrupt, fmt::format("{}: {}", where_, words_)};
  }

 private:
  std::string_view where_;
  std::string words_;
};

Status ApplyResidual(const Variant& v, std::optional<std::int64_t> block_size,
                     std::string_view where, ModelConfig* c) {
  ResidualConfig& r = c->residual;
  r.mode = v.mode.value_or(block_size ? ResidualMode::kBlockAttnRes : ResidualMode::kPlain);
  r.block_size = block_size.value_or(0);
  r.attention_only = v.attention_only.value_or(false);
  r.fixed_depth_alpha = v.fixed_depth.value_or(false);
  r.alpha_init = v.alpha_init.value_or(1.0);
  r.attn_res_gate = v.attn_res_gate.value_or(false);
  const std::string_view mode = Word(r.mode);
  const bool block = r.mode == ResidualMode::kBlockAttnRes;
  const bool alpha = r.mode == ResidualMode::kScaled || r.mode == ResidualMode::kNormScaled;
  const bool whole = c->uses_attn_res() || r.mode == ResidualMode::kPlain;
  return Refusals(where)
      .If(block && !block_size, "attn_res_block_size required by residual mode block_attn_res")
      .If(!block && block_size,
          fmt::format("attn_res_block_size conflicts with residual mode {}", mode))
      .If(r.attention_only && whole,
          fmt::format("residual sites attention conflicts with residual mode {}", mode))
      .If(v.fixed_depth && !alpha, "alpha_schedule needs residual mode scaled or norm_scaled")
      .If(v.alpha_init && (!alpha || r.fixed_depth_alpha),
          "alpha_init needs a learned residual alpha")
      .If(r.attn_res_gate && !block, "attn_res_gate needs residual mode block_attn_res")
      .status();
}

Status ApplyExperts(const Variant& v, std::string_view where, ModelConfig* c) {
  MoeConfig& m = c->moe;
  m.router = v.router.value_or(RouterSpace::kHidden);
  m.encoder_dim = v.encoder_dim.value_or(0);
  m.encoder_act = v.encoder_act.value_or(EncoderAct::kSilu);
  const bool experts = m.n_experts > 0, latent = m.latent > 0;
  const bool in_latent = m.router == RouterSpace::kLatent;
  const bool encoder = m.router == RouterSpace::kEncoder;
  const bool to_latent = v.width_latent.value_or(latent);
  return Refusals(where)
      .If(in_latent && !experts, "router latent needs num_experts")
      .If(encoder && !experts, "router encoder needs num_experts")
      .If(in_latent && !latent, "router latent needs routed_expert_hidden_size")
      .If(encoder && !v.encoder_dim, "router encoder needs encoder_dim")
      .If(!encoder && (v.encoder_dim || v.encoder_act), "encoder settings need router encoder")
      .If(v.width_latent && !experts, "experts width needs num_experts")
      .If(to_latent && !latent, "experts width latent needs routed_expert_hidden_size")
      .If(!to_latent && latent, "experts width hidden conflicts with routed_expert_hidden_size")
      .If(v.width_latent && !to_latent && m.latent_norm,
          "experts width hidden conflicts with latent_moe_use_norm")
      .status();
}

/// The 1-based layers of a list in linear_attn_config, sorted; nullopt when the list is absent.
Result<std::optional<std::vector<std::int64_t>>> LayerList(const std::optional<JsonReader>& linear,
                                                           const char* key, std::int64_t n_layers) {
  if (!linear) return std::optional<std::vector<std::int64_t>>();
  K3_ASSIGN(auto list, linear->OptIntList(key, 1, n_layers));
  if (list) std::sort(list->begin(), list->end());
  return list;
}

/// Layer kinds from the two lists alone: both are needed and must partition the stack.
Status KindsFromLists(const std::optional<JsonReader>& linear, std::string_view where,
                      ModelConfig* c) {
  if (!linear)
    return Error{Code::kCorrupt, fmt::format("{}: key linear_attn_config is missing", where)};
  K3_ASSIGN(const auto kda, LayerList(linear, "kda_layers", c->n_layers));
  if (!kda) return linear->Missing("kda_layers");
  K3_ASSIGN(const auto full, LayerList(linear, "full_attn_layers", c->n_layers));
  if (!full) return linear->Missing("full_attn_layers");
  std::vector<int> named(static_cast<std::size_t>(c->n_layers), 0);
  for (const auto* list : {&*kda, &*full}) {
    for (const auto layer : *list) ++named[static_cast<std::size_t>(layer - 1)];
  }
  const auto odd = std::find_if(named.begin(), named.end(), [](int n) { return n != 1; });
  if (odd != named.end()) {
    return Error{
        Code::kCorrupt,
        fmt::format("{}: kda_layers and full_attn_layers name layer {} {} times, expected once",
                    where, odd - named.begin() + 1, *odd)};
  }
  c->attention.assign(named.size(), AttentionKind::kMla);
  for (const auto layer : *kda)
    c->attention[static_cast<std::size_t>(layer - 1)] = AttentionKind::kKda;
  return {};
}

/// Layer kinds from attention.layers or .pattern; lists in linear_attn_config must agree.
Status KindsFromVariant(const Variant& v, const std::optional<JsonReader>& linear,
                        std::string_view where, ModelConfig* c) {
  const auto n = static_cast<std::size_t>(c->n_layers);
  const auto& words = v.layers ? *v.layers : *v.pattern;
  K3_TRY(Refusals(where)
             .If(v.layers && v.pattern, "attention layers and pattern exclude each other")
             .If(v.layers && words.size() != n,
                 fmt::format("attention layers has {} entries, expected {}", words.size(), n))
             .status());
  std::vector<std::int64_t> kda, full;
  c->attention.clear();
  for (std::size_t i = 0; i < n; ++i) {
    c->attention.push_back(words[i % words.size()]);
    auto& list = c->attention.back() == AttentionKind::kKda ? kda : full;
    list.push_back(static_cast<std::int64_t>(i) + 1);
  }
  for (const auto& [key, want] :
       {std::pair("kda_layers", &kda), std::pair("full_attn_layers", &full)}) {
    const auto got = LayerList(linear, key, c->n_layers);
    if (!got.ok() || (*got && **got != *want)) {
      return Error{Code::kCorrupt,
                   fmt::format("{}: attention conflicts with linear_attn_config.{}", where, key)};
    }
  }
  return {};
}

Status ApplyGqa(const Variant& v, std::string_view where, ModelConfig* c) {
  GqaConfig& g = c->gqa;
  g.n_kv_heads = v.n_kv_heads.value_or(0);
  g.head_dim = v.gqa_head_dim.value_or(0);
  g.rope = v.rope.value_or(false);
  g.rope_theta = v.rope_theta.value_or(10000.0);
  g.output_gate = v.output_gate.value_or(false);
  g.qk_norm = v.qk_norm.value_or(false);
  const bool gqa = c->has(AttentionKind::kGqa);
  const bool sized = g.n_kv_heads > 0 && g.head_dim > 0;
  return Refusals(where)
      .If(v.has_gqa && !gqa, "gqa settings without a gqa layer")
      .If(gqa && !sized, "gqa layer needs num_kv_heads and head_dim")
      .If(gqa && sized && c->n_heads % g.n_kv_heads != 0,
          "num_attention_heads is not a multiple of gqa num_kv_heads")
      .If(g.rope && g.head_dim % 2 != 0, "gqa rope needs an even head_dim")
      .If(v.rope_theta && !g.rope, "rope_theta needs gqa rope neox")
      .status();
}

Status ApplyDecay(const Variant& v, std::string_view where, ModelConfig* c) {
  const bool bounded = v.decay_bounded.value_or(c->kda.lower_bound.has_value());
  const double bound =
      v.lower_bound.value_or(c->kda.lower_bound ? static_cast<double>(*c->kda.lower_bound) : -5.0);
  K3_TRY(Refusals(where)
             .If((v.decay_bounded || v.lower_bound) && !c->has(AttentionKind::kKda),
                 "decay settings without a kda layer")
             .If(!bounded && v.lower_bound, "decay lower_bound conflicts with form softplus")
             .If(bounded && !(static_cast<float>(bound) < 0), "decay lower_bound must be negative")
             .status());
  c->kda.lower_bound = bounded ? std::optional(static_cast<float>(bound)) : std::nullopt;
  return {};
}

}  // namespace

std::string_view Word(ResidualMode mode) {
  for (const auto& [word, value] : kModes) {
    if (value == mode) return word;
  }
  return "?";
}

Result<Variant> ParseVariant(const json& value, std::string_view where) {
  Variant v;
  K3_ASSIGN(Section root, Section::Open(value, "k3_variant", where));
  K3_ASSIGN(const Section residual, root.Child("residual"));
  K3_ASSIGN(const Section router, root.Child("router"));
  K3_ASSIGN(Section experts, root.Child("experts"));
  K3_ASSIGN(Section decay, root.Child("decay"));
  K3_ASSIGN(const Section attention, root.Child("attention"));
  K3_TRY(root.Done());
  K3_TRY(ReadResidual(residual, &v));
  K3_TRY(ReadRouter(router, &v));
  K3_TRY(experts.ReadWord("width", &v.width_latent, kWidths));
  K3_TRY(experts.Done());
  K3_TRY(decay.ReadWord("form", &v.decay_bounded, kForms));
  K3_TRY(decay.Read("lower_bound", &v.lower_bound, AsNumber));
  K3_TRY(decay.Done());
  K3_TRY(ReadAttention(attention, &v));
  return v;
}

Status ApplyVariant(const Variant& v, const std::optional<JsonReader>& linear,
                    std::optional<std::int64_t> block_size, std::string_view where,
                    ModelConfig* c) {
  K3_TRY(ApplyResidual(v, block_size, where, c));
  K3_TRY(ApplyExperts(v, where, c));
  K3_TRY(v.layers || v.pattern ? KindsFromVariant(v, linear, where, c)
                               : KindsFromLists(linear, where, c));
  K3_TRY(ApplyGqa(v, where, c));
  return ApplyDecay(v, where, c);
}

}  // namespace k3::config_internal
