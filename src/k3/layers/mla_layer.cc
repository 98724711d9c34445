#include "k3/layers/mla_layer.h"

#include <cmath>
#include <vector>

#include "k3/layers/scratch.h"

namespace k3 {
namespace {

Mat Queries(const MlaConfig& c, std::int64_t n_heads, const MlaWeights& w, Exec& exec, CMat x) {
  const Mat q = NewMat(exec, x.dim(0), n_heads * c.q_dim());
  if (w.q_a.empty()) {
    exec.ops->Gemm({x, w.q, q});
    return q;
  }
  const Mat low = NewMat(exec, x.dim(0), c.q_lora_rank);
  exec.ops->Gemm({x, w.q_a, low});
  exec.ops->RmsNorm({low, w.q_a_norm, c.norm_eps, low});
  exec.ops->Gemm({low, w.q_b, q});
  return q;
}

/// Appends [c | k_r] of every token to the caches; c is normed, k_r is raw.
void AppendRows(const MlaConfig& c, const MlaWeights& w, Exec& exec, CMat x,
                std::span<const SequenceSlice> sequences) {
  const Mat rows = NewMat(exec, x.dim(0), c.row_dim());
  exec.ops->Gemm({x, w.kv_a, rows});
  const Mat latent(rows.data, {x.dim(0), c.kv_lora_rank}, rows.strides);
  exec.ops->RmsNorm({latent, w.kv_a_norm, c.norm_eps, latent});
  StoreInCaches(exec, rows, sequences, &LayerCache::rows);
}

}  // namespace

void MlaForward(const MlaConfig& c, std::int64_t n_heads, const MlaWeights& w, Exec& exec, CMat x,
                std::span<const SequenceSlice> sequences, Mat y) {
  Backend& ops = *exec.ops;
  AppendRows(c, w, exec, x, sequences);

  MlaArgs args;
  args.q = Queries(c, n_heads, w, exec, x);
  args.kv_b = w.kv_b;
  args.n_heads = n_heads;
  args.nope_dim = c.qk_nope_dim;
  args.rope_dim = c.qk_rope_dim;
  args.v_dim = c.v_dim;
  args.page_rows = PagedRows::kPageRows;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.q_dim())));
  const Mat o = NewMat(exec, x.dim(0), n_heads * c.v_dim);
  args.o = o;

  std::vector<std::vector<const float*>> tables;
  std::vector<MlaSequence> absorbed, plain;
  for (const SequenceSlice& s : sequences) {
    tables.push_back(s.cache->rows.PageTable());
    const std::int64_t before = s.cache->rows.size() - s.count;
    const GridSplit cut = exec.math == MathMode::kFast ? SplitOnGrid(s.position, s.count, kFastGrid)
                                                       : GridSplit{s.count, 0, 0};
    auto add = [&](std::vector<MlaSequence>& to, std::int64_t offset, std::int64_t count) {
      if (count > 0)
        to.push_back({s.begin + offset, count, tables.back(), before + offset + count});
    };
    add(absorbed, 0, cut.head);
    add(plain, cut.head, cut.middle);
    add(absorbed, cut.head + cut.middle, cut.tail);
  }
  args.sequences = absorbed;
  args.form = MlaForm::kAbsorbed;
  ops.Mla(args);
  args.sequences = plain;
  args.form = MlaForm::kPlain;
  ops.Mla(args);

  if (!w.g.empty()) {
    const Mat gate = NewMat(exec, x.dim(0), n_heads * c.v_dim);
    ops.Gemm({x, w.g, gate});
    ops.SigmoidGate({o, gate, o});
  }
  ops.Gemm({o, w.o, y});
}

}  // namespace k3
