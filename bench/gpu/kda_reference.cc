#include "kda_reference.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

namespace k3::bench {
namespace {

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// One head of one sequence, in float64.
class Head {
 public:
  Head(const Problem& p, const Inputs& x, int sequence, int head)
      : p_(p), x_(x), D_(p.dim), sequence_(sequence), head_(head) {
    begin_ = x.cu[static_cast<std::size_t>(sequence)];
    T_ = p.lengths[static_cast<std::size_t>(sequence)];
    a_ = std::exp(static_cast<double>(x.a_log[static_cast<std::size_t>(head)]));
    q_.resize(Size(T_ * D_)), k_ = v_ = z_ = g_ = q_;
    q_norm_.resize(Size(T_)), k_norm_ = beta_ = q_norm_;
    for (std::int64_t t = 0; t < T_; ++t) LoadToken(t);
    S_.resize(Size(D_ * D_));
    for (std::int64_t i = 0; i < D_ * D_; ++i) {
      S_[Size(i)] = p.initial_state ? x.state[Size(StateAt() + i)] : 0.0;
    }
  }

  void Forward(Outputs& out, std::vector<double>* token_states, bool keep) {
    if (keep) history_.push_back(S_);
    for (std::int64_t t = 0; t < T_; ++t) {
      Step(t, &out.o[Size(((begin_ + t) * p_.n_heads + head_) * D_)]);
      if (keep) history_.push_back(S_);
      if (token_states) {
        std::copy(S_.begin(), S_.end(),
                  token_states->begin() + ((begin_ + t) * p_.n_heads + head_) * D_ * D_);
      }
    }
    std::copy(S_.begin(), S_.end(), out.state.begin() + StateAt());
  }

  void Backward(Outputs& out);

 private:
  static std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }
  std::int64_t StateAt() const {
    return (static_cast<std::int64_t>(sequence_) * p_.n_heads + head_) * D_ * D_;
  }
  double Value(int which, const Bits& bits, std::size_t at) const {
    return x_.wide[which].empty() ? static_cast<double>(FromBits(bits[at])) : x_.wide[which][at];
  }
  void LoadToken(std::int64_t t) {
    const std::int64_t at = (begin_ + t) * x_.row + head_ * D_;
    double qq = 0, kk = 0;
    for (std::int64_t d = 0; d < D_; ++d) {
      const auto from = Size(at + d), to = Size(t * D_ + d);
      q_[to] = Value(0, x_.q, from), k_[to] = Value(1, x_.k, from), v_[to] = Value(2, x_.v, from);
      qq += q_[to] * q_[to], kk += k_[to] * k_[to];
      const double z = FromBits(x_.f[from]) + static_cast<double>(x_.dt_bias[Size(head_ * D_ + d)]);
      z_[to] = z;
      g_[to] = p_.lower_bound < 0 ? static_cast<double>(p_.lower_bound) * Sigmoid(a_ * z)
                                  : -a_ * (z > 30 ? z : std::log1p(std::exp(z)));
    }
    q_norm_[Size(t)] = 1 / std::sqrt(qq + 1e-6), k_norm_[Size(t)] = 1 / std::sqrt(kk + 1e-6);
    for (std::int64_t d = 0; d < D_; ++d) {
      q_[Size(t * D_ + d)] *= q_norm_[Size(t)];
      k_[Size(t * D_ + d)] *= k_norm_[Size(t)];
    }
    beta_[Size(t)] = Sigmoid(FromBits(x_.beta[Size((begin_ + t) * p_.n_heads + head_)]));
  }
  void Step(std::int64_t t, double* o) {
    const double *k = &k_[Size(t * D_)], *q = &q_[Size(t * D_)], *g = &g_[Size(t * D_)];
    std::vector<double> u(&v_[Size(t * D_)], &v_[Size(t * D_)] + D_);
    for (std::int64_t d = 0; d < D_; ++d) {
      const double decay = std::exp(g[d]);
      double* row = &S_[Size(d * D_)];
      for (std::int64_t e = 0; e < D_; ++e) row[e] *= decay, u[Size(e)] -= row[e] * k[d];
    }
    std::fill(o, o + D_, 0.0);
    for (std::int64_t d = 0; d < D_; ++d) {
      const double kb = k[d] * beta_[Size(t)], qs = q[d] * static_cast<double>(x_.scale);
      double* row = &S_[Size(d * D_)];
      for (std::int64_t e = 0; e < D_; ++e) row[e] += kb * u[Size(e)], o[e] += row[e] * qs;
    }
  }

