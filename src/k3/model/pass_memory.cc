#include "k3/model/pass_memory.h"

#include <algorithm>
#include <initializer_list>

#include "k3/layers/cache.h"

namespace k3 {
namespace {

constexpr std::int64_t kAlign = 64;  // of every allocation, as Workspace rounds

std::int64_t Rounded(std::int64_t bytes) {
  return (std::max<std::int64_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
}

/// Matrices of T rows and the given widths, alive together. Width 0: not there.
std::int64_t Mats(std::int64_t T, std::initializer_list<std::int64_t> widths) {
  std::int64_t sum = 0;
  for (const std::int64_t w : widths) {
    if (w > 0) sum += Rounded(4 * T * w);
  }
  return sum;
}

std::int64_t KdaBytes(const KdaConfig& c, std::int64_t T) {
  const std::int64_t P = c.width();
  const std::int64_t low_gate = c.full_rank_gate ? 0 : c.head_dim;
  // Each of q, k, v before and after its convolution; decay, beta, output, gate.
  return Mats(T, {P, P, P, P, P, P, c.head_dim, P, c.n_heads, P, P, low_gate});
}

std::int64_t MlaBytes(const MlaConfig& c, std::int64_t heads, std::int64_t T) {
  const std::int64_t o = heads * c.v_dim;
  return Mats(T, {c.row_dim(), heads * c.q_dim(), c.q_lora_rank, o, c.output_gate ? o : 0});
}

std::int64_t GqaBytes(const GqaConfig& c, std::int64_t heads, std::int64_t T) {
  const std::int64_t q = heads * c.head_dim, kv = c.n_kv_heads * c.head_dim;
  return Mats(T, {q, kv, kv, q, c.output_gate ? q : 0});
}

std::int64_t MoeBytes(const ModelConfig& c, std::int64_t T) {
  const MoeConfig& m = c.moe;
  const std::int64_t code = m.router == RouterSpace::kEncoder ? m.encoder_dim : 0;
  const std::int64_t inner = m.intermediate * m.n_shared;
  return Mats(T, {m.latent, code, m.n_experts, m.top_k, m.top_k, m.latent,
                  m.n_shared > 0 ? c.hidden : 0, inner, inner});
}

std::int64_t AttentionBytes(const ModelConfig& c, std::int64_t layer, std::int64_t T) {
  switch (c.attention[static_cast<std::size_t>(layer)]) {
    case AttentionKind::kKda:
      return KdaBytes(c.kda, T);
    case AttentionKind::kMla:
      return MlaBytes(c.mla, c.n_heads, T);
    case AttentionKind::kGqa:
      return GqaBytes(c.gqa, c.n_heads, T);
  }
  return 0;
}

/// What joining the stream takes for a moment.
std::int64_t WriteBytes(const ModelConfig& c, std::int64_t T) {
  const ResidualMode mode = c.residual.mode;
  const std::int64_t gate = mode == ResidualMode::kGated          ? 1
                            : mode == ResidualMode::kGatedChannel ? c.hidden
                                                                  : 0;
  return Mats(T, {mode == ResidualMode::kNormScaled ? c.hidden : 0, gate});
}

/// Rows of the stream that a read of this site adds for good, each with the square of the one
/// before it: banked rows stay until the end.
std::int64_t RowsKept(const ModelConfig& c, std::int64_t layer, bool attention) {
  if (c.residual.mode == ResidualMode::kFullAttnRes) return 1;
  if (c.residual.mode != ResidualMode::kBlockAttnRes || !attention) return 0;
  return layer % c.residual.block_size == 0 ? 1 : 0;
}

}  // namespace

std::int64_t PassBytes(const ModelConfig& c, std::int64_t T, std::int64_t logit_rows) {
  if (T <= 0) return 0;
  const std::int64_t row = Mats(T, {c.hidden});
  const std::int64_t banked = row + Mats(T, {1});
  std::int64_t kept = 3 * row;  // embedding, normed input, sublayer output
  std::int64_t peak = kept;
  for (std::int64_t i = 0; i < c.n_layers; ++i) {
    kept += banked * RowsKept(c, i, true);
    peak = std::max(peak, kept + std::max(AttentionBytes(c, i, T), WriteBytes(c, T)));
    if (c.uses_attn_res() && i == 0) kept += row;  // the mix; the first read has nothing to mix
    kept += banked * RowsKept(c, i, false);
    const std::int64_t ffn =
        c.is_moe(i) ? MoeBytes(c, T) : Mats(T, {c.intermediate, c.intermediate});
    peak = std::max(peak, kept + std::max(ffn, WriteBytes(c, T)));
  }
  return std::max(peak, kept + Mats(logit_rows, {logit_rows > 0 ? c.hidden : 0}));
}

namespace {

constexpr std::int64_t kPage = 64;  // cached rows handled together

/// What a thread needs for latent attention, in bytes.
std::int64_t MlaScratch(const ModelConfig& c, std::int64_t queries, MathMode math) {
  const MlaConfig& m = c.mla;
  const std::int64_t R = m.kv_lora_rank, dn = m.qk_nope_dim, dv = m.v_dim;
  // Absorbed: one head's decoded weights, and up to 16 rows of queries and heads.
  const std::int64_t absorbed = (dn + dv) * R + 16 * (m.row_dim() + 2 * R + kPage + 4);
  if (math != MathMode::kFast || queries < kFastGrid) return 4 * absorbed;
  // Plain: scores of a page, context and a page's sum of every query, one page of keys and values,
  // and in bf16 the operands of their products.
  const std::int64_t plain = queries * (2 * kPage + 3 * dv + 4) + kPage * (dn + dv) + dv * R;
  const std::int64_t rounded =
      queries * (m.q_dim() + kPage) + 2 * kPage * R + kPage * (m.q_dim() + dv) + dv * R;
  return std::max(4 * absorbed, 4 * plain + 2 * rounded);
}

}  // namespace

OpScratch OpScratchBytes(const ModelConfig& c, std::int64_t T, std::int64_t per_sequence,
                         std::int64_t, MathMode math) {
  OpScratch s;
  // Products decode weight rows in tiles of at most 64 K values, or four rows of wide matrices.
  const std::int64_t widest = std::max(
      {c.hidden, c.intermediate, c.kda.width(), c.n_heads * c.mla.v_dim, c.n_heads * c.gqa.head_dim,
       c.moe.intermediate * std::max<std::int64_t>(1, c.moe.n_shared)});
  const std::int64_t tile = 4 * std::max<std::int64_t>(65536, 4 * widest);
  s.per_thread = tile;
  // Fast mode packs the rows of x as bf16, in blocks of 16.
  const std::int64_t rows = (T + 15) / 16 * 16;
  if (math == MathMode::kFast) s.shared = 2 * rows * widest;
  if (c.has(AttentionKind::kKda)) {
    s.per_thread = std::max(s.per_thread, 8 * kPage * c.kda.head_dim);
  }
  if (c.has(AttentionKind::kMla)) {
    s.per_thread = std::max(s.per_thread, MlaScratch(c, per_sequence, math));
  }
  if (c.has(AttentionKind::kGqa)) {
    s.per_thread = std::max(s.per_thread, 4 * (2 * kPage + 2 * c.gqa.head_dim));
  }
  if (c.moe.n_experts > 0) {
    const MoeConfig& m = c.moe;
    s.shared = std::max(s.shared,
                        4 * T * m.top_k * c.expert_width() + 16 * T * m.top_k + 24 * m.n_experts);
    // One expert's tokens: all of them at worst, twice its share as a rule.
    const std::int64_t share = std::min(T, 2 * (T * m.top_k / m.n_experts + 1));
    const std::int64_t packed =
        math == MathMode::kFast ? 2 * (share + 15) * std::max(c.expert_width(), m.intermediate) : 0;
    const std::int64_t expert = 4 * share * (c.expert_width() + 2 * m.intermediate) + packed + tile;
    s.per_thread = std::max({s.per_thread, expert, 24 * m.n_experts});
  }
  return s;
}

}  // namespace k3
