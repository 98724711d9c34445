#include "k3/layers/gqa_layer.h"

#include <vector>

#include "k3/layers/scratch.h"

namespace k3 {
namespace {

/// Every head of x [T, heads * D] as a row of its own.
Mat HeadRows(Mat x, std::int64_t head_dim) { return Mat(x.data, {x.size() / head_dim, head_dim}); }

}  // namespace

void GqaForward(const GqaConfig& c, std::int64_t n_heads, float rms_eps, const GqaWeights& w,
                Exec& exec, CMat x, std::span<const SequenceSlice> sequences, Mat y) {
  Backend& ops = *exec.ops;
  const std::int64_t T = x.dim(0), D = c.head_dim;
  const Mat q = NewMat(exec, T, n_heads * D), k = NewMat(exec, T, c.n_kv_heads * D),
            v = NewMat(exec, T, c.n_kv_heads * D), o = NewMat(exec, T, n_heads * D);
  ops.Gemm({x, w.q, q});
  ops.Gemm({x, w.k, k});
  ops.Gemm({x, w.v, v});
  if (c.qk_norm) {
    ops.RmsNorm({HeadRows(q, D), w.q_norm, rms_eps, HeadRows(q, D)});
    ops.RmsNorm({HeadRows(k, D), w.k_norm, rms_eps, HeadRows(k, D)});
  }
  if (c.rope) {
    std::vector<std::int64_t> positions;
    for (const SequenceSlice& s : sequences) {
      for (std::int64_t t = 0; t < s.count; ++t) positions.push_back(s.position + t);
    }
    ops.Rope({q, D, c.rope_theta, positions});
    ops.Rope({k, D, c.rope_theta, positions});
  }

  StoreInCaches(exec, k, sequences, &LayerCache::rows);
  StoreInCaches(exec, v, sequences, &LayerCache::value_rows);
  std::vector<std::vector<const float*>> tables;
  std::vector<GqaSequence> runs;
  for (const SequenceSlice& s : sequences) {
    if (s.count == 0) continue;
    tables.push_back(s.cache->rows.PageTable());
    const std::span<const float* const> keys = tables.back();
    tables.push_back(s.cache->value_rows.PageTable());
    runs.push_back({s.begin, s.count, keys, tables.back(), s.cache->rows.size()});
  }
  ops.Gqa({q, n_heads, c.n_kv_heads, PagedRows::kPageRows, runs, o});
  if (!w.g.empty()) {
    const Mat gate = NewMat(exec, T, n_heads * D);
    ops.Gemm({x, w.g, gate});
    ops.SigmoidGate({o, gate, o});
  }
  ops.Gemm({o, w.o, y});
}

}  // namespace k3