  const Problem& p_;
  const Inputs& x_;
  const std::int64_t D_;
  const int sequence_, head_;
  std::int64_t begin_ = 0, T_ = 0;
  double a_ = 1;
  std::vector<double> q_, k_, v_, z_, g_, q_norm_, k_norm_, beta_, S_;
  std::vector<std::vector<double>> history_;  // S before token t
};

/// Spec 6.2, token by token from the end.
void Head::Backward(Outputs& out) {
  std::vector<double> dS(Size(D_ * D_)), e(Size(D_)), du(Size(D_)), dq(Size(D_)), dk(Size(D_));
  for (std::int64_t i = 0; i < D_ * D_; ++i) dS[Size(i)] = x_.d_state[Size(StateAt() + i)];
  for (std::int64_t t = T_ - 1; t >= 0; --t) {
    const double *k = &k_[Size(t * D_)], *q = &q_[Size(t * D_)], beta = beta_[Size(t)];
    const std::vector<double>&before = history_[Size(t)], &after = history_[Size(t + 1)];
    const std::int64_t at = (begin_ + t) * x_.row + head_ * D_;
    const std::int64_t dense = ((begin_ + t) * p_.n_heads + head_) * D_;
    for (std::int64_t j = 0; j < D_; ++j) e[Size(j)] = v_[Size(t * D_ + j)], du[Size(j)] = 0;
    for (std::int64_t d = 0; d < D_; ++d) {
      const double decay = std::exp(g_[Size(t * D_ + d)]),
                   qs = q[d] * static_cast<double>(x_.scale);
      double sum = 0;
      for (std::int64_t j = 0; j < D_; ++j) {
        const double go = FromBits(x_.d_o[Size(at + j)]);
        sum += after[Size(d * D_ + j)] * go;
        dS[Size(d * D_ + j)] += qs * go;
        du[Size(j)] += dS[Size(d * D_ + j)] * k[d];
        e[Size(j)] -= decay * before[Size(d * D_ + j)] * k[d];
      }
      dq[Size(d)] = sum * static_cast<double>(x_.scale);
    }
    double dbeta = 0;
    for (std::int64_t j = 0; j < D_; ++j) {
      dbeta += e[Size(j)] * du[Size(j)];
      out.dv[Size(dense + j)] = beta * du[Size(j)];
    }
    out.dbeta[Size((begin_ + t) * p_.n_heads + head_)] = dbeta * beta * (1 - beta);
    double qdq = 0, kdk = 0;
    for (std::int64_t d = 0; d < D_; ++d) {
      const double g = g_[Size(t * D_ + d)], decay = std::exp(g), z = z_[Size(t * D_ + d)];
      double sum = 0, dg = 0;
      for (std::int64_t j = 0; j < D_; ++j) {
        double& ds = dS[Size(d * D_ + j)];
        const double s = decay * before[Size(d * D_ + j)];
        sum += ds * beta * e[Size(j)] - beta * s * du[Size(j)];
        ds -= k[d] * beta * du[Size(j)];
        dg += ds * s;
        ds *= decay;
      }
      dk[Size(d)] = sum;
      qdq += q[d] * dq[Size(d)], kdk += k[d] * sum;
      const double dz = p_.lower_bound < 0 ? g * Sigmoid(-a_ * z) * a_ * dg : -a_ * Sigmoid(z) * dg;
      const double da = p_.lower_bound < 0 ? dz * z : g * dg;
      out.df[Size(dense + d)] = dz;
      out.da_log[Size(sequence_ * p_.n_heads + head_)] += da;
      out.ddt_bias[Size((sequence_ * p_.n_heads + head_) * D_ + d)] += dz;
    }
    for (std::int64_t d = 0; d < D_; ++d) {
      out.dq[Size(dense + d)] = q_norm_[Size(t)] * (dq[Size(d)] - q[d] * qdq);
      out.dk[Size(dense + d)] = k_norm_[Size(t)] * (dk[Size(d)] - k[d] * kdk);
    }
  }
  std::copy(dS.begin(), dS.end(), out.d_state.begin() + StateAt());
}

}  // namespace

