// Reference of the KDA ops: spec section 6, transcribed.
#include <algorithm>
#include <cmath>

#include "k3/base/array.h"
#include "k3/kernels/backend.h"
#include "k3/kernels/ref/ref_math.h"

namespace k3 {
namespace {

/// Inputs of one head of one sequence, in float64, and its state.
struct Head {
  std::int64_t T, K, V;
  Array<double> q, k, v, g, beta;  // q already scaled
  Array<double> S;                 // [K, V]

  Head(const KdaArgs& a, std::size_t seq, std::int64_t n)
      : T(a.sequences[seq].count),
        K(a.key_dim()),
        V(a.value_dim()),
        q(T * K),
        k(T * K),
        v(T * V),
        g(T * K),
        beta(T),
        S(K * V) {
    const std::int64_t begin = a.sequences[seq].begin;
    for (std::int64_t i = 0; i < T * K; ++i) {
      const std::int64_t t = begin + i / K, c = n * K + i % K;
      q[i] = static_cast<double>(a.scale) * a.q(t, c);
      k[i] = a.k(t, c);
      g[i] = a.g(t, c);
    }
    for (std::int64_t i = 0; i < T * V; ++i) v[i] = a.v(begin + i / V, n * V + i % V);
    for (std::int64_t t = 0; t < T; ++t) beta[t] = a.beta(begin + t, n);
    std::copy_n(a.states[seq] + n * K * V, K * V, S.data());
  }
};

using Matrix = Array<double>;  // row-major

/// C += A B with A [m, k], B [k, n]; A or B transposed when stored the other way round.
void MulAdd(std::int64_t m, std::int64_t k, std::int64_t n, const double* A, bool a_transposed,
            const double* B, double sign, double* C) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t p = 0; p < k; ++p) {
      const double x = sign * (a_transposed ? A[p * m + i] : A[i * k + p]);
      for (std::int64_t j = 0; j < n; ++j) C[i * n + j] += x * B[p * n + j];
    }
  }
}

/// One chunk of C tokens from t0 (spec 6.1, pairwise decays so that any g <= 0 is safe).
void Chunk(Head& h, std::int64_t t0, std::int64_t C, double* out) {
  const auto K = h.K, V = h.V;
  const double *q = &h.q[t0 * K], *k = &h.k[t0 * K], *beta = &h.beta[t0];
  Matrix G(C * K), A(C * C), B(C * C), Kd(C * K), Qd(C * K), Kr(C * K), U(C * V);
  for (std::int64_t i = 0; i < C * K; ++i) G[i] = h.g[t0 * K + i] + (i >= K ? G[i - K] : 0.0);
  auto g = [&](std::int64_t i, std::int64_t d) { return G[i * K + d]; };
  for (std::int64_t i = 0; i < C; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) {
      double kk = 0, qk = 0;
      for (std::int64_t d = 0; d < K; ++d) {
        const double decayed = k[j * K + d] * std::exp(g(i, d) - g(j, d));
        kk += k[i * K + d] * decayed;
        qk += q[i * K + d] * decayed;
      }
      if (i != j) A[i * C + j] = beta[i] * kk;
      B[i * C + j] = qk;
    }
    for (std::int64_t d = 0; d < K; ++d) {
      const auto at = i * K + d;
      Kd[at] = k[i * K + d] * std::exp(g(i, d));
      Qd[at] = q[i * K + d] * std::exp(g(i, d));
      Kr[at] = k[i * K + d] * std::exp(g(C - 1, d) - g(i, d));
    }
  }
  // U solves (I + A) U = diag(beta) (V - Kd S).
  std::copy_n(&h.v[t0 * V], C * V, U.data());
  MulAdd(C, K, V, Kd.data(), false, h.S.data(), -1.0, U.data());
  for (std::int64_t i = 0; i < C; ++i) {
    double* u = U.data() + i * V;
    for (std::int64_t d = 0; d < V; ++d) u[d] *= beta[i];
    MulAdd(1, i, V, A.data() + i * C, false, U.data(), -1.0, u);
  }
  std::fill(out, out + C * V, 0.0);
  MulAdd(C, K, V, Qd.data(), false, h.S.data(), 1.0, out);
  MulAdd(C, C, V, B.data(), false, U.data(), 1.0, out);
  for (std::int64_t i = 0; i < K * V; ++i) h.S[i] *= std::exp(g(C - 1, i / V));
  MulAdd(K, C, V, Kr.data(), true, U.data(), 1.0, h.S.data());
}

