// One head of the KDA backward (spec section 6.2), for the double path and for every instruction
// set. Included by *.simd.cc files: no standard library but <cstdint>, internal linkage only.
#pragma once

#include <cstdint>

namespace k3::grad {

/// Rows are ld apart; q unscaled. S0 is the state before the first token; dS holds the gradient of
/// the final state and is left with that of S0. scratch: KdaHeadScratch(...) elements.
/// dq, dk, dv, dg, dbeta are added to.
template <class S>
struct KdaHead {
  std::int64_t T, K, V, border;  // states are kept every `border` tokens
  const S *q, *k, *v, *alpha, *beta, *dout;
  std::int64_t ld_q, ld_k, ld_v, ld_alpha, ld_beta, ld_o;
  S *dq, *dk, *dv, *dg, *dbeta;
  std::int64_t ld_dq, ld_dk, ld_dv, ld_dg, ld_dbeta;
  S scale;
  const S* S0;
  S* dS;
  S* scratch;
};

constexpr std::int64_t KdaHeadScratch(std::int64_t T, std::int64_t K, std::int64_t V,
                                      std::int64_t border) {
  const std::int64_t chunks = (T + border - 1) / border;
  return (chunks + border + 1) * K * V + 2 * border * V + 2 * V;
}

/// next = state after token t; e = v - S'^T k, u = beta e.
template <class S, class Math>
static void KdaForwardStep(const KdaHead<S>& h, std::int64_t t, const S* state, S* next, S* e,
                           S* u) {
  const S *k = h.k + t * h.ld_k, *v = h.v + t * h.ld_v, *alpha = h.alpha + t * h.ld_alpha;
  for (std::int64_t j = 0; j < h.V; ++j) e[j] = v[j];
  for (std::int64_t d = 0; d < h.K; ++d) {
    const S* s = state + d * h.V;
    S* n = next + d * h.V;
    const S a = alpha[d], key = k[d];
    for (std::int64_t j = 0; j < h.V; ++j) {
      n[j] = a * s[j];
      e[j] -= n[j] * key;
    }
  }
  const S beta = h.beta[t * h.ld_beta];
  for (std::int64_t j = 0; j < h.V; ++j) u[j] = beta * e[j];
  for (std::int64_t d = 0; d < h.K; ++d) Math::Axpy(k[d], u, next + d * h.V, h.V);
}

/// Turns dS from the gradient of `next` into that of `state`. du, de: V elements of scratch.
template <class S, class Math>
static void KdaBackwardStep(const KdaHead<S>& h, std::int64_t t, const S* state, const S* next,
                            const S* e, const S* u, S* du, S* de) {
  const S *q = h.q + t * h.ld_q, *k = h.k + t * h.ld_k, *alpha = h.alpha + t * h.ld_alpha;
  const S* dout = h.dout + t * h.ld_o;
  S *dq = h.dq + t * h.ld_dq, *dk = h.dk + t * h.ld_dk, *dg = h.dg + t * h.ld_dg;
  for (std::int64_t j = 0; j < h.V; ++j) du[j] = 0;
  for (std::int64_t d = 0; d < h.K; ++d) {
    S* ds = h.dS + d * h.V;
    dq[d] += h.scale * Math::Dot(next + d * h.V, dout, h.V);
    const S query = q[d] * h.scale, key = k[d];
    for (std::int64_t j = 0; j < h.V; ++j) {
      ds[j] += query * dout[j];
      du[j] += key * ds[j];
    }
    dk[d] += Math::Dot(ds, u, h.V);
  }
  const S beta = h.beta[t * h.ld_beta];
  h.dbeta[t * h.ld_dbeta] += Math::Dot(e, du, h.V);
  S* dv = h.dv + t * h.ld_dv;
  for (std::int64_t j = 0; j < h.V; ++j) {
    de[j] = beta * du[j];
    dv[j] += de[j];
  }
  for (std::int64_t d = 0; d < h.K; ++d) {
    const S* s = state + d * h.V;
    S* ds = h.dS + d * h.V;
    const S a = alpha[d], key = k[d];
    dk[d] -= a * Math::Dot(s, de, h.V);
    for (std::int64_t j = 0; j < h.V; ++j) ds[j] -= key * de[j];
    dg[d] += a * Math::Dot(ds, s, h.V);
    for (std::int64_t j = 0; j < h.V; ++j) ds[j] *= a;
  }
}

template <class S, class Math>
static void KdaHeadBackward(const KdaHead<S>& h) {
  const std::int64_t size = h.K * h.V, C = h.border, chunks = (h.T + C - 1) / C;
  S *borders = h.scratch, *inner = borders + chunks * size, *e = inner + (C + 1) * size,
    *u = e + C * h.V, *du = u + C * h.V, *de = du + h.V;
  for (std::int64_t i = 0; i < size; ++i) borders[i] = h.S0[i];
  for (std::int64_t t = 0; t < (chunks - 1) * C; ++t) {
    const S* from = t % C == 0 ? borders + t / C * size : inner + (t % C) * size;
    S* to = (t + 1) % C == 0 ? borders + (t + 1) / C * size : inner + (t % C + 1) * size;
    KdaForwardStep<S, Math>(h, t, from, to, e, u);
  }
  for (std::int64_t c = chunks; c-- > 0;) {
    const std::int64_t t0 = c * C, n = h.T - t0 < C ? h.T - t0 : C;
    for (std::int64_t i = 0; i < size; ++i) inner[i] = borders[c * size + i];
    for (std::int64_t i = 0; i < n; ++i) {
      KdaForwardStep<S, Math>(h, t0 + i, inner + i * size, inner + (i + 1) * size, e + i * h.V,
                              u + i * h.V);
    }
    for (std::int64_t i = n; i-- > 0;) {
      KdaBackwardStep<S, Math>(h, t0 + i, inner + i * size, inner + (i + 1) * size, e + i * h.V,
                               u + i * h.V, du, de);
    }
  }
}

}  // namespace k3::grad
