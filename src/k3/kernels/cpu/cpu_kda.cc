// Kimi Delta Attention: gate, token recurrence, chunkwise form.
#include "k3/kernels/cpu/cpu_internal.h"

namespace k3::cpu {

void CpuBackend::KdaGate(const KdaGateArgs& a) {
  const auto N = a.a_log.dim(0), K = a.f.dim(1) / N;
  const Workspace::Mark op_mark(ws_);
  float* rate = ws_.Alloc<float>(N);
  for (std::int64_t n = 0; n < N; ++n) {
    rate[n] = static_cast<float>(std::exp(static_cast<double>(a.a_log.data[n])));
  }
  ForRows(a.f.dim(0), 6 * N * K, [&](std::int64_t t) {
    for (std::int64_t n = 0; n < N; ++n) {
      simd_.kda_gate(a.f.row(t) + n * K, a.dt_bias.data + n * K, rate[n], a.lower_bound.has_value(),
                     a.lower_bound.value_or(0.f), K, a.g.row(t) + n * K);
    }
  });
}

namespace {

/// Head n of tokens [begin, begin + count), with what both forms read. q is copied and scaled.
KdaHead HeadOf(const KdaArgs& a, const SimdTable& simd, std::int64_t begin, std::int64_t count,
               std::int64_t n, float* state, float* q) {
  const std::int64_t K = a.key_dim(), V = a.value_dim();
  for (std::int64_t t = 0; t < count; ++t) {
    simd.scale(a.q.row(begin + t) + n * K, a.scale, K, q + t * K);
  }
  KdaHead h{};
  h.T = count, h.K = K, h.V = V;
  h.q = q, h.ld_q = K;
  h.k = a.k.row(begin) + n * K, h.ld_k = a.k.strides[0];
  h.v = a.v.row(begin) + n * V, h.ld_v = a.v.strides[0];
  h.g = a.g.row(begin) + n * K, h.ld_g = a.g.strides[0];
  h.beta = a.beta.row(begin) + n, h.ld_beta = a.beta.strides[0];
  h.o = a.o.row(begin) + n * V, h.ld_o = a.o.strides[0];
  h.S = state + n * K * V;
  return h;
}

}  // namespace

void CpuBackend::KdaRecurrent(const KdaArgs& a) {
  const std::int64_t N = a.n_heads, K = a.key_dim();
  const auto S = static_cast<std::int64_t>(a.sequences.size());
  constexpr std::int64_t kRun = 64;  // tokens with prepared decays at a time
  pool_.ParallelFor(S * N, 1, [&](std::int64_t b, std::int64_t e) {
    for (std::int64_t i = b; i < e; ++i) {
      const std::int64_t n = i % N;
      const auto [begin, count] = a.sequences[static_cast<std::size_t>(i / N)];
      Workspace& ws = ThreadScratch();
      const Workspace::Mark mark(ws);
      float *alpha = ws.Alloc<float>(kRun * K), *q = ws.Alloc<float>(kRun * K);
      for (std::int64_t t = 0; t < count; t += kRun) {
        const std::int64_t run = std::min(kRun, count - t);
        KdaHead h =
            HeadOf(a, simd_, begin + t, run, n, a.states[static_cast<std::size_t>(i / N)], q);
        for (std::int64_t r = 0; r < run; ++r) simd_.exp(h.g + r * h.ld_g, K, alpha + r * K);
        h.alpha = alpha, h.ld_alpha = K;
        simd_.kda_recurrent(h);
      }
    }
  });
}

void CpuBackend::KdaChunk(const KdaArgs& a) {
  const auto S = static_cast<std::int64_t>(a.sequences.size());
  const std::int64_t N = a.n_heads, K = a.key_dim();
  if (K > kMaxKdaKey) return KdaRecurrent(a);
  const std::int64_t chunk = std::min(a.chunk, kMaxKdaChunk);  // longer ones in parts
  // Factors are taken relative to the middle of a chunk.
  const bool bounded =
      a.lower_bound && -*a.lower_bound * static_cast<float>((chunk + 1) / 2) <= 40.f;
  constexpr std::int64_t kTiles = 64;  // tokens of one call with tiles
  const bool tiles = mode_ != nullptr && *mode_ == MathMode::kFast && simd_.fast != nullptr &&
                     simd_.fast->kda_chunks != nullptr && bounded && chunk == kMaxKdaChunk &&
                     K % 32 == 0 && a.value_dim() % 32 == 0;
  pool_.ParallelFor(S * N, 1, [&](std::int64_t b, std::int64_t e) {
    for (std::int64_t i = b; i < e; ++i) {
      const auto [begin, count] = a.sequences[static_cast<std::size_t>(i / N)];
      float* state = a.states[static_cast<std::size_t>(i / N)];
      Workspace& ws = ThreadScratch();
      const Workspace::Mark mark(ws);
      float* q = ws.Alloc<float>(kTiles * K);
      std::int64_t t = 0;
      while (tiles && count - t >= chunk) {
        const std::int64_t run = std::min(kTiles, (count - t) / chunk * chunk);
        simd_.fast->kda_chunks(HeadOf(a, simd_, begin + t, run, i % N, state, q));
        t += run;
      }
      for (; t < count; t += chunk) {
        const std::int64_t run = std::min(chunk, count - t);
        simd_.kda_chunk(HeadOf(a, simd_, begin + t, run, i % N, state, q), bounded);
      }
    }
  });
}

}  // namespace k3::cpu