void Step(Head& h, std::int64_t t, double* o) {
  const auto K = h.K, V = h.V;
  const double *k = &h.k[t * K], *q = &h.q[t * K];
  Array<double> u(&h.v[t * V], &h.v[t * V] + V);
  for (std::int64_t d = 0; d < K; ++d) {
    const double decay = std::exp(h.g[t * K + d]);
    for (std::int64_t e = 0; e < V; ++e) {
      double& s = h.S[d * V + e];
      s *= decay;
      u[e] -= s * k[d];
    }
  }
  std::fill(o, o + V, 0.0);
  for (std::int64_t d = 0; d < K; ++d) {
    for (std::int64_t e = 0; e < V; ++e) {
      double& s = h.S[d * V + e];
      s += k[d] * h.beta[t] * u[e];
      o[e] += s * q[d];
    }
  }
}

/// Runs `body(head, t, count, out)` over every head and sequence, `step` tokens at a time.
template <class Body>
void ForEachHead(const KdaArgs& a, std::int64_t step, Body&& body) {
  for (std::size_t s = 0; s < a.sequences.size(); ++s) {
    for (std::int64_t n = 0; n < a.n_heads; ++n) {
      if (a.sequences[s].count == 0) continue;
      Head h(a, s, n);
      Array<double> out(step * h.V);
      for (std::int64_t t = 0; t < h.T; t += step) {
        const std::int64_t count = std::min(step, h.T - t);
        body(h, t, count, out.data());
        for (std::int64_t i = 0; i < count * h.V; ++i) {
          a.o(a.sequences[s].begin + t + i / h.V, n * h.V + i % h.V) = static_cast<float>(out[i]);
        }
      }
      float* state = a.states[s] + n * h.K * h.V;
      for (std::int64_t i = 0; i < h.S.size(); ++i) state[i] = static_cast<float>(h.S[i]);
    }
  }
}

}  // namespace

void ReferenceBackend::ShortConv(const ShortConvArgs& a) {
  const auto P = a.w.dim(0), k = a.w.dim(1);
  for (std::size_t s = 0; s < a.sequences.size(); ++s) {
    const auto [begin, count] = a.sequences[s];
    float* history = a.histories[s];
    for (std::int64_t c = 0; c < P; ++c) {
      auto at = [&](std::int64_t t) {  // t relative to the start; negative reaches into history
        return t < 0 ? history[(k - 1 + t) * P + c] : a.x(begin + t, c);
      };
      for (std::int64_t t = 0; t < count; ++t) {
        double sum = 0;
        for (std::int64_t j = 0; j < k; ++j) {
          sum += static_cast<double>(a.w(c, j)) * at(t - k + 1 + j);
        }
        a.y(begin + t, c) = static_cast<float>(sum * ref::Sigmoid(sum));
      }
      for (std::int64_t j = 0; j < k - 1; ++j) history[j * P + c] = at(count - k + 1 + j);
    }
  }
}

void ReferenceBackend::KdaGate(const KdaGateArgs& a) {
  const auto N = a.a_log.dim(0), K = a.f.dim(1) / N;
  for (std::int64_t t = 0; t < a.f.dim(0); ++t) {
    for (std::int64_t c = 0; c < N * K; ++c) {
      const double z = static_cast<double>(a.f(t, c)) + a.dt_bias(c),
                   e = std::exp(static_cast<double>(a.a_log(c / K)));
      a.g(t, c) = static_cast<float>(a.lower_bound ? *a.lower_bound * ref::Sigmoid(e * z)
                                                   : -e * ref::Softplus(z));
    }
  }
}

void ReferenceBackend::KdaRecurrent(const KdaArgs& a) {
  ForEachHead(a, 1, [](Head& h, std::int64_t t, std::int64_t, double* out) { Step(h, t, out); });
}

void ReferenceBackend::KdaChunk(const KdaArgs& a) { ForEachHead(a, a.chunk, Chunk); }

}  // namespace k3
