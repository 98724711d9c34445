// Dense products and the experts.
#include <numeric>

#include "k3/base/check.h"
#include "k3/kernels/cpu/cpu_internal.h"
#include "k3/quant/decode_row.h"

namespace k3::cpu {
namespace {

/// Weight rows decoded together: few enough to stay in the level-two cache.
std::int64_t TileRows(std::int64_t cols) {
  return std::clamp<std::int64_t>(65536 / std::max<std::int64_t>(1, cols), 4, 64);
}

}  // namespace

const float* CpuBackend::Rows(const WeightRef& w, std::int64_t first, std::int64_t count,
                              Workspace& ws) {
  const WeightRef s = w.RowSlice(first, count);
  const std::int64_t n = count * w.cols;
  if (s.format == WeightFormat::kF32 && reinterpret_cast<std::uintptr_t>(s.data) % 4 == 0) {
    return static_cast<const float*>(s.data);
  }
  float* out = ws.Alloc<float>(n);
  if (s.format == WeightFormat::kBF16) {
    simd_.decode_bf16(s.data, n, out);
  } else if (s.format == WeightFormat::kMxfp4) {
    simd_.decode_mxfp4(static_cast<const std::uint8_t*>(s.data), s.scales, n, out);
  } else if (s.format == WeightFormat::kInt8) {
    simd_.decode_int8(static_cast<const std::uint8_t*>(s.data), s.scales, n, out);
  } else if (s.format == WeightFormat::kFp8) {
    simd_.decode_fp8(static_cast<const std::uint8_t*>(s.data), s.scales, s.scale_row, count, s.cols,
                     out);
  } else {
    for (std::int64_t r = 0; r < count; ++r) DecodeRow(s, r, out + r * w.cols);
  }
  return out;
}

namespace {

/// Formats with kernels of their own: all but f32, read in place, and f16, decoded by DecodeRow.
bool HasKernels(WeightFormat f) { return f != WeightFormat::kF32 && f != WeightFormat::kF16; }

}  // namespace

bool CpuBackend::Fast(const WeightRef& w) const {
  return mode_ != nullptr && *mode_ == MathMode::kFast && simd_.fast != nullptr &&
         HasKernels(w.format) && w.cols % 32 == 0;
}

namespace {

/// Rows of x that stay in the level-two cache while a tile of weights passes them.
constexpr std::int64_t kBlockRows = 64;

/// Exact products of a few weight rows. Up to this many rows of x, weights are decoded in
/// registers.
constexpr std::int64_t kFusedRows = 4;

bool Fused(const WeightRef& w, std::int64_t m) { return m <= kFusedRows && HasKernels(w.format); }

bool FewRows(const FastTable& fast, std::int64_t m, const WeightRef& w) {
  return fast.gemv != nullptr && m <= fast.gemv_rows(FastOf(w).form);
}

void FusedRows(const SimdTable& simd, const float* x, std::int64_t ldx, std::int64_t m,
               const WeightRef& w, float* y, std::int64_t ldy) {
  const auto* codes = static_cast<const std::uint8_t*>(w.data);
  switch (w.format) {
    case WeightFormat::kBF16:
      return simd.dot_block_bf16(x, ldx, m, w.data, w.rows, w.cols, y, ldy);
    case WeightFormat::kMxfp4:
      return simd.dot_block_mxfp4(x, ldx, m, codes, w.scales, w.rows, w.cols, y, ldy);
    case WeightFormat::kInt8:
      return simd.dot_block_int8(x, ldx, m, codes, w.scales, w.rows, w.cols, y, ldy);
    case WeightFormat::kFp8:
      return simd.dot_block_fp8(x, ldx, m, codes, w.scales, w.scale_row, w.rows, w.cols, y, ldy);
    default:
      K3_CHECK(false, "Fused() lets no other format through");
  }
}

}  // namespace

void CpuBackend::Gemm(const GemmArgs& a) {
  const std::int64_t tile = TileRows(a.w.cols), m = a.x.dim(0);
  if (Fast(a.w) && !a.keep_f32) return FastGemm(a);
  const std::int64_t work = std::max<std::int64_t>(1, a.w.cols * (m + 1));
  const std::int64_t grain = std::max(tile, kParallelWork / work);
  pool_.ParallelFor(a.w.rows, grain, [&](std::int64_t b, std::int64_t e) {
    if (Fused(a.w, m)) {
      return FusedRows(simd_, a.x.data, a.x.strides[0], m, a.w.RowSlice(b, e - b), a.y.data + b,
                       a.y.strides[0]);
    }
    for (std::int64_t r = b; r < e; r += tile) {
      Workspace& ws = ThreadScratch();
      const Workspace::Mark mark(ws);
      const std::int64_t count = std::min(tile, e - r);
      const float* w = Rows(a.w, r, count, ws);
      for (std::int64_t i = 0; i < m; i += kBlockRows) {
        simd_.dot_block(a.x.row(i), a.x.strides[0], std::min(kBlockRows, m - i), w, a.w.cols, count,
                        a.w.cols, a.y.row(i) + r, a.y.strides[0]);
      }
    }
  });
}

void CpuBackend::FastGemm(const GemmArgs& a) {
  const FastTable& fast = *simd_.fast;
  const std::int64_t m = a.x.dim(0), cols = a.w.cols;
  constexpr std::int64_t kRows = 32;
  const std::int64_t grain =
      std::max(kRows, (1 << 17) / std::max<std::int64_t>(1, cols * (m + 4)) / kRows * kRows);
  const Workspace::Mark op_mark(ws_);
  if (FewRows(fast, m, a.w)) {
    auto* x = ws_.Alloc<std::byte>(fast.gemv_bytes(m, cols));
    fast.gemv_pack(a.x.data, a.x.strides[0], m, cols, FastOf(a.w).form, x);
    return pool_.ParallelFor(a.w.rows, grain, [&](std::int64_t b, std::int64_t e) {
      fast.gemv(x, m, FastOf(a.w.RowSlice(b, e - b)), e - b, cols, a.y.data + b, a.y.strides[0]);
    });
  }
  auto* packed = ws_.Alloc<std::byte>(fast.packed_bytes(m, cols));
  constexpr std::int64_t kPackRows = 64;  // whole tiles of every table
  pool_.ParallelFor(m, kPackRows, [&](std::int64_t b, std::int64_t e) {
    for (std::int64_t i = b; i < e; i += kPackRows) {
      fast.pack(a.x.row(i), a.x.strides[0], std::min(kPackRows, e - i), cols, FastOf(a.w).form,
                packed + fast.packed_bytes(i, cols));
    }
  });
  pool_.ParallelFor(a.w.rows, grain, [&](std::int64_t b, std::int64_t e) {
    Workspace& ws = ThreadScratch();
    const Workspace::Mark mark(ws);
    auto* scratch = ws.Alloc<std::byte>(fast.scratch_bytes(m, cols));
    fast.gemm(packed, m, FastOf(a.w.RowSlice(b, e - b)), e - b, cols, a.y.data + b, a.y.strides[0],
              scratch);
  });
}

const std::byte* CpuBackend::PackRows(const float* x, std::int64_t ldx, std::int64_t m,
                                      const WeightRef& w, Workspace& ws) {
  const FastTable& fast = *simd_.fast;
  if (FewRows(fast, m, w)) {
    auto* packed = ws.Alloc<std::byte>(fast.gemv_bytes(m, w.cols));
    fast.gemv_pack(x, ldx, m, w.cols, FastOf(w).form, packed);
    return packed;
  }
  auto* packed = ws.Alloc<std::byte>(fast.packed_bytes(m, w.cols));
  fast.pack(x, ldx, m, w.cols, FastOf(w).form, packed);
  return packed;
}

void CpuBackend::MultiplyPacked(const std::byte* packed, std::int64_t m, const WeightRef& w,
                                float* y, std::int64_t ldy, Workspace& ws) {
  const FastTable& fast = *simd_.fast;
  if (FewRows(fast, m, w)) return fast.gemv(packed, m, FastOf(w), w.rows, w.cols, y, ldy);
  const Workspace::Mark mark(ws);
  fast.gemm(packed, m, FastOf(w), w.rows, w.cols, y, ldy,
            ws.Alloc<std::byte>(fast.scratch_bytes(m, w.cols)));
}

void CpuBackend::Multiply(const float* x, std::int64_t ldx, std::int64_t m, const WeightRef& w,
                          float* y, std::int64_t ldy, Workspace& ws) {
  const Workspace::Mark mark(ws);
  if (Fast(w)) return MultiplyPacked(PackRows(x, ldx, m, w, ws), m, w, y, ldy, ws);
  if (Fused(w, m)) return FusedRows(simd_, x, ldx, m, w, y, ldy);
  const std::int64_t tile = TileRows(w.cols);
  for (std::int64_t r = 0; r < w.rows; r += tile) {
    const Workspace::Mark tile_mark(ws);
    const std::int64_t count = std::min(tile, w.rows - r);
    simd_.dot_block(x, ldx, m, Rows(w, r, count, ws), w.cols, count, w.cols, y + r, ldy);
  }
}

void CpuBackend::Embed(const EmbedArgs& a) {
  for (std::size_t t = 0; t < a.ids.size(); ++t) {
    DecodeRow(a.table, a.ids[t], a.y.row(static_cast<std::int64_t>(t)));
  }
}

void CpuBackend::Route(const RouteArgs& a) {
  const auto E = a.logits.dim(1);
  ForRows(a.logits.dim(0), 20 * E, [&](std::int64_t t) {
    Workspace& ws = ThreadScratch();
    const Workspace::Mark mark(ws);
    double *score = ws.Alloc<double>(E), *key = ws.Alloc<double>(E);
    auto* order = ws.Alloc<std::int32_t>(E);
    const float* logits = a.logits.row(t);
    if (a.softmax) {
      const double top = *std::max_element(logits, logits + E);
      double sum = 0;
      for (std::int64_t e = 0; e < E; ++e) sum += score[e] = std::exp(logits[e] - top);
      for (std::int64_t e = 0; e < E; ++e) score[e] /= sum;
    } else {
      for (std::int64_t e = 0; e < E; ++e) score[e] = cpu::Sigmoid(logits[e]);
    }
    for (std::int64_t e = 0; e < E; ++e) key[e] = score[e] + a.bias.data[e];
    if (a.n_group > a.topk_group) {  // bar the experts outside the best groups
      const std::int64_t size = E / a.n_group;
      double* group = ws.Alloc<double>(a.n_group);
      for (std::int64_t g = 0; g < a.n_group; ++g) {
        double best = -HUGE_VAL, second = size > 1 ? -HUGE_VAL : 0.0;
        for (std::int64_t e = g * size; e < (g + 1) * size; ++e) {
          if (key[e] > best) {
            second = size > 1 ? best : 0.0;
            best = key[e];
          } else if (key[e] > second) {
            second = key[e];
          }
        }
        group[g] = best + second;
      }
      for (std::int64_t g = 0; g < a.n_group; ++g) {
        std::int64_t better = 0;
        for (std::int64_t o = 0; o < a.n_group; ++o) {
          better += group[o] > group[g] || (group[o] == group[g] && o < g);
        }
        if (better >= a.topk_group) std::fill(key + g * size, key + (g + 1) * size, -HUGE_VAL);
      }
    }
    for (std::int64_t e = 0; e < E; ++e) {
      if (std::isnan(key[e])) key[e] = -HUGE_VAL;
    }
    std::iota(order, order + E, 0);
    std::partial_sort(order, order + a.k, order + E, [&](std::int32_t x, std::int32_t y) {
      return key[x] > key[y] || (key[x] == key[y] && x < y);
    });
    double sum = 1e-20;
    for (std::int64_t j = 0; j < a.k; ++j) sum += score[order[j]];
    for (std::int64_t j = 0; j < a.k; ++j) {
      const double w = a.renormalize && a.k > 1 ? score[order[j]] / sum : score[order[j]];
      a.experts(t, j) = order[j];
      a.weights(t, j) = static_cast<float>(w * a.scale);
    }
  });
}

void CpuBackend::ExpertMlp(const ExpertMlpArgs& a) {
  const std::int64_t T = a.x.dim(0), D = a.x.dim(1), k = a.experts.dim(1);
  const auto E = static_cast<std::int64_t>(a.table.size());
  const Workspace::Mark op_mark(ws_);
  // Counting sort of the T * k (token, expert) pairs by expert: pair p of token t = p / k goes to
  // slot[p]; the pairs of expert e are pair[start[e] .. start[e + 1]).
  auto* start = ws_.Alloc<std::int64_t>(E + 1);
  auto *slot = ws_.Alloc<std::int64_t>(T * k), *pair = ws_.Alloc<std::int64_t>(T * k);
  std::fill(start, start + E + 1, 0);
  for (std::int64_t p = 0; p < T * k; ++p) ++start[a.experts(p / k, p % k) + 1];
  std::partial_sum(start, start + E + 1, start);
  auto* next = ws_.Alloc<std::int64_t>(E + 1);
  std::copy(start, start + E + 1, next);
  for (std::int64_t p = 0; p < T * k; ++p) {
    slot[p] = next[a.experts(p / k, p % k)]++;
    pair[slot[p]] = p;
  }
  auto* active = ws_.Alloc<std::int64_t>(E);
  std::int64_t n_active = 0;
  for (std::int64_t e = 0; e < E; ++e) {
    if (start[e + 1] > start[e]) active[n_active++] = e;
  }
  float* out = ws_.Alloc<float>(T * k * D);  // one row a slot

  pool_.ParallelFor(n_active, 1, [&](std::int64_t b, std::int64_t end) {
    for (std::int64_t i = b; i < end; ++i) {
      const std::int64_t e = active[i], m = start[e + 1] - start[e];
      const ExpertWeights& w = a.table[static_cast<std::size_t>(e)];
      const std::int64_t I = w.w1.rows;
      Workspace& ws = ThreadScratch();
      const Workspace::Mark mark(ws);
      float *x = ws.Alloc<float>(m * D), *gate = ws.Alloc<float>(m * I),
            *up = ws.Alloc<float>(m * I);
      for (std::int64_t r = 0; r < m; ++r) {
        std::copy_n(a.x.row(pair[start[e] + r] / k), D, x + r * D);
      }
      if (Fast(w.w1) && w.w3.format == w.w1.format) {
        const std::byte* packed = PackRows(x, D, m, w.w1, ws);
        MultiplyPacked(packed, m, w.w1, gate, I, ws);
        MultiplyPacked(packed, m, w.w3, up, I, ws);
      } else {
        Multiply(x, D, m, w.w1, gate, I, ws);
        Multiply(x, D, m, w.w3, up, I, ws);
      }
      simd_.gated_act(gate, up, m * I, ActOf(a.act), gate);
      Multiply(gate, I, m, w.w2, out + start[e] * D, D, ws);
    }
  });
  ForRows(T, k * D, [&](std::int64_t t) {  // in order of j: the same for every batch
    float* y = a.y.row(t);
    std::fill(y, y + D, 0.f);
    for (std::int64_t j = 0; j < k; ++j)
      simd_.axpy(a.weights(t, j), out + slot[t * k + j] * D, y, D);
  });
}

}  // namespace k3::cpu