float FromBits(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
std::uint16_t ToBits(float x) {
  std::uint32_t wide;
  std::memcpy(&wide, &x, 4);
  return static_cast<std::uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
}

Inputs MakeInputs(const Problem& p) {
  std::mt19937 random(p.seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  Inputs x;
  x.cu.push_back(0);
  for (int length : p.lengths) x.cu.push_back(x.cu.back() + length);
  x.tokens = x.cu.back();
  const std::int64_t width = static_cast<std::int64_t>(p.n_heads) * p.dim;
  x.row = width + p.pad;
  x.scale = 1.f / std::sqrt(static_cast<float>(p.dim));
  const auto n = static_cast<std::size_t>(x.tokens * x.row);
  auto fill = [&](Bits& to, std::size_t count, float spread) {
    to.resize(count);
    for (auto& bits : to) bits = ToBits(spread * normal(random));
  };
  fill(x.q, n, 1), fill(x.k, n, 1), fill(x.v, n, 1), fill(x.d_o, n, 1);
  fill(x.f, n, p.regime == Regime::kLong ? 0.3f : 1.f);
  fill(x.beta, static_cast<std::size_t>(x.tokens * p.n_heads), 1);
  if (p.same_keys && x.tokens > 0) {
    for (std::int64_t t = 1; t < x.tokens; ++t)
      std::copy_n(x.k.begin(), width, &x.k[static_cast<std::size_t>(t * x.row)]);
    std::fill(x.beta.begin(), x.beta.end(), ToBits(6.f));
  }
  for (int h = 0; h < p.n_heads; ++h) x.a_log.push_back(0.2f * normal(random));
  for (std::int64_t i = 0; i < width; ++i) {
    const float bias = p.regime == Regime::kMid    ? 0.6f
                       : p.regime == Regime::kLong ? -8.5f
                       : p.regime == Regime::kHard ? 40.f
                                                   : 12.f * uniform(random) - 9.f;
    x.dt_bias.push_back(bias);
  }
  const auto states = p.lengths.size() * static_cast<std::size_t>(width * p.dim);
  x.state.resize(states), x.d_state.resize(states);
  for (auto& s : x.state) s = 0.3f * normal(random);
  for (auto& s : x.d_state) s = 0.1f * normal(random);
  return x;
}

Outputs Reference(const Problem& p, const Inputs& x, bool backward,
                  std::vector<double>* token_states) {
  const auto rows = static_cast<std::size_t>(x.tokens * p.n_heads);
  const auto dim = static_cast<std::size_t>(p.dim),
             pairs = p.lengths.size() * static_cast<std::size_t>(p.n_heads);
  Outputs out;
  out.o.resize(rows * dim), out.state.resize(pairs * dim * dim);
  if (token_states) token_states->resize(rows * dim * dim);
  if (backward) {
    out.dq.resize(rows * dim), out.dk = out.dv = out.df = out.dq;
    out.dbeta.resize(rows), out.d_state.resize(pairs * dim * dim);
    out.da_log.resize(pairs), out.ddt_bias.resize(pairs * dim);  // one share for each sequence
  }
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> threads;
  const std::size_t workers =
      std::min<std::size_t>(pairs, std::max(1u, std::thread::hardware_concurrency()));
  for (std::size_t w = 0; w < workers; ++w) {
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < pairs; i = next++) {
        Head head(p, x, static_cast<int>(i) / p.n_heads, static_cast<int>(i) % p.n_heads);
        head.Forward(out, token_states, backward);
        if (backward) head.Backward(out);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (backward) {
    const auto heads = static_cast<std::size_t>(p.n_heads);
    for (std::size_t i = heads; i < pairs; ++i) out.da_log[i % heads] += out.da_log[i];
    for (std::size_t i = heads * dim; i < pairs * dim; ++i) {
      out.ddt_bias[i % (heads * dim)] += out.ddt_bias[i];
    }
    out.da_log.resize(heads), out.ddt_bias.resize(heads * dim);
  }
  return out;
}

double RelativeError(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return INFINITY;
    difference += (a[i] - b[i]) * (a[i] - b[i]), norm += b[i] * b[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

}  // namespace k3::bench
